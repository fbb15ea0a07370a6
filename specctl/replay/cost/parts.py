"""The arithmetic of the two forms, part by part; see `model.Parts`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.replay.cost.grid import Floats, next_size, read_grid
from specctl.replay.cost.records import DraftGrids, LinearCost, TableCost


@dataclass(frozen=True)
class TableParts:
    """Measured grids: a staircase up to the capture limit, lines between sizes above it."""

    record: TableCost

    @property
    def drafts(self) -> bool:
        return self.record.draft is not None

    @property
    def draft(self) -> DraftGrids:
        assert self.record.draft is not None, "the model checks for a drafter first"
        return self.record.draft

    def verify_us(self, tokens: Floats, batch: Floats, context: Floats) -> Floats:
        sizes, grid = tokens / batch, self.record.verify
        padded = next_size(grid, sizes)
        is_captured = padded * batch <= self.record.capture_limit_tokens
        sizes = np.where(is_captured, padded, sizes)
        return read_grid(grid, sizes, batch, context)

    def root_us(self, batch: Floats, context: Floats) -> Floats:
        return read_grid(self.draft.root, 1, batch, context)

    def level_us(self, width: Floats, batch: Floats, context: Floats) -> Floats:
        return read_grid(self.draft.level, width, batch, context)

    def select_us(self, width: Floats, batch: Floats) -> Floats:
        return read_grid(self.draft.select, width, batch, 1)

    def extend_us(self, tokens: Floats, batch: Floats, context: Floats) -> Floats:
        return read_grid(self.draft.extend, tokens, batch, context)

    def loop_us(self, batch: Floats, *, drafts: bool) -> Floats:
        return read_grid(self.draft.loop if drafts else self.record.loop, 1, batch, 1)

    def prefill_us(self, tokens: Floats, *, drafts: bool) -> Floats:
        return read_grid(self.draft.prefill if drafts else self.record.prefill, tokens, 1, 1)


@dataclass(frozen=True)
class LinearParts:
    """The six rates of `LinearCost`. A level of W nodes drafts W tokens a request, the first
    one; a prompt is one step of its tokens. Reading what was committed is inside the fixed part.
    """

    record: LinearCost
    drafts: bool = True

    def verify_us(self, tokens: Floats, batch: Floats, context: Floats) -> Floats:
        r = self.record
        cached = batch * context * r.verify_cached_token_us
        return r.verify_fixed_us + tokens * r.verify_token_us + cached

    def root_us(self, batch: Floats, context: Floats) -> Floats:
        r = self.record
        return r.draft_fixed_us + batch * (r.draft_token_us + context * r.draft_cached_token_us)

    def level_us(self, width: Floats, batch: Floats, context: Floats) -> Floats:
        return width * batch * self.record.draft_token_us + 0.0 * context

    def select_us(self, width: Floats, batch: Floats) -> Floats:
        return np.zeros(np.broadcast(width, batch).shape)

    def extend_us(self, tokens: Floats, batch: Floats, context: Floats) -> Floats:
        return np.zeros(np.broadcast(tokens, batch, context).shape)

    def loop_us(self, batch: Floats, *, drafts: bool) -> Floats:
        del drafts
        return np.full(batch.shape, self.record.step_us)

    def prefill_us(self, tokens: Floats, *, drafts: bool) -> Floats:
        del drafts  # the published form gives no time for a drafter's prompt
        return self.verify_us(tokens, np.ones(()), np.zeros(())) + self.record.step_us
