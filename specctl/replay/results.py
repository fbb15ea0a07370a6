"""The result of a replay as one JSON document and as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specctl import formatting
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.replay.batch_figures import BatchFigures, plain_intervals
from specctl.replay.batch_simulation import Load
from specctl.results import ImportScores, PolicyFigures, ReplayScores
from specctl.runtime.output import json_bytes, write_whole
from specctl.stats import Interval

RESULTS_NAME = "replay.json"


class Result(Protocol):
    """What a replay gave: one JSON value, and what a person sees of it."""

    def to_json(self) -> dict[str, Any]: ...

    def shown(self) -> list[Any]:
        """Renderables, top to bottom."""
        ...


def write_result(result: Result, folder: Path) -> Path:
    """Writes `replay.json`.

    Raises:
        OutputError: it cannot be written.
    """
    path = folder / RESULTS_NAME
    write_whole(path, json_bytes(result.to_json()), "replay results")
    return path


@dataclass(frozen=True)
class Caption:
    """What tables say of the log.

    Attributes:
        subject: whose rounds these are. sampling: how the text was made.
        advice: what to do where the log lacks what a policy wanted.
        remarks: further lines below the tables.
    """

    subject: str
    sampling: str
    advice: str
    remarks: tuple[str, ...] = ()


def facts_of(traces: TraceSet, log: DenseLog, cost_model: str | None) -> dict[str, Any]:
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
    note = formatting.fixture_note(str(facts["target"]))
    return Caption(
        subject=f"{facts['target']} + {facts['drafter']}",
        sampling=formatting.sampling(facts["sampling"]) + (f" ({note})" if note else ""),
        advice="Collect deeper or wider (--depth, --width).",
    )


@dataclass(frozen=True)
class ReplayResult:
    """Scores on one log. `by_category`: show a table for each category too."""

    scores: ReplayScores | ImportScores
    caption: Caption
    by_category: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.scores.kind, **self.scores.to_json()}

    def shown(self) -> list[Any]:
        """Tables, then notes: the baseline, and what the log cannot tell."""
        from rich.text import Text

        policies = self.scores.policies
        pooled = [policy.pooled for policy in policies]
        groups = [pooled]
        if self.by_category:
            groups += map(list, zip(*(policy.by_category for policy in policies), strict=True))
        lines = [
            f"× is relative to {self.scores.baseline}, paired by prompt.",
            *(
                f"* {f.policy}: the log holds {f.expansion_support:.1%} of its expansions and "
                f"{f.censored_share:.1%} of its rounds run out of it; calls between "
                f"{f.bounds['calls'].low:.0f} and {f.bounds['calls'].high:.0f}. "
                f"{self.caption.advice}"
                for f in pooled
                if f.is_marked
            ),
            *self.caption.remarks,
        ]
        return [*map(self._table, groups), *map(Text, lines)]

    def _table(self, group: Sequence[PolicyFigures]) -> Any:
        """One row a policy: counts, ratios with intervals, support."""

        first = group[0]
        where = "" if first.group == "all" else f", {first.group}"
        title = (
            f"{self.caption.subject}{where}: {first.num_prompts} prompts, {first.num_tokens} "
            f"tokens, {self.caption.sampling}; 95% intervals by prompt"
        )
        timed = ["tokens/s", "time ×"] if first.time_us is not None else []
        names = ["policy", "calls", "verified", "τ", "calls ×", "verified ×", *timed]
        columns = [*names, "use", "support"]
        return formatting.terminal_table(title, columns, map(_replay_cells, group))


def _replay_cells(f: PolicyFigures) -> list[str]:
    ratios, against = f.ratios, f.against
    timed = []
    if f.time_us is not None:
        rate = ratios["tokens_per_s"]
        timed = [rate.text(".0f"), against["time_us"].text(".2f")]
    return [
        f.policy + ("*" if f.is_marked else ""),
        str(f.calls),
        str(f.verified_tokens),
        ratios["mean_acceptance_length"].text(".2f"),
        against["calls"].text(".2f"),
        against["verified"].text(".2f"),
        *timed,
        formatting.number(ratios["draft_utilisation"].value, ".0%"),
        f"{f.expansion_support:.2%}",
    ]


@dataclass(frozen=True)
class ServingResult:
    """Figures of several policies that serve one load.

    Attributes:
        facts: pair, log, support, sampling, cost model; plain JSON values.
        baseline: label of the policy that the others are compared with.
        against: by label, ratios to the baseline's; None where a run is never steady.
    """

    facts: dict[str, Any]
    caption: Caption
    load: Load
    baseline: str
    policies: tuple[BatchFigures, ...]
    against: dict[str, dict[str, Interval] | None]

    def to_json(self) -> dict[str, Any]:
        policies = [
            {**figures.to_json(), "against": None if paired is None else plain_intervals(paired)}
            for figures, paired in zip(self.policies, self.against.values(), strict=True)
        ]
        head = {"kind": "replay-serving", **self.facts, "load": vars(self.load).copy()}
        return {**head, "baseline": self.baseline, "policies": policies}

    def shown(self) -> list[Any]:
        """The table, then notes."""
        from rich.text import Text

        is_steady = all(figures.steady is not None for figures in self.policies)
        found = [self._found(figures, is_steady=is_steady) for figures in self.policies]
        columns = {name: column for name, column in SERVING_COLUMNS.items() if name in found[0]}
        rows = [
            [
                figures.policy + ("*" if figures.is_marked else ""),
                *(write(of[name]) for name, (_, write) in columns.items()),
                f"{figures.expansion_support:.2%}",
            ]
            for figures, of in zip(self.policies, found, strict=True)
        ]
        headings = ["policy", *(heading for heading, _ in columns.values()), "support"]
        table = formatting.terminal_table(self._title(), headings, rows)
        part = "without ramp-up and drain" if is_steady else "with ramp-up and drain"
        lines = [
            f"Simulated under the cost model, {part}; trees of a batch verified back to back.",
            f"× is tokens/s relative to {self.baseline}, paired by run; times are in ms, verified "
            "and batch are tokens and requests of a step.",
            *(
                f"* {f.policy}: the log holds {f.expansion_support:.1%} of its expansions and "
                f"{f.censored_share:.1%} of its rounds run out of it. {self.caption.advice}"
                for f in self.policies
                if f.is_marked
            ),
        ]
        return [table, *map(Text, lines)]

    def _found(self, figures: BatchFigures, *, is_steady: bool) -> dict[str, Interval]:
        """Figures by name; those against the baseline as `× name`."""
        paired = (self.against[figures.policy] or {}).items()
        shown = figures.steady if is_steady else figures.whole
        return {**(shown or {}), **{f"× {name}": span for name, span in paired}}

    def _title(self) -> str:
        first, load = self.policies[0], self.load
        arrivals = "closed loop" if load.is_closed else f"{load.arrival_rate_per_s:g} requests/s"
        return (
            f"{self.caption.subject}: batch size {load.batch_size}, {arrivals}, {first.num_runs} "
            f"runs of {first.num_requests} requests, {self.caption.sampling}; 95% intervals by run"
        )


def _milliseconds(found: Interval) -> str:
    return formatting.number(found.value / 1e3)


def _number(found: Interval) -> str:
    return formatting.number(found.value)


SERVING_COLUMNS: dict[str, tuple[str, Callable[[Interval], str]]] = {
    "tokens_per_s": ("tokens/s", lambda found: found.text(".0f")),
    "× tokens_per_s": ("×", lambda found: found.text(".2f")),
    "tpot_p50_us": ("TPOT p50", _milliseconds),
    "tpot_p99_us": ("p99", _milliseconds),
    "ttft_p50_us": ("TTFT p50", _milliseconds),
    "goodput_share": ("good", lambda found: formatting.number(found.value, ".0%")),
    "mean_acceptance_length": ("τ", _number),
    "verified_per_step": ("verified", _number),
    "requests_per_step": ("batch", _number),
}
"""Heading of each figure that is shown, and how it is written."""
