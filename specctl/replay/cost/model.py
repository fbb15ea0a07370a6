"""`CostModel`: from the counts of rounds to their time on a machine, vectorised.

`TableCost` holds measured grids of times by shape, and the padding of the runtime. `rates` holds
the linear forms. All are strict records: the content of `cost_model.json` (docs/cost-model.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from specctl.artifacts.manifest import Count, Name, PairFingerprint, UtcTime, digest_of
from specctl.errors import UsageError
from specctl.features import needs_text
from specctl.formatting import count
from specctl.policy import PerRequest, ScoredTree
from specctl.policy.budgets import Microseconds, StepCost
from specctl.policy.families import WORDS, shape_family
from specctl.policy.scorers import FfnScorer
from specctl.records import PositiveInt, Record, canonical_json, require
from specctl.replay.config import Axis, Increasing

if TYPE_CHECKING:
    from specctl.policy import Policy
    from specctl.policy.rules import ShapeRule
    from specctl.replay.rounds import Rounds

Floats = NDArray[np.float64]
LARGEST_ERROR = 0.1
"""Largest error of a check's speed at which verdicts may rest on a table."""
WAITING = 0.03
"""Share of a check that its thread may wait for a processor without a remark."""
SD_OF_MEAN = math.sqrt(math.pi / 2)
"""Standard deviation of a normal error whose absolute value is 1 in the mean."""
Spread = Annotated[float, Field(ge=0)]


# ----------------------------------------------------------------- counts


@dataclass(frozen=True)
class Steps:
    """M rounds of a batch; arrays `[M]`, or numbers that all rounds share."""

    batch_size: ArrayLike  # requests in the round
    num_tokens: ArrayLike  # verified over the batch, roots and padding included
    context_tokens: ArrayLike  # text per request up to its root, mean over the batch
    levels: ArrayLike  # drafted; 0 for a plain round
    level_width: ArrayLike  # nodes per request of each level below the first
    # tokens per request that the drafter reads after the round, padding included; 0 where every
    # request ended
    num_emitted: ArrayLike
    # largest tree of the policy per request, roots included, to which captured rounds are padded;
    # None where all its trees have this size
    max_tokens: ArrayLike | None = None
    prompt_tokens: ArrayLike = 0  # among `num_tokens`, those of prompts that share the forward
    decider: str = ""  # see `decider_of`


def steps_of(run: Rounds) -> Steps:
    """Replayed rounds, run one request at a time."""
    outcomes = run.outcomes
    return Steps(
        batch_size=1,
        num_tokens=outcomes.verified,
        context_tokens=run.context_tokens - 1,
        levels=outcomes.levels,
        level_width=outcomes.expanded / np.maximum(outcomes.levels - 1, 1),
        num_emitted=np.where(run.is_last, 0, run.emitted),
        max_tokens=run.max_tokens,
        decider="" if run.policy is None else decider_of(run.policy),
    )


def decider_of(policy: Policy) -> str:
    """The name of a policy's rule, equal for all of its settings; empty for static drafts."""
    shape, budget = policy.shape, policy.budget
    words = [shape.kind] if shape_family(shape).is_timed else []
    if isinstance(shape, ScoredTree):
        scorer = shape.scorer
        if isinstance(scorer, FfnScorer):
            size = f"{len(scorer.b1)} units"
        else:
            size = f"{len(scorer.edges) + 1} bins"
        text = ", with the text" if needs_text(scorer.features) else ""
        words = [f"c2t: {scorer.kind} of {len(scorer.features)} features, {size}{text}"]
    return "+".join([*words, *([] if isinstance(budget, PerRequest) else [budget.kind])])


def decider_text(decider: str) -> str:
    """The name of `decider_of`, with other words of the policies that the rule decides for."""
    kind, _, _ = decider.partition("+")
    words = [word for word, of in WORDS["shape"].items() if of["kind"] == kind != word]
    return f"{decider} ({', '.join(words)})" if words else decider


def width_of(steps: Steps) -> Floats:
    """Nodes per request of each level below the first, at least 1."""
    return np.where(_f(steps.levels) > 1, np.maximum(_f(steps.level_width), 1), 1)


@dataclass(frozen=True)
class OutOfRange:
    """Steps outside the range that a cost model was fitted to, along one dimension."""

    words: str  # the dimension
    # low, high: the range; None for no upper end
    low: float
    high: float | None
    num_outside: int  # of `num` steps
    num: int
    # least, most: the extremes of the steps outside
    least: float
    most: float

    @classmethod
    def of(cls, words: str, values: ArrayLike, low: float | None, high: float | None) -> OutOfRange:
        found, low = _f(values), low or 0.0
        outside = found[(found < low) | (found > (np.inf if high is None else high))]
        ends = outside.min(initial=np.inf), outside.max(initial=-np.inf)
        return cls(words, low, high, outside.size, found.size, *map(float, ends))

    def __add__(self, more: OutOfRange) -> OutOfRange:
        """Both sets of steps together."""
        return replace(
            self,
            num_outside=self.num_outside + more.num_outside,
            num=self.num + more.num,
            least=min(self.least, more.least),
            most=max(self.most, more.most),
        )

    def __str__(self) -> str:
        ends = sorted({f"{end:.4g}" for end in (self.least, self.most)}, key=float)
        known = f"{self.low:.4g} to " if self.low else "at most "
        return (
            f"{self.num_outside / self.num:.0%} of the steps have {' to '.join(ends)} "
            f"{self.words}, and its times are of {known}{self.high:.4g}"
        )


# ----------------------------------------------------------------- times


class CostModel(Record, ABC):
    """Times of rounds, us."""

    cost_model_version: Literal[1]

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the canonical JSON."""
        return digest_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Canonical JSON: the content of `cost_model.json`."""
        return canonical_json(self.model_dump(mode="json")).encode()

    def outside(self, steps: Steps) -> list[OutOfRange]:
        """Rounds outside the range of the fit, one entry a dimension; empty where the range is
        unknown."""
        del steps
        return []

    @property
    @abstractmethod
    def rises(self) -> bool:
        """Whether verification takes longer with more tokens at every measured point."""

    @property
    def time_error(self) -> float | None:
        """Relative standard error of the total time of a policy's rounds, from the points held out
        of the fit; None if unknown. See `stats.with_time_error`."""
        return None

    @property
    def failed_check(self) -> FailedCheck | None:
        """The largest error of the model's own check, if it forbids verdicts."""
        return None

    def times(self, policy: Policy) -> bool:
        """Whether times of the policy's own decisions are known, or stated to be none."""
        del policy
        return True

    @property
    def drafts(self) -> bool:
        """Whether the model holds times of a drafter."""
        return True

    @property
    def smallest_tier(self) -> int:
        """Fewest tokens that captured rounds are padded to; 0 without padding."""
        return 0

    @abstractmethod
    def part_us(self, part: str, sizes: ArrayLike, batch: ArrayLike, context: ArrayLike) -> Floats:
        """Time of one part of a round; broadcasts to the common shape of the arguments.

        Args:
            part: a field of `TableCost`, or of its `DraftGrids` as `draft.<field>`.
            sizes: per request, see `Grid`. batch: computed rows, padding included.
        """

    def _padded(self, tokens: Floats, batch: Floats, most: Floats | None) -> tuple[Floats, Floats]:
        """Tokens per row, and rows, of a verification; `most` is `Steps.max_tokens`."""
        del most
        return tokens / batch, batch

    def _num_read(self, levels: Floats, emitted: Floats) -> Floats:
        """Tokens per row that the drafter reads after a round."""
        del levels
        return emitted

    def verify_us(
        self,
        num_tokens: ArrayLike,
        batch_size: ArrayLike,
        context_tokens: ArrayLike,
        max_tokens: ArrayLike | None = None,
    ) -> Floats:
        """Verification: the target's forward over `num_tokens` of the whole batch."""
        most = None if max_tokens is None else _f(max_tokens)
        sizes, rows = self._padded(_f(num_tokens), _f(batch_size), most)
        return self.part_us("verify", sizes, rows, context_tokens)

    def draft_us(self, steps: Steps) -> Floats:
        """Drafting: all levels, the choice of nodes, and reading the committed tokens."""
        levels, width = _f(steps.levels), width_of(steps)
        batch, context = _f(steps.batch_size), _f(steps.context_tokens)
        emitted, drafts = _f(steps.num_emitted), levels > 0
        if not np.any(drafts):
            return np.zeros(np.broadcast(levels, width, batch, context, emitted).shape)
        self._check_drafter()
        _, rows = self._padded(batch, batch, None)
        num_read = self._num_read(levels, emitted)
        parts = self.part_us("draft.root", 1, rows, context)
        parts = parts + self.part_us("draft.select", width, rows, 1)
        parts = parts + (levels - 1) * self.part_us("draft.level", width, rows, context)
        parts = parts + levels * self.decider_us(steps.decider, rows)
        read = self.part_us("draft.extend", np.maximum(num_read, 1), rows, context)
        return np.where(drafts, parts + np.where(num_read > 0, read, 0.0), 0.0)

    def decider_us(self, decider: str, batch: ArrayLike) -> Floats:
        """Time of a policy's own decisions a level, less EAGLE-2's choice, which levels contain; 0
        if unknown."""
        del decider
        return np.zeros(np.shape(batch))

    def loop_us(self, steps: Steps) -> Floats:
        """Host work around the models: state, commit, emission, bookkeeping."""
        batch, drafts = _f(steps.batch_size), (_f(steps.levels) > 0) & self.drafts
        plain = self.part_us("loop", 1, batch, 1)
        if not np.any(drafts):
            return plain + np.zeros(drafts.shape)
        return np.where(drafts, self.part_us("draft.loop", 1, batch, 1), plain)

    def round_us(self, steps: Steps) -> Floats:
        """Wall time of every round: drafting, verification and host work together."""
        counts = (steps.num_tokens, steps.batch_size, steps.context_tokens)
        verify = self.verify_us(*counts, steps.max_tokens)
        return self.draft_us(steps) + verify + self.loop_us(steps)

    def prefill_us(self, num_tokens: ArrayLike, *, drafts: bool) -> Floats:
        """Reading prompts of these lengths, one at a time."""
        if drafts:
            self._check_drafter()
        return self.part_us("draft.prefill" if drafts else "prefill", num_tokens, 1, 1)

    def step_cost(self, rule: ShapeRule, batch_size: int, context_tokens: float) -> StepCost:
        """The table that a budget rule reads at run time: rounds of a full batch with a shape's
        drafts, from the roots alone to the most that the shape verifies.

        Sizes of equal cost share one entry, so a staircase stays a staircase. Below the smallest
        tier of captured rounds each size keeps its unpadded cost, because a budget needs a slope to
        choose a size.

        Raises:
            UsageError: a flat model.
        """
        require_slope(self)
        max_tokens = batch_size * rule.max_tokens
        sizes = np.arange(batch_size, max_tokens + 1)
        most = np.where(sizes < self.smallest_tier, sizes, max_tokens) / batch_size
        levels, width = rule.max_depth, rule.width
        steps = Steps(batch_size, sizes, context_tokens, levels, width, 1, most)
        times = np.maximum.accumulate(self.round_us(steps))  # rounding may undo a last digit
        ends = np.append(times[1:] > times[:-1], True)
        ends[0] = True
        counts, step_us = sizes[ends].tolist(), times[ends].tolist()
        return StepCost(token_counts=tuple(counts), step_us=tuple(step_us))

    def _check_drafter(self) -> None:
        if not self.drafts:
            raise UsageError(
                "the cost model has no timings of a drafter: it was measured on a target alone",
                hint="profile the pair: specctl profile --drafter ...",
            )


def require_slope(model: CostModel | None) -> CostModel:
    """The model, if its verification time rises with the tokens.

    Under a flat model every token is free, so a budget would always verify all of them.
    """
    if model is not None and model.rises:
        return model
    raise UsageError(
        "a budget needs a cost model whose verification time rises with the tokens; "
        f"{'none is given' if model is None else f'{model.digest[:19]} is flat'}",
        hint="measure one (specctl profile) and give it with --cost-model",
    )


# ----------------------------------------------------------------- measured


class Machine(Record):
    """Machine of the timings; another device draws a warning."""

    device: Name  # the GPU's or the processor's own name
    num_cpus: PositiveInt
    num_threads: PositiveInt  # CPU threads of torch
    dtype: Name
    torch: Name
    transformers: Name
    # cuda, driver: None on a CPU
    cuda: Name | None
    driver: Name | None


class Grid(Record):
    """Measured times of one part of a round, `[B, C, S]`."""

    # batch_sizes, context_tokens, sizes: strictly increasing; a single entry on an axis that the
    # part does not depend on. `sizes` counts per request: tokens verified, nodes of a level,
    # tokens read
    batch_sizes: Axis
    context_tokens: Axis
    sizes: Axis
    # medians, made non-decreasing along every axis (isotonic regression)
    us: tuple[tuple[tuple[Microseconds, ...], ...], ...]
    # interquartile range of the samples behind each median
    iqr_us: tuple[tuple[tuple[Spread, ...], ...], ...]

    @model_validator(mode="after")
    def _check(self) -> Grid:
        shape = len(self.batch_sizes), len(self.context_tokens), len(self.sizes)
        for name, cube in (("us", self.us), ("iqr_us", self.iqr_us)):
            rows = [row for plane in cube for row in plane]
            found = {len(cube)}, {len(plane) for plane in cube}, {len(row) for row in rows}
            same = found == tuple({length} for length in shape)
            require(same, f"{name} is not of the shape {shape} of its axes")
        for b, c, s in np.argwhere(np.diff(np.array(self.us), axis=2) < 0).tolist():
            low, high = self.us[b][c][s : s + 2]
            require(False, f"us[{b}][{c}][{s + 1}] falls from {low:.6g} to {high:.6g}")
        return self

    def read(self, sizes: ArrayLike, batch_sizes: ArrayLike, context_tokens: ArrayLike) -> Floats:
        """Times at points of `[batch, context, size]`, multilinear between the measured ones.

        Below the first point of an axis its time is constant. Beyond the last context and size it
        follows the line through the middle and the last point, so that one noisy step does not set
        the slope. A batch larger than all measured ones is refused.

        Returns:
            us, float64, of the arguments' common shape.
        """
        largest, batch = self.batch_sizes[-1], np.asarray(batch_sizes)
        if np.any(batch > largest):
            found = int(np.max(batch))
            raise UsageError(
                f"the cost model was measured up to batch size {largest}; {found} is larger",
                hint=f"measure it too: specctl profile --batch-sizes ...,{found}",
            )
        points = np.broadcast_arrays(batch_sizes, context_tokens, sizes)
        axes = (self.batch_sizes, self.context_tokens, self.sizes)
        corners = [_corners(np.asarray(a, float), p) for a, p in zip(axes, points, strict=True)]
        table, total = np.array(self.us), np.zeros(points[0].shape)
        for batch_index, batch_weight in corners[0]:
            for context, context_weight in corners[1]:
                for size, size_weight in corners[2]:
                    weight = batch_weight * context_weight * size_weight
                    total = total + weight * table[batch_index, context, size]
        return total


class DraftGrids(Record):
    """Parts of a drafting round, besides verification."""

    root: Grid  # level 1, from the state kept at the root
    level: Grid  # each further level, by width
    select: Grid  # choosing the nodes to submit, by width
    extend: Grid  # the drafter reads the committed tokens, by tokens of the longest row
    loop: Grid  # host work of a round
    prefill: Grid  # target and drafter read a prompt, by its tokens


class HeldOut(Record):
    """Error at measured points outside the fit: |predicted - measured| / measured."""

    num_points: PositiveInt
    # mape, worst: mean and largest error; shares, not percent
    mape: Spread
    worst: Spread


class DeciderCost(Record):
    """Time of a rule's decisions a level, less EAGLE-2's, measured live; by batch size."""

    policy: str  # the timed one, as `profile --policy` takes it
    batch_sizes: Axis
    level_us: tuple[Spread, ...]

    @model_validator(mode="after")
    def _check(self) -> DeciderCost:
        same = len(self.level_us) == len(self.batch_sizes)
        require(same, f"level_us has {len(self.level_us)} entries, not one for each batch size")
        return self


class FailedCheck(NamedTuple):
    """A check with an error above `LARGEST_ERROR`."""

    error: float  # predicted over measured speed, less one
    of: str  # a decoded policy, or the steps of an engine


class LiveCheck(Record):
    """The model compared with a few prompts that were decoded one at a time."""

    policy: Name
    num_tokens: PositiveInt  # emitted
    # predicted_us, measured_us: of the run, its prompts included
    predicted_us: Microseconds
    measured_us: Microseconds
    # share of the measured time that the thread waited for a processor; 0 if the system does not
    # report it
    waited: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def error(self) -> float:
        """Predicted over measured speed, less one."""
        return self.measured_us / self.predicted_us - 1

    @property
    def undisturbed_error(self) -> float:
        """The error of the time without waiting."""
        return (1 + self.error) * (1 - self.waited) - 1


class TableCost(CostModel):
    """Times measured by `specctl profile`.

    They form a staircase up to the capture limit, and lines between sizes above it. Captured rounds
    are padded as in the runtime: rows to a power of two, tokens to a tier.
    """

    kind: Literal["table"] = "table"
    machine: Machine
    pair: PairFingerprint
    # measured, expires: UTC
    measured: UtcTime
    expires: UtcTime
    num_samples: PositiveInt  # rounds behind each median of verification
    # rounds that were timed: of the ordinary loop, or captured ones
    rounds: Literal["ordinary", "graphs"] = "ordinary"
    # of another engine: up to this batch total, tokens are padded to the next size of the grid; 0
    # without padding
    capture_limit_tokens: Count
    # batch totals that captured rounds of this runtime are padded to, or to the policy's largest
    # tree if that is smaller; empty without padding
    token_tiers: Increasing = ()
    verify: Grid  # the target's forward and the choice of its tokens, by tokens per request
    loop: Grid  # host work of a plain round
    prefill: Grid  # the target reads a prompt, by its tokens
    draft: DraftGrids | None  # None for a target without a drafter
    # rules timed by `--policy`, by the name of `decider_of`
    deciders: dict[Name, DeciderCost] = Field(default_factory=dict)
    held_out: dict[Name, HeldOut]  # by part
    checks: tuple[LiveCheck, ...] = ()  # live runs at the end of the measurement

    @model_validator(mode="after")
    def _check(self) -> TableCost:
        has_tiers, has_limit = bool(self.token_tiers), bool(self.capture_limit_tokens)
        require(not has_tiers or self.rounds == "graphs", "token_tiers of ordinary rounds")
        require(not (has_tiers and has_limit), "token_tiers beside a capture_limit_tokens")
        return self

    @property
    def rises(self) -> bool:
        return all(row[-1] > row[0] for plane in self.verify.us for row in plane)

    @property
    def time_error(self) -> float | None:
        """The error of the worst part of a round; prompts are no part of it."""
        parts = [of.mape for name, of in self.held_out.items() if not name.endswith("prefill")]
        return SD_OF_MEAN * max(parts) if parts else None

    @property
    def failed_check(self) -> FailedCheck | None:
        """The worst check, if its error exceeds `LARGEST_ERROR` and waiting does not explain it."""
        worst = None if self.disturbed_check else self._large_error
        return None if worst is None else FailedCheck(worst.error, worst.policy)

    @property
    def disturbed_check(self) -> LiveCheck | None:
        """The worst check, if its error exceeds `LARGEST_ERROR` and waiting may explain it."""
        undisturbed = max((abs(check.undisturbed_error) for check in self.checks), default=0.0)
        worst = self._large_error
        is_explained = worst and worst.waited > WAITING and undisturbed <= LARGEST_ERROR
        return worst if is_explained else None

    @property
    def _large_error(self) -> LiveCheck | None:
        worst = max(self.checks, key=lambda check: abs(check.error), default=None)
        return worst if worst and abs(worst.error) > LARGEST_ERROR else None

    def times(self, policy: Policy) -> bool:
        name = decider_of(policy)
        return not name or name in self.deciders

    @property
    def device(self) -> str:
        """The machine's device."""
        return self.machine.device

    @property
    def hardware(self) -> str:
        """Device, number format and threads."""
        threads = count(self.machine.num_threads, "thread")
        return f"{self.device}, {self.machine.dtype}, {threads}"

    @property
    def held_out_text(self) -> str:
        """The mean error at held-out points, by part."""
        return ", ".join(f"{name} {part.mape:.1%}" for name, part in self.held_out.items())

    @property
    def drafts(self) -> bool:
        return self.draft is not None

    @property
    def smallest_tier(self) -> int:
        return min(self.token_tiers, default=0)

    def part_us(self, part: str, sizes: ArrayLike, batch: ArrayLike, context: ArrayLike) -> Floats:
        name = part.removeprefix("draft.")
        grid: Grid = getattr(self if name == part else self.draft, name)
        if name == "level" and grid.sizes == (1,) and np.any(np.asarray(sizes) > 1):
            raise UsageError(
                "the cost model was measured with chains alone, and this tree has "
                f"{int(np.max(sizes))} nodes a level",
                hint="measure trees too: specctl profile --widths 1,4,10",
            )
        return grid.read(sizes, batch, context)

    def decider_us(self, decider: str, batch: ArrayLike) -> Floats:
        found = self.deciders.get(decider)
        if found is None:
            return super().decider_us(decider, batch)
        return np.interp(_f(batch), found.batch_sizes, found.level_us)

    def outside(self, steps: Steps) -> list[OutOfRange]:
        sizes = _f(steps.num_tokens) / _f(steps.batch_size)
        widest = self.draft.level.sizes[-1] if self.draft is not None else None
        return [
            OutOfRange.of("tokens verified a request", sizes, None, self.verify.sizes[-1]),
            OutOfRange.of("nodes a level", width_of(steps), None, widest),
        ]

    def _padded(self, tokens: Floats, batch: Floats, most: Floats | None) -> tuple[Floats, Floats]:
        """Rows are padded to the next power of two within the measured batches, tokens to tiers."""
        rows = batch
        if self.rounds == "graphs":
            bucket = np.minimum(np.exp2(np.ceil(np.log2(batch))), self.verify.batch_sizes[-1])
            rows = np.maximum(bucket, batch)
        if most is not None and self.token_tiers:
            tier = _next_above(self.token_tiers, tokens)
            tokens = np.maximum(np.minimum(tier, most * rows), tokens)
        sizes = tokens / rows
        padded = _next_above(self.verify.sizes, sizes)
        return np.where(padded * rows <= self.capture_limit_tokens, padded, sizes), rows

    def _num_read(self, levels: Floats, emitted: Floats) -> Floats:
        """A captured round, the last one too, reads as many places as its tree is deep."""
        return np.where(levels > 0, levels + 1, emitted) if self.rounds == "graphs" else emitted


def _f(values: ArrayLike) -> Floats:
    return np.asarray(values, np.float64)


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
    """Each value rounded up to the next of increasing steps; unchanged beyond the last."""
    axis = np.asarray(steps, np.float64)
    index = np.searchsorted(axis, values)
    return np.where(index < len(axis), axis[np.minimum(index, len(axis) - 1)], values)
