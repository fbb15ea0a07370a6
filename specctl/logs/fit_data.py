"""Data that fits read besides nodes: labelled positions, and what replay computes for them.

Replay and fits do not import each other, so what passes between them is told here. Rows are sampled
where there are more than a fit may hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy.rules import ShapeRule

if TYPE_CHECKING:  # slow to import
    import polars as pl

ROUND_COLUMNS = (
    "prompt_id", "offered_depth", "top_k", "phi", "phi_depth", "num_accepted", "fully_accepted",
    "tcr",
)  # fmt: skip
"""Of a `rounds` table, those that `fit cart` reads."""


@dataclass(frozen=True)
class PositionRows:
    """Positions whose label is known.

    Attributes:
        rows: columns `prompt_id`, `accepted` (draft tokens, int32) and the ones that were chosen.
        num_rows: from which they were sampled.
        num_left_out: positions that cannot be labelled: the log lacks nodes of the tree, or the
            text ends inside the accepted path.
    """

    rows: pl.DataFrame
    num_rows: int
    num_left_out: int


class RowSample:
    """Rows of frames that come one after another: all, or `max_rows` of them, each as likely.

    Which ones depends on the seed and on their order, not on how they are grouped.
    """

    def __init__(self, max_rows: int | None, seed: int) -> None:
        """Begins with no rows; None is no bound."""
        self.num_rows, self._below = 0, 1.0
        self._max_rows = sys.maxsize if max_rows is None else max_rows
        self._random, self._parts = np.random.default_rng(seed), list[Any]()

    def add(self, frame: pl.DataFrame) -> None:
        """Adds rows of the same columns; twice `max_rows` are held for a while."""
        key = self._random.random(frame.height)
        self.num_rows += frame.height
        self._parts.append(frame.with_columns(_key=key).filter(key < self._below))
        if sum(part.height for part in self._parts) > 2 * self._max_rows:
            self._cut()

    def rows(self) -> pl.DataFrame:
        """The sample, in the order in which rows were added."""
        return self._cut().drop("_key")

    def _cut(self) -> pl.DataFrame:
        import polars as pl

        rows: pl.DataFrame = pl.concat(self._parts)
        if rows.height > self._max_rows:
            self._below = float(
                np.partition(rows["_key"].to_numpy(), self._max_rows)[self._max_rows]
            )
            rows = rows.filter(pl.col("_key") < self._below)
        self._parts = [rows]
        return rows


def position_rows(
    log: DenseLog,
    rule: ShapeRule,
    columns: Callable[[LoggedDraft], dict[str, Tensor]],
    *,
    max_rows: int | None = None,
    seed: int = 0,
    with_entropy: bool = True,
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
) -> PositionRows:
    """Drafts a tree at every position of a log, as in a request's first round.

    Live traces hold such rows already, at the positions that the collecting policy visited.

    Args:
        columns: `[B]` values of the rows of a draft, by column name.
        max_rows, seed: see `RowSample`.
        with_entropy: the rule or the columns look at entropies.
        num_threads: chunks in work at a time; results do not depend on it.
        on_positions: called with the positions of each finished chunk.
    """

    def label(chunk: LogChunk) -> pl.DataFrame:
        return _labelled(chunk, rule, columns)

    frames = log.each(
        label, with_entropy=with_entropy, num_threads=num_threads, on_positions=on_positions
    )
    num_positions, sample = 0, RowSample(max_rows, seed)
    for frame in frames:
        sample.add(frame.filter("is_whole").drop("is_whole"))
        num_positions += frame.height
    return PositionRows(sample.rows(), sample.num_rows, num_positions - sample.num_rows)


@torch.inference_mode()
def _labelled(
    chunk: LogChunk, rule: ShapeRule, columns: Callable[[LoggedDraft], dict[str, Tensor]]
) -> pl.DataFrame:
    import polars as pl

    parts: list[dict[str, Tensor]] = []
    for draft in logged_drafts(rule, chunk):
        accepted = draft.num_accepted
        is_cut = (accepted >= draft.remaining) & (accepted < rule.max_depth)
        is_whole = (draft.expansions.missing == 0) & ~is_cut
        parts.append({"accepted": accepted.int(), **columns(draft), "is_whole": is_whole})
    values = {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}
    return pl.DataFrame({"prompt_id": chunk.positions.row_prompts.astype(str), **values})


# ----------------------------------------------------------------- from replay


@dataclass(frozen=True)
class ReplayedTotals:
    """Sums over a policy's rounds.

    Attributes:
        utilisation: u, accepted draft tokens over drafted levels, defined per round and averaged.
        time_us: of a cost model; None without one.
    """

    calls: int
    tokens: int
    accepted: int
    verified: int
    levels: int
    utilisation: float
    time_us: float | None
