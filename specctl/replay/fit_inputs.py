"""Data of dense traces that fits read beyond single nodes: positions and replays.

`fit cart` reads the rounds of a base tree, `fit echo` the confidence of every level and replayed
gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.features import phi
from specctl.logs.fit_data import (
    ROUND_COLUMNS,
    PositionRows,
    ReplayedTotals,
    RowSample,
    position_rows,
)
from specctl.logs.logged_draft import LoggedDraft
from specctl.logs.parquet import collected, scan_files
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy, SparseGates, StaticTree, build_shape
from specctl.replay.rounds import Clock, replay_parts
from specctl.runtime.words import resolve_policy

if TYPE_CHECKING:  # slow to import
    import polars as pl

OnPositions = Callable[[int], None]

# ----------------------------------------------------------------- bins: rounds of a base tree


@dataclass(frozen=True)
class FitRounds:
    """A `rounds` table with the columns that `fit cart` reads.

    Attributes:
        policy: record of the tree that the rounds were drafted with.
        num_rounds: from which they were sampled.
        num_left_out: positions that cannot be labelled, see `PositionRows`.
    """

    rounds: pl.DataFrame
    policy: Mapping[str, Any]
    num_rounds: int
    num_left_out: int = 0


def rounds_to_fit(
    traces: TraceSet,
    base: str | None,
    *,
    max_rows: int | None = None,
    seed: int = 0,
    conditional: bool = False,
    num_threads: int = 1,
    on_positions: OnPositions | None = None,
) -> FitRounds:
    """The rounds of live traces as they are; of dense ones, what the base tree would do.

    Args:
        base: static tree to draft at every position, e.g. `eagle2:depth=6`; dense traces only.
            None: that of the traces, else eagle2's, as deep and wide as they hold.
        max_rows, seed: see `RowSample`.
        conditional: sum Φ along the path whose last token is the likeliest by itself.

    Raises:
        UsageError: a base for live traces, one that is not a static tree, or one that they lack.
    """
    import polars as pl

    if "dense" not in traces.header.collect:
        if base is not None:
            raise UsageError(
                "--base: expected dense traces, which any base tree can be replayed on, found "
                "live ones, drafted with the tree that they were collected with",
                hint="leave it out, or collect with --dense",
            )
        if conditional:
            raise UsageError(
                "--path conditional: expected dense traces, of which Φ is computed, found live "
                "ones, whose Φ was summed along the likeliest path",
                hint="leave it out, or collect with --dense",
            )
        sample = RowSample(max_rows, seed)
        for files in traces.segment_files():
            part = scan_files("rounds", [files["rounds"]]).select(*ROUND_COLUMNS)
            sample.add(collected(part, str(files["rounds"])))
        return FitRounds(sample.rows(), traces.header.policy, sample.num_rows)
    log = DenseLog.open(traces)
    held, usual = log.support, StaticTree()
    if base is None:
        sizes = min(usual.depth, held.depth), min(usual.top_k, held.top_k)
        base = "eagle2:depth={}:top_k={}".format(*sizes)
    shape = resolve_policy(base).policy.shape
    if not isinstance(shape, StaticTree):
        raise UsageError(
            "--base: expected a static tree such as eagle2:depth=6:top_k=8:num_tokens=48, found "
            f"{base}",
            hint="name one",
        )
    if shape.depth > held.depth or shape.top_k > held.top_k:
        raise UsageError(
            f"--base: expected at most depth={held.depth}:top_k={held.top_k}, which the traces "
            f"hold, found {base}",
            hint="name a smaller tree, or collect deeper or wider (--depth, --children)",
        )

    def columns(draft: LoggedDraft) -> dict[str, Tensor]:
        return {"phi": phi(draft.pool, conditional=conditional), "tcr": draft.terminal_rank.int()}

    found = position_rows(
        log,
        build_shape(shape),
        columns,
        max_rows=max_rows,
        seed=seed,
        num_threads=num_threads,
        on_positions=on_positions,
    )
    depth, top_k = (pl.lit(value, pl.Int16) for value in (shape.depth, shape.top_k))
    rounds = found.rows.rename({"accepted": "num_accepted"}).with_columns(
        offered_depth=depth,
        top_k=top_k,
        phi_depth=depth,
        fully_accepted=pl.col("num_accepted") == shape.depth,
        tcr=pl.when(pl.col("tcr") > 0).then("tcr"),
    )
    policy = Policy(shape=shape).model_dump(mode="json")
    return FitRounds(rounds, policy, found.num_rows, found.num_left_out)


# ----------------------------------------------------------------- gates


def gate_rows(
    log: DenseLog,
    shape: SparseGates,
    *,
    max_rows: int | None = None,
    seed: int = 0,
    num_threads: int = 1,
    on_positions: OnPositions | None = None,
) -> PositionRows:
    """Every position as if no gate ever closed.

    Args:
        max_rows, seed: see `RowSample`.

    Returns:
        Rows with `level_1` to `level_D`: the log-probability of the likeliest path to each level,
        nats (ECHO, Eq. 6).
    """
    never = tuple(0.0 for _ in shape.thresholds)
    rule = build_shape(shape.model_copy(update={"thresholds": never}))

    def columns(draft: LoggedDraft) -> dict[str, Tensor]:
        joint = draft.pool.joint_logp
        best = torch.full((len(joint), rule.max_depth + 1), -torch.inf)
        best = best.scatter_reduce(1, draft.pool.tree.depth, joint, "amax")
        return {f"level_{d}": best[:, d] for d in range(1, rule.max_depth + 1)}

    return position_rows(
        log,
        rule,
        columns,
        max_rows=max_rows,
        seed=seed,
        with_entropy=False,
        num_threads=num_threads,
        on_positions=on_positions,
    )


TOTALS = ("calls", "tokens", "accepted", "verified", "levels", "time_us")


@dataclass(frozen=True)
class Replayer:
    """Replays policies over some prompts of a log, one request at a time."""

    log: DenseLog
    clock: Clock | None = None
    num_threads: int = 1

    def __call__(self, policies: Sequence[Policy], prompts: Sequence[str]) -> list[ReplayedTotals]:
        part, sums = self.log.only(prompts), np.zeros((len(policies), len(TOTALS) + 1))
        options: dict[str, Any] = {"with_bounds": False, "num_threads": self.num_threads}
        for runs in replay_parts(part, policies, **options):
            for total, run in zip(sums, runs, strict=True):
                counts = run.counts(self.clock)
                shares = counts["accepted"] / np.maximum(counts["levels"], 1)
                total += [*(counts[name].sum() for name in TOTALS), shares.sum()]
        return [self._totals(*total) for total in sums.tolist()]

    def _totals(self, *sums: float) -> ReplayedTotals:
        *counts, time_us, shares = sums
        return ReplayedTotals(
            **{name: int(count) for name, count in zip(TOTALS, counts, strict=False)},
            utilisation=shares / counts[0],
            time_us=None if self.clock is None else time_us,
        )
