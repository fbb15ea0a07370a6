"""Cost models that are linear in the counts of a step: stated rates, and rates fitted to the steps
of an engine (`engine`)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from specctl.artifacts.manifest import Count, Digest, Name, PairFingerprint, UtcTime
from specctl.errors import UsageError
from specctl.formatting import count
from specctl.policy.budgets import Microseconds
from specctl.records import PositiveInt, Record, require
from specctl.replay.config import Increasing
from specctl.replay.cost.model import (
    LARGEST_ERROR,
    SD_OF_MEAN,
    CostModel,
    FailedCheck,
    Floats,
    OutOfRange,
    Spread,
    Steps,
    width_of,
)

Rate = Annotated[float, Field(ge=0)]


class Rates(NamedTuple):
    """Microseconds of a part of a step; sizes and cached tokens count per request."""

    fixed: float
    request: float
    size: float
    cached: float


class RateCost(CostModel):
    """Parts of a round with a fixed time and rates a request, a token and a cached token."""

    verify_token_us: Rate

    @property
    @abstractmethod
    def rates(self) -> dict[str, Rates]:
        """By part; a missing part is contained in the others."""

    @property
    def rises(self) -> bool:
        return self.verify_token_us > 0

    def part_us(self, part: str, sizes: ArrayLike, batch: ArrayLike, context: ArrayLike) -> Floats:
        if part not in self.rates:
            return np.zeros(())
        rate, batch = self.rates[part], np.asarray(batch, np.float64)
        per_request = (
            rate.request + np.asarray(sizes) * rate.size + np.asarray(context) * rate.cached
        )
        return rate.fixed + batch * per_request


# ----------------------------------------------------------------- stated


class LinearCost(RateCost):
    """Published or hand-written rates, after SpecDecode-Bench's simulator (`predictor.py`).

    A step of n batched tokens over c cached ones, L passes of the drafter and K drafted tokens (n,
    c and K over the batch) costs `step_us + verify_fixed_us + n · verify_token_us
    + c · verify_cached_token_us`. A drafting step adds `draft_fixed_us + L · draft_level_us
    + K · draft_token_us + c · draft_cached_token_us`. A level of W nodes drafts W tokens a request,
    the first level one. A prompt is one step of its tokens. The fixed part includes the reading of
    committed tokens. The simulator's rate for draft tokens counts one request of the batch, root
    included: for chains it becomes `draft_level_us`, and once more a part of `draft_fixed_us`.
    """

    kind: Literal["linear"] = "linear"
    source: Name  # model, drafter, hardware and publication of the rates
    verify_fixed_us: Microseconds
    verify_cached_token_us: Rate
    draft_fixed_us: Rate
    draft_level_us: Rate = 0.0
    draft_token_us: Rate
    draft_cached_token_us: Rate = 0.0
    step_us: Rate
    # largest_batch_size, largest_level_width: the range of the fit behind the rates; None for no
    # limit. See `outside`
    largest_batch_size: PositiveInt | None = None
    largest_level_width: PositiveInt | None = None

    @property
    def hardware(self) -> str:
        """The source of the rates."""
        return f"linear cost form by {self.source}"

    @cached_property
    def rates(self) -> dict[str, Rates]:
        # The published form gives no time for a drafter's prompt.
        prompt = Rates(self.verify_fixed_us + self.step_us, 0.0, self.verify_token_us, 0.0)
        step = Rates(self.step_us, 0.0, 0.0, 0.0)
        first, token = self.draft_fixed_us + self.draft_level_us, self.draft_token_us
        return {
            "verify": Rates(
                self.verify_fixed_us, 0.0, self.verify_token_us, self.verify_cached_token_us
            ),
            "prefill": prompt,
            "draft.prefill": prompt,
            "loop": step,
            "draft.loop": step,
            "draft.root": Rates(first, 0.0, token, self.draft_cached_token_us),
            "draft.level": Rates(self.draft_level_us, 0.0, token, 0.0),
        }

    def outside(self, steps: Steps) -> list[OutOfRange]:
        return [
            OutOfRange.of("requests a step", steps.batch_size, None, self.largest_batch_size),
            OutOfRange.of("nodes a level", width_of(steps), None, self.largest_level_width),
        ]


# ----------------------------------------------------------------- of an engine


class Span(Record):
    """The least and the most of a quantity in the steps of a fit."""

    low: Rate
    high: Rate


class Support(Record):
    """The range of a fit, dimension by dimension."""

    batch_size: Span  # requests of a step
    tokens_per_request: Span  # verified, roots counted
    levels: Span  # passes of the drafter
    context_tokens: Span  # cached, per request
    prompt_tokens: Span  # read in a step, over the batch

    def __str__(self) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {span.low:.4g} to {span.high:.4g}" for name, span in self
        )


def gaps_passed(sizes: Floats, tokens: ArrayLike) -> Floats:
    """The share `[..., G]` of each gap between increasing sizes that lies below a number of
    tokens."""
    into = np.asarray(tokens, np.float64)[..., None] - sizes[:-1]
    return (into / np.diff(sizes)).clip(0, 1)


def dimensions(steps: Steps) -> dict[str, tuple[str, ArrayLike]]:
    """Words and values of the quantities that `Support` has the range of."""
    batch = np.asarray(steps.batch_size, np.float64)
    tokens = np.asarray(steps.num_tokens, np.float64) - np.asarray(steps.prompt_tokens)
    return {
        "batch_size": ("requests a step", batch),
        "tokens_per_request": ("tokens verified a request", tokens / batch),
        "levels": ("passes of the drafter", steps.levels),
        "context_tokens": ("cached tokens a request", steps.context_tokens),
        "prompt_tokens": ("tokens of prompts", steps.prompt_tokens),
    }


class StepError(Record):
    """|predicted - measured| / measured of steps held out of the fit."""

    num_steps: PositiveInt
    # median, p90: shares, not percent
    median: Spread
    p90: Spread
    total: float  # predicted over measured time of all steps together, less 1; without stalls
    by_length: Spread  # |total| of each draft length, averaged by number of steps


STALL = 10.0
"""Steps that take more than so many times their fitted time are pauses of the machine: one second
among a thousand steps would make each look a tenth slower."""


class EngineCost(RateCost):
    """Rates fitted by `specctl profile --from` to the step times of a serving engine.

    A step of B requests, n verified tokens, p tokens of prompts, c cached ones (all three over the
    batch) and L passes of the drafter costs `verify_fixed_us + B · verify_request_us
    + n · verify_token_us + p · verify_prompt_token_us + c · verify_cached_token_us` (with
    `verify_sizes`, the gaps up to n in place of `n · verify_token_us`), and
    `host_us + B · host_request_us` for the policy, the scheduler and the rest. A drafting step adds
    `draft_fixed_us + L · (level_us + B · level_request_us) + p · draft_prompt_token_us`. A level of
    W nodes counts as W requests. A prompt by itself is a step of its tokens.
    """

    kind: Literal["engine"] = "engine"
    engine: Name
    engine_version: Name
    device: Name  # hardware named by the traces
    dtype: Name
    pair: PairFingerprint
    traces_digest: Digest
    measured: UtcTime
    expires: UtcTime
    num_steps: PositiveInt  # behind the fit
    num_prompt_steps: Count  # of these, steps that read prompts too
    num_stalls: Count  # of these, steps slower than `STALL` times, which the means leave out
    mean_over_median: Annotated[float, Field(gt=0)]  # factor from rates of medians to mean times
    verify_fixed_us: Rate
    verify_request_us: Rate
    verify_prompt_token_us: Rate
    verify_cached_token_us: Rate
    draft_fixed_us: Rate
    draft_prompt_token_us: Rate
    level_us: Rate
    level_request_us: Rate
    host_us: Rate
    host_request_us: Rate
    # batch totals of verified tokens between which times are lines, and the time from each to the
    # next; beyond the last, `verify_token_us` a token. Empty: `verify_token_us` for all tokens
    verify_sizes: Increasing = ()
    verify_gap_us: tuple[Rate, ...] = ()
    support: Support  # see `outside`
    held_out: StepError

    @model_validator(mode="after")
    def _check(self) -> Self:
        num_gaps = max(len(self.verify_sizes) - 1, 0)
        found = len(self.verify_gap_us)
        require(found == num_gaps, f"verify_gap_us has {found} times, not {num_gaps}")
        return self

    def part_us(self, part: str, sizes: ArrayLike, batch: ArrayLike, context: ArrayLike) -> Floats:
        us = super().part_us(part, sizes, batch, context)
        if part != "verify" or not self.verify_sizes:
            return us
        known = np.asarray(self.verify_sizes, np.float64)
        tokens = np.asarray(batch, np.float64) * np.asarray(sizes)
        gaps_us: Floats = gaps_passed(known, tokens) @ np.asarray(self.verify_gap_us)
        more_us: Floats = np.maximum(tokens - known[-1], 0) * self.verify_token_us
        return us + gaps_us + more_us

    @cached_property
    def rates(self) -> dict[str, Rates]:
        host = Rates(self.host_us, self.host_request_us, 0.0, 0.0)
        request = self.verify_request_us
        token = 0.0 if self.verify_sizes else self.verify_token_us  # see `part_us`
        verify = Rates(self.verify_fixed_us, request, token, self.verify_cached_token_us)
        read, also_read = self.verify_prompt_token_us, self.draft_prompt_token_us
        prompt = Rates(verify.fixed + host.fixed, request + host.request, read, 0.0)
        first = self.draft_fixed_us + self.level_us
        return {
            "verify": verify,
            "loop": host,
            "draft.loop": host,
            "prefill": prompt,
            "draft.prefill": Rates(
                prompt.fixed + first,
                prompt.request + self.level_request_us,
                read + also_read,
                0.0,
            ),
            "draft.root": Rates(first, 0.0, self.level_request_us, 0.0),
            "draft.level": Rates(self.level_us, 0.0, self.level_request_us, 0.0),
        }

    @property
    def hardware(self) -> str:
        """Device, number format and engine."""
        return f"{self.device}, {self.dtype}, {self.engine} {self.engine_version}"

    @property
    def held_out_text(self) -> str:
        """The error of held-out steps."""
        return f"median {self.held_out.median:.1%}, p90 {self.held_out.p90:.1%}"

    @property
    def drafts(self) -> bool:
        return self.support.levels.high > 0

    @property
    def time_error(self) -> float:
        """The error of all held-out steps of one draft length together, as single steps scatter."""
        return SD_OF_MEAN * self.held_out.by_length

    @property
    def failed_check(self) -> FailedCheck | None:
        """The error of all held-out steps together, if it exceeds `LARGEST_ERROR`."""
        error = 1 / (1 + self.held_out.total) - 1
        words = count(self.held_out.num_steps, "held-out step")
        return FailedCheck(error, words) if abs(error) > LARGEST_ERROR else None

    def round_us(self, steps: Steps) -> Floats:
        """Times as of any model; a batch larger than the engine ever ran is refused."""
        largest, found = self.support.batch_size.high, float(np.max(steps.batch_size, initial=0))
        if found > largest:
            raise UsageError(
                f"the cost model is fitted to batches up to {largest:g}, the largest that "
                f"{self.engine} ran; {found:g} is larger",
                hint="log the engine at that load, and fit again with specctl profile --from",
            )
        prompt = np.asarray(steps.prompt_tokens, np.float64)
        also_us = np.where(np.asarray(steps.levels) > 0, self.draft_prompt_token_us, 0.0)
        rounds = replace(steps, num_tokens=np.asarray(steps.num_tokens) - prompt)
        return super().round_us(rounds) + prompt * (self.verify_prompt_token_us + also_us)

    def outside(self, steps: Steps) -> list[OutOfRange]:
        spans: dict[str, Span] = dict(self.support)
        return [
            OutOfRange.of(words, values, spans[name].low, spans[name].high)
            for name, (words, values) in dimensions(steps).items()
        ]
