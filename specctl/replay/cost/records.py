"""The strict records of `cost_model.json`, in two forms (docs/cost-model.md)."""

from __future__ import annotations

from collections.abc import Sized
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from specctl.artifacts.manifest import Count, Name, PairFingerprint, UtcTime
from specctl.policy.budgets import Microseconds
from specctl.records import PositiveInt, Record, require

COST_MODEL_VERSION: Literal[1] = 1

Axis = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
Spread = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0)]
Row = tuple[Microseconds, ...]
Timings = tuple[tuple[Row, ...], ...]
Spreads = tuple[tuple[tuple[Spread, ...], ...], ...]


class Machine(Record):
    """Where timings were measured; every field that differs is named in a warning.

    Attributes:
        device: the GPU's or the processor's own name.
        num_threads: CPU threads of torch. cuda, driver: None on a CPU.
    """

    device: Name
    num_cpus: PositiveInt
    num_threads: PositiveInt
    dtype: Name
    torch: Name
    transformers: Name
    cuda: Name | None
    driver: Name | None


class Grid(Record):
    """Measured times of one part of a round, `[B, C, S]`.

    Attributes:
        batch_sizes, context_tokens, sizes: strictly increasing; a part that does not depend on
            one has a single entry there. `sizes` counts per request: tokens verified, nodes of
            a level, tokens read.
        us: medians, made non-decreasing along every axis (isotonic regression).
        iqr_us: interquartile range of the samples behind each median.
    """

    batch_sizes: Axis
    context_tokens: Axis
    sizes: Axis
    us: Timings
    iqr_us: Spreads

    @model_validator(mode="after")
    def _check(self) -> Grid:
        for name in ("batch_sizes", "context_tokens", "sizes"):
            _check_increasing(name, getattr(self, name))
        num_batches, num_contexts = len(self.batch_sizes), len(self.context_tokens)
        num_sizes = len(self.sizes)
        for name in ("us", "iqr_us"):
            cube: Spreads = getattr(self, name)
            _check_size(name, cube, num_batches, "batch sizes")
            for b, plane in enumerate(cube):
                _check_size(f"{name}[{b}]", plane, num_contexts, "contexts")
                for c, row in enumerate(plane):
                    _check_size(f"{name}[{b}][{c}]", row, num_sizes, "sizes")
        for b, c, s in np.argwhere(np.diff(np.array(self.us), axis=2) < 0).tolist():
            low, high = self.us[b][c][s : s + 2]
            require(False, f"us[{b}][{c}][{s + 1}] falls from {low:.6g} to {high:.6g}")
        return self


class DraftGrids(Record):
    """The parts of a round that drafts, beside verification.

    Attributes:
        root: level 1, from the state kept at the root. level: each further level by its width.
        select: choosing what to submit, by width. extend: the drafter reads what was committed,
            by tokens of the longest row. loop: host work of a round. prefill: target and
            drafter read a prompt, by its tokens.
    """

    root: Grid
    level: Grid
    select: Grid
    extend: Grid
    loop: Grid
    prefill: Grid


class HeldOut(Record):
    """Error at points that were measured but not fitted: |predicted - measured| / measured.

    Attributes:
        mape: the mean, worst: the largest; shares, not percent.
    """

    num_points: PositiveInt
    mape: Spread
    worst: Spread


class TableCost(Record):
    """Measured by `specctl profile`.

    Attributes:
        measured, expires: UTC.
        num_samples: rounds behind each median of verification.
        rounds: the timed rounds, of the ordinary loop or captured ones.
        capture_limit_tokens: of another engine: sizes of the grid up to this batch total are
            captured, and smaller batches are padded to the next; 0 without such captures.
        token_tiers: totals of a batch that captured rounds of this runtime are padded to, or to the
            most that a policy verifies where that is less; none where they are not padded so.
        verify: the target's forward and the choice of its tokens, by tokens per request.
        loop: host work of a plain round. prefill: the target reads a prompt, by its tokens.
        draft: None for a target without a drafter.
        held_out: by part.
    """

    kind: Literal["table"] = "table"
    cost_model_version: Literal[1]
    machine: Machine
    pair: PairFingerprint
    measured: UtcTime
    expires: UtcTime
    num_samples: PositiveInt
    rounds: Literal["ordinary", "graphs"] = "ordinary"
    capture_limit_tokens: Count
    token_tiers: tuple[PositiveInt, ...] = ()
    verify: Grid
    loop: Grid
    prefill: Grid
    draft: DraftGrids | None
    held_out: dict[Name, HeldOut]

    @model_validator(mode="after")
    def _check(self) -> TableCost:
        _check_increasing("token_tiers", self.token_tiers)
        has_tiers, has_limit = bool(self.token_tiers), bool(self.capture_limit_tokens)
        require(not has_tiers or self.rounds == "graphs", "token_tiers of ordinary rounds")
        require(not (has_tiers and has_limit), "token_tiers beside a capture_limit_tokens")
        return self


class LinearCost(Record):
    """Published or hand-written: the form of SpecDecode-Bench's simulator (`predictor.py`).

    A step of n batched tokens over c cached ones, K drafted tokens (all over the batch), costs
    `step_us + verify_fixed_us + n · verify_token_us + c · verify_cached_token_us`, and where it
    drafts also `draft_fixed_us + K · draft_token_us + c · draft_cached_token_us`.

    Attributes:
        source: its publisher, the model and the hardware.
    """

    kind: Literal["linear"] = "linear"
    cost_model_version: Literal[1]
    source: Name
    verify_fixed_us: Microseconds
    verify_token_us: Rate
    verify_cached_token_us: Rate
    draft_fixed_us: Rate
    draft_token_us: Rate
    draft_cached_token_us: Rate = 0.0
    step_us: Rate


CostRecord = Annotated[TableCost | LinearCost, Field(discriminator="kind")]


def _check_size(name: str, values: Sized, wanted: int, of: str) -> None:
    require(len(values) == wanted, f"{name} has {len(values)} {of}, not {wanted}")


def _check_increasing(name: str, axis: tuple[int, ...]) -> None:
    for index, (low, high) in enumerate(pairwise(axis), 1):
        require(low < high, f"{name}[{index}] is {high} after {low}; it must strictly increase")
