"""What a manifest claims against what its report says (E_EVIDENCE)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from specctl.artifacts.evidence_paths import PROMPTS, Report
from specctl.artifacts.facts import Evidence, Metric
from specctl.artifacts.manifest import REPORT_JSON, Manifest
from specctl.errors import ArtifactError

Figure = tuple[float, tuple[float | None, float | None] | None]
"""A number, and the ends of its interval; None where none is stated."""


def check_evidence(manifest: Manifest, report: Any) -> None:
    """Refuses a figure that its own report does not hold.

    Every defined metric must stand in `report.json` where fits of its kind put it
    (`evidence_paths`), with the same interval and over as many prompts, as far as the report states
    them. A metric that no fit of ours writes may stand anywhere in it. A number that somebody
    forged in both places is only as good as the signature.

    Args:
        report: value of `report.json`; None where there is none, and nothing is compared.

    Raises:
        ArtifactError: E_EVIDENCE.
    """
    evidence = manifest.evidence
    if report is None or evidence is None:
        return
    figures = Figures(report)
    for name, metric in evidence.metrics.items():
        if metric.value is not None:
            figures.check(name, metric)
    _check_prompts(evidence, figures.report)


class Figures:
    """What a report states, looked up for one metric after the other."""

    def __init__(self, report: Any) -> None:
        self.report = Report(report)

    def check(self, name: str, metric: Metric) -> None:
        """Refuses a metric that the report does not hold (E_EVIDENCE)."""
        places = self.report.holders(name)
        stated = {_figure(*place) for place in places} if places else self.anywhere
        ends = (metric.low, metric.high)
        if stated.isdisjoint({(metric.value, None), (metric.value, ends)}):
            raise _forged(f"metric {name}", _words(metric))
        if metric.num_prompts is not None and self.counts.isdisjoint({metric.num_prompts, None}):
            raise _forged(f"metric {name}", f"{metric.num_prompts} prompts")

    @cached_property
    def anywhere(self) -> set[Figure | None]:
        """Every number of the report, for metrics that no fit of ours writes."""
        return {_figure(*place) for place in _places(self.report.tree)}

    @cached_property
    def counts(self) -> set[int | None]:
        """The numbers of prompts that the report states; None is any, where it states none."""
        places = [path for paths in PROMPTS.values() for path in paths]
        stated = self.report.at([*places, ("clip", "num_prompts")])
        return {found for found in stated if _is_number(found)} if stated else {None}


def _figure(holder: dict[Any, Any], key: str, beside: Any) -> Figure | None:
    """What one place of a report says; None where it is no number, or no interval is to be had."""
    stated, ends = holder[key], _stated_ends(holder, key, beside)
    if isinstance(stated, dict):
        ends = (stated.get("low"), stated.get("high"))
        stated = stated.get("value")
    if ends is not None and None in ends:
        ends = (None, None)  # an interval with one end is none: `Metric.of`
    numbers = (stated, *(end for end in ends or () if end is not None))
    return (stated, ends) if all(map(_is_number, numbers)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stated_ends(holder: dict[Any, Any], key: str, beside: Any) -> tuple[Any, Any] | None:
    """The interval beside a figure: `KEY_interval`, that of all figures, or plain ends."""
    found = holder.get(f"{key}_interval")
    if found is None and isinstance(beside, dict):
        found = beside.get(key)
    if isinstance(found, dict):
        return found.get("low"), found.get("high")
    if isinstance(found, list) and len(found) == 2:
        return found[0], found[1]
    return (holder["low"], holder["high"]) if {"low", "high"} <= holder.keys() else None


def _places(report: Any) -> Iterator[tuple[dict[Any, Any], str, Any]]:
    """Every number of a report; in a list it has no interval beside it."""
    pending = [report] if isinstance(report, dict | list) else []
    while pending:
        tree = pending.pop()
        inner = tree.items() if isinstance(tree, dict) else (("", one) for one in tree)
        for key, one in inner:
            if isinstance(one, dict | list):
                pending.append(one)
            elif _is_number(one):
                yield (tree if isinstance(tree, dict) else {key: one}), key, None


def _check_prompts(evidence: Evidence, report: Report) -> None:
    """The sizes of the splits are those of the report, and add up to what is behind the policy."""
    for side, size in evidence.splits.items():
        stated = report.at(PROMPTS.get(side, ()))
        if stated and size.num_prompts not in stated:
            raise _forged(f"prompts of {side}", str(size.num_prompts))
    total = sum(size.num_prompts for size in evidence.splits.values())
    if evidence.splits and evidence.num_prompts != total:
        raise _forged("prompts", f"{evidence.num_prompts}, where the splits have {total}")


def _words(metric: Metric) -> str:
    ends = "" if metric.low is None else f" [{metric.low:g}, {metric.high:g}]"
    return f"{metric.value:g}{ends}, which it does not hold"


def _forged(what: str, found: str) -> ArtifactError:
    return ArtifactError(
        "E_EVIDENCE",
        what,
        expected=f"what {REPORT_JSON} says",
        found=found,
        fix="fit the policy again from its traces",
    )
