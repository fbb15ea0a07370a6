"""`CostModel`: what rounds of given counts take on a machine, vectorised."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from specctl.artifacts.manifest import digest_of
from specctl.errors import UsageError
from specctl.policy.costs import StepCost
from specctl.policy.parse import canonical_json
from specctl.replay.cost.grid import Floats
from specctl.replay.cost.parts import LinearParts, TableParts
from specctl.replay.cost.records import LinearCost, TableCost


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
            rounds are padded up to; None where what is verified is always all.
    """

    batch_size: ArrayLike
    num_tokens: ArrayLike
    context_tokens: ArrayLike
    levels: ArrayLike
    level_width: ArrayLike
    num_emitted: ArrayLike
    max_tokens: ArrayLike | None = None


class Parts(Protocol):
    """What a form of cost model answers; arguments as in `Steps`, us, arrays broadcast."""

    @property
    def drafts(self) -> bool: ...

    @property
    def smallest_tier(self) -> int: ...

    def verify_us(
        self, tokens: Floats, batch: Floats, context: Floats, most: Floats | None = None
    ) -> Floats: ...

    def root_us(self, batch: Floats, context: Floats) -> Floats: ...

    def level_us(self, width: Floats, batch: Floats, context: Floats) -> Floats: ...

    def select_us(self, width: Floats, batch: Floats) -> Floats: ...

    def num_read(self, levels: Floats, emitted: Floats) -> Floats: ...

    def extend_us(self, tokens: Floats, batch: Floats, context: Floats) -> Floats: ...

    def loop_us(self, batch: Floats, *, drafts: bool) -> Floats: ...

    def prefill_us(self, tokens: Floats, *, drafts: bool) -> Floats: ...


@dataclass(frozen=True)
class CostModel:
    """Times of rounds from a record of either form."""

    record: TableCost | LinearCost

    @cached_property
    def parts(self) -> Parts:
        """The form's own arithmetic."""
        if isinstance(self.record, TableCost):
            return TableParts(self.record)
        return LinearParts(self.record)

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the canonical JSON."""
        return digest_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Canonical JSON: what `save_cost_model` writes."""
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
        """Drafting: all levels, the choice of nodes, and reading what was committed."""
        levels, width = _f(steps.levels), np.maximum(_f(steps.level_width), 1)
        batch, context = _f(steps.batch_size), _f(steps.context_tokens)
        emitted = _f(steps.num_emitted)
        if not np.any(levels > 0):
            return np.zeros(np.broadcast(levels, width, batch, context, emitted).shape)
        self._check_drafter()
        tree = self.parts.root_us(batch, context) + self.parts.select_us(width, batch)
        tree = tree + (levels - 1) * self.parts.level_us(width, batch, context)
        num_read = self.parts.num_read(levels, emitted)
        read = self.parts.extend_us(np.maximum(num_read, 1), batch, context)
        return np.where(levels > 0, tree + np.where(num_read > 0, read, 0.0), 0.0)

    def loop_us(self, steps: Steps) -> Floats:
        """Host work around the models: state, commit, emission, bookkeeping."""
        batch, drafts = _f(steps.batch_size), _f(steps.levels) > 0
        plain = self.parts.loop_us(batch, drafts=False)
        if not np.any(drafts):
            return plain + np.zeros(drafts.shape)
        return np.where(drafts, self.parts.loop_us(batch, drafts=True), plain)

    def round_us(self, steps: Steps) -> Floats:
        """Wall time of every round, drafting, verification and host work together.

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
        """What a budget rule needs at run time: whole rounds of `batch_size` .. `max_tokens`.

        Sizes of equal cost are one entry, so a staircase stays one and nothing is lost. Captured
        rounds are padded, but below their smallest tier sizes keep a cost of their own: what
        costs the same whatever is chosen is no table to choose by.

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

    def _check_drafter(self) -> None:
        if not self.parts.drafts:
            raise UsageError(
                "cost model",
                expected="timings of a drafter",
                found="a target alone",
                fix="profile the pair: specctl profile --drafter ...",
            )


def require_slope(model: CostModel | None) -> CostModel:
    """The model, if it can tell a large verification from a small one.

    A missing or flat table makes every further token look free, so that a budget would always
    verify all (notes/state-of-the-art.md, section 2.5): decisions refuse it.

    Raises:
        UsageError: no model, or one whose verification time never rises.
    """
    if model is not None and _rises(model.record):
        return model
    raise UsageError(
        "budget decision",
        expected="a cost model whose verification time rises with the tokens",
        found="none" if model is None else f"a flat one, {model.digest[:19]}",
        fix="measure one (specctl profile) and give it with --cost-model",
    )


def _rises(record: TableCost | LinearCost) -> bool:
    if isinstance(record, LinearCost):
        return record.verify_token_us > 0
    return all(row[-1] > row[0] for plane in record.verify.us for row in plane)


def _f(values: ArrayLike) -> Floats:
    return np.asarray(values, np.float64)
