"""What fitted gates are worth on prompts that they have not seen: figures, table, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from specctl.policy.parse import canonical_json
from specctl.policy.records import Record
from specctl.stats import Floats, Interval, Split
from specctl.train.echo_levels import Gate, LevelRows
from specctl.train.echo_recall import RecallReport, recall
from specctl.train.tables import table

NUM_BARS = 40


class Replays(Protocol):
    """Sums over the rounds of a policy; see `specctl.replay.fit_inputs.ReplayedTotals`."""

    @property
    def calls(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def verified(self) -> int: ...
    @property
    def levels(self) -> int: ...
    @property
    def utilisation(self) -> float: ...
    @property
    def time_us(self) -> float | None: ...


class LevelReport(Record):
    """One level, 1-based.

    Attributes:
        reached_frac: training positions whose accepted length reaches it.
        auc: area under the ROC curve of its confidence over all training positions, with an
            interval by prompt. held_out_auc: the same on held-out ones.
        gated_auc: among training positions that pass the gates before it; null without a gate.
        threshold: probability below which its gate closes; null without a gate.
    """

    level: int
    reached_frac: float
    auc: Interval
    held_out_auc: Interval
    gated_auc: Interval | None
    threshold: float | None


class GateReport(Record):
    """One gate on held-out positions that pass the gates before it.

    Attributes:
        closes_frac: share of these that it stops.
        true_rate: of those that reach the level, the share that passes. false_rate: of the
            others.
    """

    level: int
    threshold: float
    num_rows: int
    closes_frac: float
    true_rate: float | None
    false_rate: float | None


class ReplayReport(Record):
    """Held-out prompts under a policy, one request at a time.

    Attributes:
        draft_yield: E[L], the paper's Eq. 3 under a cap that is kept: accepted draft tokens a
            round. verified_yield: accepted over verified draft tokens, the paper's words.
        utilisation: u = accepted over drafted levels, of each round, averaged.
        token_us: predicted time per token; null without a cost model.
    """

    mean_acceptance_length: float
    verified_per_call: float
    levels_per_call: float
    draft_yield: float
    verified_yield: float | None
    utilisation: float
    token_us: float | None


class Density(Record):
    """Training and held-out positions by confidence of a level, equal steps of [0, 1]."""

    level: int
    reached: tuple[int, ...]
    missed: tuple[int, ...]


class EchoReport(Record):
    """Everything that is known of a fit; `report.json` is this record.

    Attributes:
        config: settings of the fit.
        num_left_out: positions without a label.
        prompts, rows: numbers on each side of the split.
        replayed: `gates`, and `no_gates` for the same tree without them.
    """

    config: dict[str, JsonValue]
    prompts: dict[str, int]
    rows: dict[str, int]
    num_left_out: int
    levels: tuple[LevelReport, ...]
    gates: tuple[GateReport, ...]
    recall: RecallReport
    replayed: dict[str, ReplayReport]
    densities: tuple[Density, ...]


def build_report(
    levels: Sequence[LevelReport],
    gates: Sequence[Gate],
    held_out: LevelRows,
    split: Split,
    replayed: Mapping[str, Replays],
    *,
    num_rows: dict[str, int],
    num_left_out: int,
    settings: dict[str, JsonValue],
) -> EchoReport:
    """Figures of chosen gates on the held-out side."""
    return EchoReport(
        config=settings,
        prompts={"train": len(split.train), "held_out": len(split.held_out)},
        rows=num_rows,
        num_left_out=num_left_out,
        levels=tuple(levels),
        gates=tuple(_gate_reports(gates, held_out)),
        recall=recall(gates, held_out),
        replayed={name: replay_report(sums) for name, sums in replayed.items()},
        densities=tuple(_density(held_out, level) for level in range(1, held_out.depth + 1)),
    )


def _gate_reports(gates: Sequence[Gate], rows: LevelRows) -> list[GateReport]:
    reports = []
    for gate in gates:
        passes, reached = rows.confidence(gate.level) >= gate.threshold, rows.reached(gate.level)
        reports.append(
            GateReport(
                level=gate.level,
                threshold=gate.threshold,
                num_rows=len(passes),
                closes_frac=float(1 - passes.mean()) if len(passes) else 0.0,
                true_rate=_share(passes[reached]),
                false_rate=_share(passes[~reached]),
            )
        )
        rows = rows.of(passes)
    return reports


def _share(values: NDArray[np.bool_]) -> float | None:
    return float(values.mean()) if len(values) else None


def replay_report(sums: Replays) -> ReplayReport:
    """Ratios of sums, but for u, which is a mean over rounds."""
    drafted = sums.verified - sums.calls
    return ReplayReport(
        mean_acceptance_length=1 + sums.accepted / sums.calls,
        verified_per_call=sums.verified / sums.calls,
        levels_per_call=sums.levels / sums.calls,
        draft_yield=sums.accepted / sums.calls,
        verified_yield=sums.accepted / drafted if drafted else None,
        utilisation=sums.utilisation,
        token_us=None if sums.time_us is None else sums.time_us / sums.tokens,
    )


def _density(rows: LevelRows, level: int) -> Density:
    score, reached = rows.confidence(level), rows.reached(level)
    counts = [_bars(score[side]) for side in (reached, ~reached)]
    return Density(level=level, reached=counts[0], missed=counts[1])


def _bars(score: Floats) -> tuple[int, ...]:
    counts, _ = np.histogram(score, bins=NUM_BARS, range=(0.0, 1.0))
    return tuple(counts.tolist())


def report_json(report: EchoReport) -> bytes:
    """`report.json`: canonical JSON."""
    return canonical_json(report.model_dump(mode="json")).encode()


TABLE_COLUMNS = ("level", "reached", "AUC", "given gates", "held-out AUC", "threshold")
LEGEND = (
    "reached: positions whose accepted length reaches the level; AUC: area under the ROC curve of "
    "its confidence, 95% by prompt; given gates: among positions that pass the gates above; "
    "threshold: probability below which the gate closes"
)


def table_rows(report: EchoReport) -> list[tuple[str, ...]]:
    """One row a level, for the terminal and for the card."""
    return [
        (
            str(row.level),
            f"{row.reached_frac:.0%}",
            row.auc.text(".2f"),
            "" if row.gated_auc is None else row.gated_auc.text(".2f"),
            row.held_out_auc.text(".2f"),
            "" if row.threshold is None else f"{row.threshold:.3f}",
        )
        for row in report.levels
    ]


def summary(report: EchoReport) -> tuple[str, ...]:
    """Lines that go with the table: on how much, and what the gates do."""
    prompts, rows, loss = report.prompts, report.rows, report.recall
    return (
        f"{rows['train']} positions of {prompts['train']} prompts for training, "
        f"{rows['held_out']} of {prompts['held_out']} held out, {report.num_left_out} left out",
        *(_gate_line(gate) for gate in report.gates),
        f"gates cut {loss.loss_frac:.1%} of accepted tokens (mean of {loss.num_prompts} held-out "
        f"prompts, conformal bound {loss.loss_bound:.1%}); {loss.widened_loss_frac:.1%} where "
        "their level is widened",
        *(_replay_line(name, one) for name, one in report.replayed.items()),
    )


def _gate_line(gate: GateReport) -> str:
    rates = [_percent(rate) for rate in (gate.true_rate, gate.false_rate)]
    return (
        f"gate at level {gate.level}, {gate.threshold:.3f}: closes {gate.closes_frac:.0%} of "
        f"{gate.num_rows} held-out positions; passes {rates[0]} of those that reach the level and "
        f"{rates[1]} of the others"
    )


def _replay_line(name: str, one: ReplayReport) -> str:
    time = "" if one.token_us is None else f", {one.token_us:.0f} us a token (cost model)"
    return (
        f"{name.replace('_', ' ')}, one request at a time, held out: τ "
        f"{one.mean_acceptance_length:.3f}, {one.verified_per_call:.1f} verified and "
        f"{one.levels_per_call:.1f} levels a call, yield {one.draft_yield:.2f} a round and "
        f"{_percent(one.verified_yield)} of draft tokens, u {one.utilisation:.2f}{time}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def render_report(report: EchoReport) -> Any:
    """A rich renderable for the terminal."""
    from rich.console import Group

    return Group(table(TABLE_COLUMNS, table_rows(report), LEGEND), *summary(report))
