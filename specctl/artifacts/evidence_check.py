"""What a manifest claims against what its report says (E_EVIDENCE)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.artifacts.evidence_paths import PROMPTS, count_at, holders
from specctl.artifacts.facts import Evidence, Metric
from specctl.artifacts.manifest import REPORT_JSON, Manifest
from specctl.errors import ArtifactError


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
    for name, metric in evidence.metrics.items():
        if metric.value is not None:
            _check_metric(name, metric, report)
    _check_prompts(evidence, report)


def _check_metric(name: str, metric: Metric, report: Any) -> None:
    own = holders(report, name) or list(_anywhere(report, metric.value))
    if not any(_agrees(metric, *place) for place in own):
        raise _forged(f"metric {name}", _words(metric))
    if metric.num_prompts is not None and not _is_count(metric.num_prompts, report):
        raise _forged(f"metric {name}", f"{metric.num_prompts} prompts")


def _agrees(metric: Metric, holder: dict[Any, Any], key: str, beside: Any) -> bool:
    """Whether one place of a report says this value, and this interval if it says one."""
    stated, ends = holder[key], _stated_ends(holder, key, beside)
    if isinstance(stated, dict):
        ends = (stated.get("low"), stated.get("high"))
        stated = stated.get("value")
    if ends is not None and None in ends:
        ends = (None, None)  # an interval with one end is none: `Metric.of`
    return stated == metric.value and ends in (None, (metric.low, metric.high))


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


def _anywhere(report: Any, value: float | None) -> Iterator[tuple[dict[Any, Any], str, Any]]:
    """Every place of a report that says a number; in a list it has no interval beside it."""
    pending = [report] if isinstance(report, dict | list) else []
    while pending:
        tree = pending.pop()
        inner = tree.items() if isinstance(tree, dict) else (("", one) for one in tree)
        for key, one in inner:
            if isinstance(one, dict | list):
                pending.append(one)
            elif one == value and not isinstance(one, bool):
                yield (tree if isinstance(tree, dict) else {key: one}), key, None


def _is_count(num_prompts: int, report: Any) -> bool:
    """Whether it is one of the numbers of prompts that a report states, if it states any."""
    places = [path for paths in PROMPTS.values() for path in paths]
    places += [("clip", "num_prompts")]
    stated = list(count_at(report, tuple(places)))
    return not stated or num_prompts in stated


def _check_prompts(evidence: Evidence, report: Any) -> None:
    """The sizes of the splits are those of the report, and add up to what is behind the policy."""
    for side, size in evidence.splits.items():
        stated = list(count_at(report, PROMPTS.get(side, ())))
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
