"""The arithmetic of the two forms, part by part; see `model.Parts`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.replay.cost.grid import Floats, next_above, next_size, read_grid
from specctl.replay.cost.records import DraftGrids, LinearCost, TableCost


@dataclass(frozen=True)
class TableParts:
    """Measured grids: a staircase up to the capture limit, lines between sizes above it.

    Captured rounds are padded as the runtime pads them: rows to a power of two, tokens to a tier.
    """

    record: TableCost

    @property
    def drafts(self) -> bool:
        return self.record.draft is not None

    @property
    def draft(self) -> DraftGrids:
        assert self.record.draft is not None, "the model checks for a drafter first"
        return self.record.draft

    @property
    def smallest_tier(self) -> int:
        return min(self.record.token_tiers, default=0)

    def verify_us(
        self, tokens: Floats, batch: Floats, context: Floats, most: Floats | None = None
    ) -> Floats:
        rows, grid = self._rows(batch), self.record.verify
        sizes = self._tier(tokens, rows, most) / rows
        padded = next_size(grid, sizes)
        is_captured = padded * rows <= self.record.capture_limit_tokens
        sizes = np.where(is_captured, padded, sizes)
        return read_grid(grid, sizes, rows, context)

    def root_us(self, batch: Floats, context: Floats) -> Floats:
        return read_grid(self.draft.root, 1, self._rows(batch), context)

    def level_us(self, width: Floats, batch: Floats, context: Floats) -> Floats:
        return read_grid(self.draft.level, width, self._rows(batch), context)

    def select_us(self, width: Floats, batch: Floats) -> Floats:
        return read_grid(self.draft.select, width, self._rows(batch), 1)

    def num_read(self, levels: Floats, emitted: Floats) -> Floats:
        """A captured round reads as many places as its tree is deep, last round or not."""
        return levels + 1 if self.record.rounds == "graphs" else emitted

    def extend_us(self, tokens: Floats, batch: Floats, context: Floats) -> Floats:
        return read_grid(self.draft.extend, tokens, self._rows(batch), context)

    def loop_us(self, batch: Floats, *, drafts: bool) -> Floats:
        return read_grid(self.draft.loop if drafts else self.record.loop, 1, batch, 1)

    def _tier(self, tokens: Floats, rows: Floats, most: Floats | None) -> Floats:
        """The tokens with those that a captured round pads."""
        if most is None or not self.record.token_tiers:
            return tokens
        tier = next_above(self.record.token_tiers, tokens)
        return np.maximum(np.minimum(tier, most * rows), tokens)

    def _rows(self, batch: Floats) -> Floats:
        """Rows of the graphs for that many requests: the next power of two, as far as measured."""
        if self.record.rounds == "ordinary":
            return batch
        largest = self.record.verify.batch_sizes[-1]
        bucket = np.minimum(np.exp2(np.ceil(np.log2(batch))), largest)
        return np.maximum(bucket, batch)

    def prefill_us(self, tokens: Floats, *, drafts: bool) -> Floats:
        return read_grid(self.draft.prefill if drafts else self.record.prefill, tokens, 1, 1)


@dataclass(frozen=True)
class LinearParts:
    """The six rates of `LinearCost`. A level of W nodes drafts W tokens a request, the first
    one; a prompt is one step of its tokens. Reading what was committed is inside the fixed part.
    """

    record: LinearCost
    drafts: bool = True
    smallest_tier: int = 0

    def verify_us(
        self, tokens: Floats, batch: Floats, context: Floats, most: Floats | None = None
    ) -> Floats:
        del most
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

    def num_read(self, levels: Floats, emitted: Floats) -> Floats:
        del levels
        return emitted

    def extend_us(self, tokens: Floats, batch: Floats, context: Floats) -> Floats:
        return np.zeros(np.broadcast(tokens, batch, context).shape)

    def loop_us(self, batch: Floats, *, drafts: bool) -> Floats:
        del drafts
        return np.full(batch.shape, self.record.step_us)

    def prefill_us(self, tokens: Floats, *, drafts: bool) -> Floats:
        del drafts  # the published form gives no time for a drafter's prompt
        return self.verify_us(tokens, np.ones(()), np.zeros(())) + self.record.step_us
