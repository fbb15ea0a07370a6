"""`fit echo`: where ECHO's gates stand and what they ask (arXiv:2604.09603, section 3.2).

    positions ─area by level─► sweet spots ─Youden's J, or replayed cost─► SparseGates ─► report

Readings of the paper follow notes/state-of-the-art.md, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specctl.errors import TraceEmptyError, UsageError
from specctl.policy.records import Policy, SparseGates
from specctl.stats import Interval, Split, split_prompts
from specctl.train.echo_config import EchoConfig
from specctl.train.echo_levels import Gate, LevelRows, area_by_prompt, choose_gates
from specctl.train.echo_report import EchoReport, LevelReport, Replays, build_report

if TYPE_CHECKING:  # slow to import
    import polars as pl

COST_SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65)
"""Shares of the rows at a gate that the tried thresholds cut; 0 is a gate that never closes."""


class Replay(Protocol):
    """Replays policies over prompts; see `specctl.replay.fit_inputs.Replayer`."""

    def __call__(self, policies: Sequence[Policy], prompts: Sequence[str]) -> Sequence[Replays]: ...


@dataclass(frozen=True)
class EchoFit:
    """A fitted policy and what is known of it.

    Attributes:
        held_out_logp: `[R, G]` float32, nats: confidence at the gates on held-out positions; the
            ONNX twin is checked on these.
    """

    policy: Policy
    config: EchoConfig
    report: EchoReport
    held_out_logp: np.ndarray


def fit_echo(
    rows: pl.DataFrame, config: EchoConfig, replay: Replay, *, num_left_out: int = 0
) -> EchoFit:
    """Chooses gates on the training prompts and reports on the held-out ones.

    Args:
        rows: of `specctl.replay.fit_inputs.gate_rows`, for `config.open_shape`.
        replay: of the same log; with times where thresholds are chosen by cost.

    Raises:
        TraceEmptyError: too few prompts, or no level whose area is known and above δ.
        UsageError: thresholds by cost without times.
    """
    split = split_prompts(
        rows["prompt_id"].unique(), held_out_frac=config.held_out_frac, seed=config.seed
    )
    train, held_out = (_level_rows(rows, side) for side in (split.train, split.held_out))
    areas = _areas(train, config)
    gates = choose_gates(
        train,
        areas,
        delta=config.delta,
        max_gates=config.max_gates,
        min_rows=config.min_rows,
        seed=config.seed,
    )
    _check_found(gates, areas, train, config)
    if config.thresholds == "cost":
        gates = cheapest_gates(gates, train, config, _timed(replay, split.train))
    shape = config.shape(gates)
    report = build_report(
        _levels(areas, train, held_out, gates, config),
        gates,
        held_out,
        split,
        _replayed(replay, shape, config, split),
        num_rows={"train": len(train.accepted), "held_out": len(held_out.accepted)},
        num_left_out=num_left_out,
        settings=config.model_dump(mode="json"),
    )
    columns = [level - 1 for level in shape.gate_levels]
    policy = Policy(shape=shape, budget=config.budget)
    return EchoFit(policy, config, report, held_out.level_logp[:, columns])


def cheapest_gates(
    gates: Sequence[Gate],
    rows: LevelRows,
    config: EchoConfig,
    time_us: Callable[[Sequence[SparseGates]], Sequence[float]],
) -> list[Gate]:
    """Thresholds of least time, gate by gate from the root, the others as they stand.

    Args:
        time_us: predicted time of the training prompts under each shape.
    """
    chosen = list(gates)
    for place, gate in enumerate(chosen):
        tried = [replace(gate, threshold=t) for t in _tried_thresholds(gate, rows)]
        sets = [[*chosen[:place], one, *chosen[place + 1 :]] for one in tried]
        times = time_us([config.shape(one) for one in sets])
        chosen = sets[int(np.argmin(times))]
        score = rows.confidence(gate.level)
        rows = rows.of(score >= chosen[place].threshold)
    return chosen


def _tried_thresholds(gate: Gate, rows: LevelRows) -> list[float]:
    """Where given shares of the rows are cut, and what Youden's J said; no gate first."""
    shares = np.quantile(rows.confidence(gate.level), COST_SHARES[1:])
    return [0.0, *np.unique([*shares, gate.threshold]).tolist()]


def _timed(
    replay: Replay, prompts: Sequence[str]
) -> Callable[[Sequence[SparseGates]], Sequence[float]]:
    def time_us(shapes: Sequence[SparseGates]) -> list[float]:
        found = replay([Policy(shape=shape) for shape in shapes], prompts)
        times = [one.time_us for one in found if one.time_us is not None]
        if len(times) < len(shapes):
            raise UsageError(
                "--thresholds cost",
                expected="a cost model to predict times with",
                found="none",
                fix="measure one with `specctl profile` and give it with --cost-model",
            )
        return times

    return time_us


def _level_rows(rows: pl.DataFrame, prompts: Sequence[str]) -> LevelRows:
    """One side of the split."""
    import polars as pl

    side = rows.filter(pl.col("prompt_id").is_in(list(prompts)))
    levels = [name for name in rows.columns if name.startswith("level_")]
    _, codes = np.unique(side["prompt_id"].to_numpy(), return_inverse=True)
    return LevelRows(
        level_logp=side.select(levels).to_numpy().astype(np.float32),
        accepted=side["accepted"].to_numpy().astype(np.int64),
        prompt=codes.astype(np.int64),
    )


def _areas(rows: LevelRows, config: EchoConfig) -> list[Interval]:
    levels = range(1, rows.depth + 1)
    return [
        area_by_prompt(rows, level, min_rows=config.min_rows, seed=config.seed) for level in levels
    ]


def _levels(
    areas: Sequence[Interval],
    train: LevelRows,
    held_out: LevelRows,
    gates: Sequence[Gate],
    config: EchoConfig,
) -> list[LevelReport]:
    by_level = {gate.level: gate for gate in gates}
    return [
        LevelReport(
            level=level,
            reached_frac=float(train.reached(level).mean()),
            auc=auc,
            held_out_auc=area_by_prompt(
                held_out, level, min_rows=config.min_rows, seed=config.seed
            ),
            gated_auc=by_level[level].auc if level in by_level else None,
            threshold=by_level[level].threshold if level in by_level else None,
        )
        for level, auc in enumerate(areas, 1)
    ]


def _replayed(
    replay: Replay, shape: SparseGates, config: EchoConfig, split: Split
) -> dict[str, Replays]:
    policies = [Policy(shape=shape), Policy(shape=config.open_shape)]
    return dict(zip(("gates", "no_gates"), replay(policies, split.held_out), strict=True))


def _check_found(
    gates: Sequence[Gate], areas: Sequence[Interval], rows: LevelRows, config: EchoConfig
) -> None:
    """A policy needs a gate."""
    if gates:
        return
    known = [auc.value for auc in areas if auc.known]
    listed = ", ".join(f"level {level} {auc.text('.2f')}" for level, auc in enumerate(areas, 1))
    fix = "collect more prompts, or lower --min-rows"
    if known:
        fix = f"pass --delta {np.floor(100 * max(known) - 0.5) / 100:.2f}, or another --width"
    raise TraceEmptyError(
        "fit echo",
        expected=f"a level whose confidence has an area under the ROC curve above {config.delta}",
        found=f"{listed} over {len(rows.accepted)} positions",
        fix=fix,
    )
