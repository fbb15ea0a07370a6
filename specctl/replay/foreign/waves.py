"""Imported chains in waves of requests, as one JSON document and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.replay.foreign.batches import BatchRun
from specctl.replay.results import Caption
from specctl.results import MARKED_BELOW

COMPARED = {"calls": "calls", "verified": "verified_tokens", "time_us": "time_us"}
"""As in `replay.score`: name of a ratio to the baseline's, and what is compared."""


@dataclass(frozen=True)
class WavesResult:
    """Totals of chains over one import; see `simulate_batches` for what a wave is.

    Attributes:
        facts: import, drafters, cost model; plain JSON values.
        baseline: label of the policy that the others are compared with.
        k_table: as it was given; None without one.
        runs: by label.
    """

    facts: dict[str, Any]
    caption: Caption
    baseline: str
    batch_size: int
    k_table: str | None
    runs: Mapping[str, BatchRun]

    def to_json(self) -> dict[str, Any]:
        load = {"batch_size": self.batch_size, "order": "waves", "k_table": self.k_table}
        policies = [{"policy": label, **self._figures(run)} for label, run in self.runs.items()]
        head = {"kind": "replay-waves", **self.facts, "load": load, "baseline": self.baseline}
        return {**head, "policies": policies}

    def _figures(self, run: BatchRun) -> dict[str, Any]:
        return {
            **vars(run),
            "mean_acceptance_length": run.mean_acceptance_length,
            "tokens_per_s": run.tokens_per_s,
            "draft_utilisation": run.num_accepted / run.num_drafted if run.num_drafted else None,
            "censored_share": run.censored_share,
            "is_marked": is_marked(run),
            "against": against(run, self.runs[self.baseline]),
        }

    def shown(self) -> list[Any]:
        """The table, then notes."""
        from rich.text import Text

        return [self._table(), *(Text(line) for line in self._notes())]

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self._title()), title_justify="left")
        table.add_column("policy", no_wrap=True)
        base = self.runs[self.baseline]
        for name in _columns(base):
            table.add_column(name, justify="right")
        for label, run in self.runs.items():
            mark = "*" if is_marked(run) else ""
            table.add_row(Text(label + mark), *_cells(run, base))
        return table

    def _title(self) -> str:
        first, caption = self.runs[self.baseline], self.caption
        return (
            f"{caption.subject}: {first.num_requests} requests, {first.num_tokens} tokens, "
            f"batch size {self.batch_size}, {caption.sampling}"
        )

    def _notes(self) -> list[str]:
        marked = [(label, run) for label, run in self.runs.items() if is_marked(run)]
        return [
            f"× is relative to {self.baseline}.",
            f"Waves: requests in file order, {self.batch_size} at a time, each wave until it is "
            "empty. Totals of one order, so without intervals; time is that of rounds, prompts' "
            "reading excluded.",
            *(
                f"* {label}: {run.censored_share:.1%} of its rounds run out of the log, so it may "
                f"need fewer calls than shown. {self.caption.advice}"
                for label, run in marked
            ),
            *self.caption.remarks,
        ]


def is_marked(run: BatchRun) -> bool:
    """The log tells less than 99% of the rounds.

    Bounds are for replay without a batch: where the length follows the batch, a longer
    acceptance changes who meets later.
    """
    return 1 - run.censored_share < MARKED_BELOW


def against(run: BatchRun, base: BatchRun) -> dict[str, float]:
    """Ratio of each of `COMPARED` to the baseline's; times only with a cost model."""
    return {
        name: getattr(run, total) / getattr(base, total)
        for name, total in COMPARED.items()
        if getattr(base, total) is not None
    }


def _columns(run: BatchRun) -> list[str]:
    timed = ["tokens/s", "time ×"] if run.time_us is not None else []
    return ["steps", "calls", "verified", "τ", "calls ×", "verified ×", *timed, "use", "censored"]


def _cells(run: BatchRun, base: BatchRun) -> list[str]:
    ratios = against(run, base)
    timed = []
    if run.tokens_per_s is not None:
        timed = [f"{run.tokens_per_s:.0f}", f"{ratios['time_us']:.3f}"]
    return [
        str(run.num_steps),
        str(run.calls),
        str(run.verified_tokens),
        f"{run.mean_acceptance_length:.3f}",
        f"{ratios['calls']:.3f}",
        f"{ratios['verified']:.3f}",
        *timed,
        f"{run.num_accepted / run.num_drafted:.0%}" if run.num_drafted else "-",
        f"{run.censored_share:.2%}",
    ]
