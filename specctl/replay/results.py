"""The result of a replay as one JSON document and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specctl.logs.trace_columns import Traces
from specctl.logs.tree_log import DenseLog
from specctl.results import PolicyFigures, PolicyScores
from specctl.runtime.output import json_bytes, write_whole

RESULTS_NAME = "replay.json"


class Result(Protocol):
    """What a replay gave: one JSON value, and what a person sees of it."""

    def to_json(self) -> dict[str, Any]: ...

    def shown(self) -> list[Any]:
        """Renderables, top to bottom."""
        ...


@dataclass(frozen=True)
class Caption:
    """What tables say of the log.

    Attributes:
        subject: whose rounds these are. sampling: how the text was made.
        advice: what to do where the log lacks what a policy asked for.
        remarks: further lines below the tables.
    """

    subject: str
    sampling: str
    advice: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplayResult:
    """Scores of several policies on one log, and what they were scored on.

    Attributes:
        facts: pair, log, support, sampling, cost model; plain JSON values.
        baseline: label of the policy that the others are compared with.
        by_category: show a table for each category too.
    """

    facts: dict[str, Any]
    caption: Caption
    baseline: str
    policies: tuple[PolicyScores, ...]
    by_category: bool = False

    def to_json(self) -> dict[str, Any]:
        scored = [policy.to_json() for policy in self.policies]
        return {"kind": "replay", **self.facts, "baseline": self.baseline, "policies": scored}

    def shown(self) -> list[Any]:
        """Tables, then notes."""
        groups = ["all", *(group_names(self.policies) if self.by_category else ())]
        return [*(summary_table(self, group) for group in groups), *notes(self)]


def write_result(result: Result, folder: Path) -> Path:
    """Writes `replay.json`.

    Raises:
        OutputError: it cannot be written.
    """
    path = folder / RESULTS_NAME
    write_whole(path, json_bytes(result.to_json()), "replay results")
    return path


def facts_of(traces: Traces, log: DenseLog, cost_model: str | None) -> dict[str, Any]:
    """What the scores hold for. `cost_model`: its digest."""
    from specctl import __version__

    header = traces.header
    return {
        "specctl_version": __version__,
        "traces_digest": log.digest,
        "target": header.collect.get("target", "unnamed"),
        "drafter": header.collect.get("drafter", "unnamed"),
        "target_digest": header.target_digest,
        "drafter_digest": header.drafter_digest,
        "sampling": header.sampling,
        "support": vars(log.support).copy(),
        "cost_model": cost_model,
    }


def caption_of(facts: dict[str, Any]) -> Caption:
    """What tables say of dense traces, from their facts."""
    law = facts["sampling"]
    note = ""
    if str(facts["target"]).startswith("embedded"):
        note = " (the embedded pair is a fixture, no claim about large models)"
    return Caption(
        subject=f"{facts['target']} + {facts['drafter']}",
        sampling=(f"temperature {law['temperature']}" if law["temperature"] else "greedy") + note,
        advice="Collect deeper or wider (--depth, --width).",
    )


def summary_table(result: ReplayResult, group: str = "all") -> Any:
    """One row a policy: counts, ratios with intervals, support."""
    from rich.table import Table

    scored = [figures_of(policy, group) for policy in result.policies]
    shown = [figures for figures in scored if figures is not None]
    first = shown[0]
    table = Table(title=_title(result, first), title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in _columns(first):
        table.add_column(name, justify="right")
    for figures in shown:
        table.add_row(*_cells(figures))
    return table


def figures_of(policy: PolicyScores, group: str) -> PolicyFigures | None:
    """A policy's figures of one group."""
    return next((f for f in (policy.pooled, *policy.by_category) if f.group == group), None)


def _title(result: ReplayResult, first: PolicyFigures) -> Any:
    from rich.text import Text

    caption = result.caption
    where = "" if first.group == "all" else f", {first.group}"
    return Text(  # names are shown, never read as markup
        f"{caption.subject}{where}: {first.num_prompts} prompts, {first.num_tokens} tokens, "
        f"{caption.sampling}; 95% intervals by prompt"
    )


def _columns(figures: PolicyFigures) -> list[str]:
    timed = ["tokens/s", "time ×"] if figures.time_us is not None else []
    return ["calls", "verified", "τ", "calls ×", "verified ×", *timed, "use", "support"]


def _cells(f: PolicyFigures) -> list[Any]:
    from rich.text import Text

    ratios, against = f.ratios, f.against
    mark = "*" if f.is_marked else ""
    timed = []
    if f.time_us is not None:
        rate = ratios["tokens_per_s"]
        timed = [f"{rate.value:.0f} [{rate.low:.0f}, {rate.high:.0f}]", _span(against["time_us"])]
    return [
        Text(f.policy + mark),
        str(f.calls),
        str(f.verified_tokens),
        _span(ratios["mean_acceptance_length"]),
        _span(against["calls"]),
        _span(against["verified"]),
        *timed,
        "-" if math.isnan(ratios["draft_utilisation"].value) else _share(ratios),
        f"{f.expansion_support:.2%}",
    ]


def _share(ratios: dict[str, Any]) -> str:
    return f"{ratios['draft_utilisation'].value:.0%}"


def _span(interval: Any) -> str:
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def notes(result: ReplayResult) -> list[Any]:
    """What a reader of the table must know: the baseline, and what the log cannot tell."""
    from rich.text import Text

    caption = result.caption
    marked = [policy.pooled for policy in result.policies if policy.pooled.is_marked]
    lines = [
        f"× is relative to {result.baseline}, paired by prompt.",
        *(_mark_line(figures, caption.advice) for figures in marked),
        *caption.remarks,
    ]
    return [Text(line) for line in lines]


def _mark_line(f: PolicyFigures, advice: str) -> str:
    calls = f.bounds["calls"]
    return (
        f"* {f.policy}: the log holds {f.expansion_support:.1%} of its expansions and "
        f"{f.censored_share:.1%} of its rounds run out of it; calls between {calls.low:.0f} and "
        f"{calls.high:.0f}. {advice}"
    )


def group_names(policies: Sequence[PolicyScores]) -> list[str]:
    """Categories, in order."""
    return [figures.group for figures in policies[0].by_category]
