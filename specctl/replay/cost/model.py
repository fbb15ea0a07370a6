"""`CostModel`: the time that rounds of given counts take on a machine, vectorised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specctl.artifacts.manifest import digest_of
from specctl.errors import UsageError
from specctl.policy.budgets import StepCost
from specctl.records import canonical_json
from specctl.replay.cost.records import DraftGrids, Grid, LinearCost, TableCost

if TYPE_CHECKING:
    from specctl.policy.rules import ShapeRule
    from specctl.replay.rounds import Rounds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """Rounds of a batch, one entry each; arrays `[M]` or numbers that all rounds share.

    Attributes:
        batch_size: requests in the round.
        num_tokens: verified over the batch, roots counted, and padding where there is some.
        context_tokens: text per request up to its root, mean over the batch.
        levels: drafted; 0 for a plain round.
        level_width: nodes per request that each level below the first evaluates.
        num_emitted: tokens per request that the drafter reads after the round, padding included;
            0 where it reads none because every request ended.
        max_tokens: per request that the policy verifies at most, roots counted, which captured
            rounds are padded up to; None where it always verifies that many.
    """

    batch_size: ArrayLike
    num_tokens: ArrayLike
    context_tokens: ArrayLike
    levels: ArrayLike
    level_width: ArrayLike
    num_emitted: ArrayLike
    max_tokens: ArrayLike | None = None


@dataclass(frozen=True)
class CostModel:
    """Times of rounds, us, from a record of either form."""

    record: TableCost | LinearCost

    @cached_property
    def parts(self) -> _TableParts | _LinearParts:
        """The arithmetic of the form, part by part."""
        if isinstance(self.record, TableCost):
            return _TableParts(self.record)
        return _LinearParts(self.record)

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the canonical JSON."""
        return digest_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Canonical JSON: the content of `cost_model.json`."""
        return canonical_json(self.record.model_dump(mode="json")).encode()

    def verify_us(
        self,
        num_tokens: ArrayLike,
        batch_size: ArrayLike,
        context_tokens: ArrayLike,
        max_tokens: ArrayLike | None = None,
    ) -> Floats:
        """Verification alone: the target's forward over `num_tokens` of the whole batch.

        Args:
            max_tokens: see `Steps`.
        """
        most = None if max_tokens is None else _f(max_tokens)
        return self.parts.verify_us(_f(num_tokens), _f(batch_size), _f(context_tokens), most)

    def draft_us(self, steps: Steps) -> Floats:
        """Drafting: all levels, the choice of nodes, and reading the committed tokens."""
        levels, width = _f(steps.levels), np.maximum(_f(steps.level_width), 1)
        batch, context = _f(steps.batch_size), _f(steps.context_tokens)
        emitted = _f(steps.num_emitted)
        if not np.any(levels > 0):
            return np.zeros(np.broadcast(levels, width, batch, context, emitted).shape)
        self._check_drafter()
        tree = self.parts.tree_us(levels, width, batch, context)
        read = self.parts.read_us(levels, emitted, batch, context)
        return np.where(levels > 0, tree + read, 0.0)

    def loop_us(self, steps: Steps) -> Floats:
        """Host work around the models: state, commit, emission, bookkeeping."""
        batch, drafts = _f(steps.batch_size), _f(steps.levels) > 0
        plain = self.parts.loop_us(batch, drafts=False)
        if not np.any(drafts):
            return plain + np.zeros(drafts.shape)
        return np.where(drafts, self.parts.loop_us(batch, drafts=True), plain)

    def round_us(self, steps: Steps) -> Floats:
        """Wall time of every round: drafting, verification and host work together.

        Raises:
            UsageError: a batch that was not measured, or drafting without a drafter's timings.
        """
        counts = (steps.num_tokens, steps.batch_size, steps.context_tokens)
        verify = self.verify_us(*counts, steps.max_tokens)
        return self.draft_us(steps) + verify + self.loop_us(steps)

    def prefill_us(self, num_tokens: ArrayLike, *, drafts: bool) -> Floats:
        """Reading prompts of these lengths, one at a time; with the drafter where it drafts."""
        if drafts:
            self._check_drafter()
        return self.parts.prefill_us(_f(num_tokens), drafts=drafts)

    def step_cost(
        self,
        batch_size: int,
        context_tokens: float,
        *,
        levels: int,
        level_width: int,
        max_tokens: int,
        num_emitted: float = 1.0,
    ) -> StepCost:
        """The table that a budget rule needs at run time: rounds of `batch_size` .. `max_tokens`.

        Sizes of equal cost are one entry, so a staircase stays one and nothing is lost. Captured
        rounds are padded, but below their smallest tier sizes keep a cost of their own: a budget
        cannot choose between sizes that all cost the same.

        Raises:
            UsageError: a flat model, or no size to choose.
        """
        require_slope(self)
        if max_tokens <= batch_size:
            raise UsageError(
                "max_tokens of a step cost",
                expected=f"more than the {batch_size} roots",
                found=str(max_tokens),
                fix="raise it",
            )
        sizes = np.arange(batch_size, max_tokens + 1)
        most = np.where(sizes < self.parts.smallest_tier, sizes, max_tokens) / batch_size
        steps = Steps(batch_size, sizes, context_tokens, levels, level_width, num_emitted, most)
        times = np.maximum.accumulate(self.round_us(steps))  # rounding may undo a last digit
        ends = np.append(times[1:] > times[:-1], True)
        ends[0] = True
        counts, step_us = sizes[ends].tolist(), times[ends].tolist()
        return StepCost(token_counts=tuple(counts), step_us=tuple(step_us))

    def full_batch_cost(self, rule: ShapeRule, batch_size: int, context_tokens: float) -> StepCost:
        """`step_cost` of drafts of a shape, for a batch with no free slot."""
        return self.step_cost(
            batch_size,
            context_tokens,
            levels=rule.max_depth,
            level_width=rule.width,
            max_tokens=batch_size * rule.max_tokens,
        )

    def _check_drafter(self) -> None:
        if not self.parts.drafts:
            raise UsageError(
                "cost model",
                expected="timings of a drafter",
                found="a target alone",
                fix="profile the pair: specctl profile --drafter ...",
            )


def require_slope(model: CostModel | None) -> CostModel:
    """The model, if its verification time rises with the tokens.

    With a missing or flat table every further token looks free, so that a budget would always
    verify all (notes/state-of-the-art.md, section 2.5): decisions refuse it.
    """
    if model is not None:
        record = model.record
        if isinstance(record, LinearCost):
            rises = record.verify_token_us > 0
        else:
            rises = all(row[-1] > row[0] for plane in record.verify.us for row in plane)
        if rises:
            return model
    raise UsageError(
        "budget decision",
        expected="a cost model whose verification time rises with the tokens",
        found="none" if model is None else f"a flat one, {model.digest[:19]}",
        fix="measure one (specctl profile) and give it with --cost-model",
    )


def steps_of(run: Rounds) -> Steps:
    """Replayed rounds as they would run one request at a time."""
    outcomes = run.outcomes
    return Steps(
        batch_size=1,
        num_tokens=outcomes.verified,
        context_tokens=run.context_tokens - 1,
        levels=outcomes.levels,
        level_width=outcomes.expanded / np.maximum(outcomes.levels - 1, 1),
        num_emitted=np.where(run.is_last, 0, run.emitted),
        max_tokens=np.max(outcomes.verified, initial=1),  # the largest that the log knows
    )


def replay_clock(model: CostModel) -> Callable[[Rounds], Floats]:
    """Wall time of every replayed round, us, for `replay.score`."""
    return lambda run: model.round_us(steps_of(run))


def read_grid(
    grid: Grid, sizes: ArrayLike, batch_sizes: ArrayLike, context_tokens: ArrayLike
) -> Floats:
    """Times at points of `[batch, context, size]`, multilinear between measured ones.

    Below an axis' first point the time there holds. Beyond the last context and size it goes on
    along the line through the middle and the last point (a single noisy last step must not set
    the slope). A larger batch than any measured is refused, never guessed.

    Returns:
        us, float64, of the arguments' common shape.
    """
    largest, batch = grid.batch_sizes[-1], np.asarray(batch_sizes)
    if np.any(batch > largest):
        found = int(np.max(batch))
        raise UsageError(
            "batch size of the cost model",
            expected=f"at most {largest}, the largest that was measured",
            found=str(found),
            fix=f"measure it too: specctl profile --batch-sizes ...,{found}",
        )
    points = np.broadcast_arrays(batch_sizes, context_tokens, sizes)
    axes = (grid.batch_sizes, grid.context_tokens, grid.sizes)
    corners = [_corners(np.asarray(a, float), p) for a, p in zip(axes, points, strict=True)]
    table, total = np.array(grid.us), np.zeros(points[0].shape)
    for batch_index, batch_weight in corners[0]:
        for context, context_weight in corners[1]:
            for size, size_weight in corners[2]:
                weight = batch_weight * context_weight * size_weight
                total = total + weight * table[batch_index, context, size]
    return total


def _corners(axis: Floats, points: Floats) -> list[tuple[NDArray[np.int64], Floats]]:
    """Two indices into an axis, and weights such that `Σ weight · value` is the value there."""
    last = len(axis) - 1
    if last == 0:
        return [(np.zeros(points.shape, np.int64), np.ones(points.shape))]
    at = np.maximum(points, axis[0])
    beyond = at > axis[last]
    low = np.where(beyond, last // 2, np.clip(np.searchsorted(axis, at, "right") - 1, 0, last - 1))
    high = np.where(beyond, last, low + 1)
    share = (at - axis[low]) / (axis[high] - axis[low])
    return [(low, 1.0 - share), (high, share)]


def _next_above(steps: Sequence[int], values: Floats) -> Floats:
    """Each value rounded up to the next of increasing steps; beyond the last it stays."""
    axis = np.asarray(steps, np.float64)
    index = np.searchsorted(axis, values)
    return np.where(index < len(axis), axis[np.minimum(index, len(axis) - 1)], values)


@dataclass(frozen=True)
class _TableParts:
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
        self, tokens: Floats, batch: Floats, context: Floats, most: Floats | None
    ) -> Floats:
        record, rows = self.record, self._rows(batch)
        if most is not None and record.token_tiers:
            tier = _next_above(record.token_tiers, tokens)
            tokens = np.maximum(np.minimum(tier, most * rows), tokens)
        sizes = tokens / rows
        padded = _next_above(record.verify.sizes, sizes)
        sizes = np.where(padded * rows <= record.capture_limit_tokens, padded, sizes)
        return read_grid(record.verify, sizes, rows, context)

    def tree_us(self, levels: Floats, width: Floats, batch: Floats, context: Floats) -> Floats:
        draft, rows = self.draft, self._rows(batch)
        ends = read_grid(draft.root, 1, rows, context) + read_grid(draft.select, width, rows, 1)
        return ends + (levels - 1) * read_grid(draft.level, width, rows, context)

    def read_us(self, levels: Floats, emitted: Floats, batch: Floats, context: Floats) -> Floats:
        """A captured round reads as many places as its tree is deep, last round or not."""
        num_read = levels + 1 if self.record.rounds == "graphs" else emitted
        read = read_grid(self.draft.extend, np.maximum(num_read, 1), self._rows(batch), context)
        return np.where(num_read > 0, read, 0.0)

    def loop_us(self, batch: Floats, *, drafts: bool) -> Floats:
        return read_grid(self.draft.loop if drafts else self.record.loop, 1, batch, 1)

    def prefill_us(self, tokens: Floats, *, drafts: bool) -> Floats:
        return read_grid(self.draft.prefill if drafts else self.record.prefill, tokens, 1, 1)

    def _rows(self, batch: Floats) -> Floats:
        """Rows of the graphs for that many requests: the next power of two, as far as measured."""
        if self.record.rounds == "ordinary":
            return batch
        largest = self.record.verify.batch_sizes[-1]
        bucket = np.minimum(np.exp2(np.ceil(np.log2(batch))), largest)
        return np.maximum(bucket, batch)


@dataclass(frozen=True)
class _LinearParts:
    """The rates of `LinearCost`. A level of W nodes drafts W tokens a request, the first level
    one; a prompt is one step of its tokens. Reading committed tokens is inside the fixed part."""

    record: LinearCost
    drafts: bool = True
    smallest_tier: int = 0

    def verify_us(
        self, tokens: Floats, batch: Floats, context: Floats, most: Floats | None
    ) -> Floats:
        del most
        r = self.record
        cached = batch * context * r.verify_cached_token_us
        return r.verify_fixed_us + tokens * r.verify_token_us + cached

    def tree_us(self, levels: Floats, width: Floats, batch: Floats, context: Floats) -> Floats:
        r = self.record
        cached = batch * (r.draft_token_us + context * r.draft_cached_token_us)
        return r.draft_fixed_us + cached + (levels - 1) * (width * batch * r.draft_token_us)

    def read_us(self, levels: Floats, emitted: Floats, batch: Floats, context: Floats) -> Floats:
        return np.zeros(np.broadcast(levels, emitted, batch, context).shape)

    def loop_us(self, batch: Floats, *, drafts: bool) -> Floats:
        del drafts
        return np.full(batch.shape, self.record.step_us)

    def prefill_us(self, tokens: Floats, *, drafts: bool) -> Floats:
        del drafts  # the published form gives no time for a drafter's prompt
        return self.verify_us(tokens, np.ones(()), np.zeros(()), None) + self.record.step_us


def _f(values: ArrayLike) -> Floats:
    return np.asarray(values, np.float64)
