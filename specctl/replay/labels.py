"""Rounds to fit HeteroSpec's bins to, from dense traces: the base tree drafted at every position.

Live traces hold such rounds already, at the positions that the collecting policy visited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from specctl.errors import UsageError
from specctl.features import phi
from specctl.logs.logged_draft import batches, logged_draft
from specctl.logs.trace_columns import Traces
from specctl.logs.tree_log import DenseLog, LogChunk, map_ordered
from specctl.policy import Policy, StaticTree, build_shape
from specctl.runtime.policy_spec import resolve_policy

if TYPE_CHECKING:  # slow to import
    import polars as pl

BATCH_POSITIONS = 512


class ScannedTraces(Traces, Protocol):
    """A trace set whose rows can be read too."""

    def scan(self, table: str) -> pl.LazyFrame: ...


@dataclass(frozen=True)
class FitRounds:
    """A `rounds` table with the columns that `fit cart` reads.

    Attributes:
        policy: record of the tree that the rounds were drafted with.
        num_left_out: positions that cannot be labelled: the log lacks nodes of the tree, or the
            text ends inside the accepted path.
    """

    rounds: pl.LazyFrame
    policy: Mapping[str, Any]
    num_left_out: int = 0


def rounds_to_fit(
    traces: ScannedTraces,
    base: str | None,
    *,
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
) -> FitRounds:
    """The rounds of live traces as they are; of dense ones, what the base tree would do.

    Args:
        base: static tree to draft at every position, e.g. `eagle2:depth=6`; dense traces only.

    Raises:
        UsageError: a base for live traces, or one that is not a static tree.
    """
    if "dense" in traces.header.collect:
        record = _static_tree(base or "eagle2")
        return _dense_rounds(DenseLog.open(traces), record, num_threads, on_positions)
    if base is not None:
        raise UsageError(
            "--base",
            expected="dense traces, which any base tree can be replayed on",
            found="live ones, drafted with the tree that they were collected with",
            fix="leave it out, or collect with --dense",
        )
    return FitRounds(traces.scan("rounds"), traces.header.policy)


def _static_tree(spec: str) -> StaticTree:
    shape = resolve_policy(spec).policy.shape
    if isinstance(shape, StaticTree):
        return shape
    raise UsageError(
        "--base",
        expected="a static tree such as eagle2:depth=6:top_k=8:num_tokens=48",
        found=spec,
        fix="name one",
    )


def _dense_rounds(
    log: DenseLog,
    base: StaticTree,
    num_threads: int,
    on_positions: Callable[[int], None] | None,
) -> FitRounds:
    import polars as pl

    def label(chunk: LogChunk) -> tuple[pl.DataFrame, int]:
        frame = _labelled(chunk, log, base)
        return frame.filter("whole").drop("whole"), frame.height

    frames, num_positions = [], 0
    for frame, height in map_ordered(label, log.chunks(), num_threads):
        frames.append(frame)
        num_positions += height
        if on_positions is not None:
            on_positions(height)
    rounds = pl.concat(frames)
    policy = Policy(shape=base).model_dump(mode="json")
    return FitRounds(rounds.lazy(), policy, num_positions - rounds.height)


@torch.inference_mode()
def _labelled(chunk: LogChunk, log: DenseLog, base: StaticTree) -> pl.DataFrame:
    """The base tree at every position; `whole` where its label is known."""
    import polars as pl

    rule, positions = build_shape(base), chunk.positions
    parts = []
    for rows in batches(positions.num_rows, BATCH_POSITIONS):
        draft = logged_draft(rule, chunk, rows)
        found = draft.num_accepted, draft.terminal_rank, draft.expansions.missing
        parts.append([tensor.numpy() for tensor in (*found, phi(draft.pool))])
    accepted, rank, missing, phis = (np.concatenate(column) for column in zip(*parts, strict=True))
    names = np.array(positions.prompt_ids)[positions.prompt][positions.request]
    is_cut = (accepted >= positions.remaining) & (accepted < base.depth)
    return pl.DataFrame(
        {
            "prompt_id": names,
            "offered_depth": pl.Series(np.full(len(phis), base.depth, np.int16)),
            "top_k": pl.Series(np.full(len(phis), base.top_k, np.int16)),
            "phi": phis,
            "phi_depth": pl.Series(np.full(len(phis), base.depth, np.int16)),
            "num_accepted": accepted.astype(np.int32),
            "fully_accepted": accepted == base.depth,
            "tcr": pl.Series(rank.astype(np.int32)),
            "whole": (missing == 0) & ~is_cut,
        }
    ).with_columns(pl.when(pl.col("tcr") > 0).then("tcr").alias("tcr"))
