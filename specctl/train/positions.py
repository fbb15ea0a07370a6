"""Labelled positions of dense traces: a row for each draft of a rule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.tree_log import ENTROPIES, DenseLog, LogChunk, map_chunks
from specctl.policy.rules import ShapeRule

if TYPE_CHECKING:  # slow to import
    import polars as pl
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PositionRows:
    """Positions whose label is known."""

    rows: pl.DataFrame
    """Columns `prompt_id`, `accepted` (draft tokens, int32) and the caller's."""
    num_left_out: int
    """Positions without a label: the log lacks nodes of the tree, or the text ends within the
    accepted path."""

    def warn_left_out(self) -> None:
        if self.num_left_out:
            text = "%d positions near the end of a text or of a logged tree cannot be judged"
            log.warning(text, self.num_left_out)


def position_rows(
    dense: DenseLog,
    rule: ShapeRule,
    columns: Callable[[LoggedDraft], dict[str, Tensor]],
    *,
    with_entropy: bool = True,
) -> PositionRows:
    """Drafts a tree at every position of a log, as in a request's first round.

    Live traces hold such rows already, at the positions that the collecting policy visited.

    Args:
        columns: `[B]` values of a draft, by column name.
        with_entropy: the rule or the columns read entropies.
    """
    import polars as pl

    def label(chunk: LogChunk) -> pl.DataFrame:
        return _labelled(chunk, rule, columns)

    table = pl.concat(map_chunks(dense, label, ENTROPIES if with_entropy else ()))
    rows = table.filter("is_whole").drop("is_whole")
    return PositionRows(rows, table.height - rows.height)


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
