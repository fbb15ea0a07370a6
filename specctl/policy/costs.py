"""Step costs: what a budget must know of the machine to weigh a token against its time."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.policy.base import PositiveInt, Record, increasing, require

if TYPE_CHECKING:
    from torch import Tensor

Microseconds = Annotated[float, Field(gt=0)]


class StepCost(Record):
    """Time of one verification round by its size, at one batch size and context.

    Attributes:
        token_counts: strictly increasing, nodes the target verifies over the batch, roots
            counted; two or more.
        step_us: us, as many, never falling: time of a whole round of that size.
    """

    token_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    step_us: tuple[Microseconds, ...]

    @model_validator(mode="after")
    def _laws(self) -> StepCost:
        num_counts, num_times = len(self.token_counts), len(self.step_us)
        require(num_counts == num_times, f"{num_counts} token counts, {num_times} step_us")
        require(increasing(self.token_counts), "token_counts must strictly increase")
        falling = [i for i, (low, high) in enumerate(pairwise(self.step_us), 1) if high < low]
        require(not falling, f"step_us must not fall, index {falling[:1]} does")
        return self

    def step_table(self, max_tokens: int) -> Tensor:
        """Cost of every size: `[max_tokens + 1]` float64 us, entry n for n verified tokens.

        A staircase up to the last count, where a batch is padded to the next captured size (a
        size between two counts costs what the larger one does, and size 0 what the smallest
        does); beyond it the line through the last two.

        Raises:
            UsageError: a flat table, or a flat end beyond which sizes are asked for: every
                token would seem free.
        """
        import torch  # here: who only reads records does without it

        counts = torch.tensor(self.token_counts, dtype=torch.float64)
        times = torch.tensor(self.step_us, dtype=torch.float64)
        self._check_slope(max_tokens)
        sizes = torch.arange(max_tokens + 1, dtype=torch.float64)
        stairs = times[torch.searchsorted(counts, sizes).clamp(max=len(counts) - 1)]
        slope = (times[-1] - times[-2]) / (counts[-1] - counts[-2])
        return stairs + slope * (sizes - counts[-1]).clamp(min=0)

    def _check_slope(self, max_tokens: int) -> None:
        last = self.token_counts[-1]
        if self.step_us[0] < self.step_us[-1] and (
            max_tokens <= last or self.step_us[-2] < self.step_us[-1]
        ):
            return
        raise UsageError(
            "step_us of the step cost",
            expected=f"a cost that rises with the tokens, up to {max_tokens} of them",
            found=f"a flat one, {self.step_us[-2]:.6g} to {self.step_us[-1]:.6g} us "
            f"at {self.token_counts[-2]} to {last} tokens",
            fix="profile more and larger sizes (specctl profile)",
        )
