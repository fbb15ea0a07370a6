"""Labelled positions of dense traces: a row for each draft that a rule makes from the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.tree_log import DenseLog, LogChunk, map_chunks
from specctl.policy.rules import ShapeRule

if TYPE_CHECKING:  # slow to import
    import polars as pl
log = logging.getLogger(__name__)


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


def sample_note(noun: str, num_kept: int, number: int) -> list[str]:
    """A line for the report where a fit read a sample."""
    if num_kept == number:
        return []
    return [f"fitted to a seeded sample, {num_kept:,} of {number:,} {noun}; see --max-rows"]


def warn_left_out(num_positions: int) -> None:
    """Warns of positions without a label."""
    if num_positions:
        log.warning("%d positions have no label and were left out", num_positions)


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
    traces: DenseLog,
    rule: ShapeRule,
    columns: Callable[[LoggedDraft], dict[str, Tensor]],
    *,
    max_rows: int | None = None,
    seed: int = 0,
    with_entropy: bool = True,
) -> PositionRows:
    """Drafts a tree at every position of a log, as in a request's first round.

    Live traces hold such rows already, at the positions that the collecting policy visited.

    Args:
        columns: `[B]` values of the rows of a draft, by column name.
        max_rows, seed: see `RowSample`.
        with_entropy: the rule or the columns look at entropies.
    """

    def label(chunk: LogChunk) -> pl.DataFrame:
        return _labelled(chunk, rule, columns)

    num_positions, sample = 0, RowSample(max_rows, seed)
    for frame in map_chunks(traces, label, with_entropy=with_entropy):
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
