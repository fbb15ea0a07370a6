"""What the steps of a batch cost: counts for a cost model, packed or padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from specctl.logs.positions import Floats, Longs
from specctl.replay.batch.rounds import BatchRounds
from specctl.replay.batch.submissions import Submissions
from specctl.replay.cost.model import Steps

Packing = Literal["ragged", "padded"]
"""How trees of different sizes are verified together: back to back, as this runtime and serving
engines do, or padded to the largest. A budget that trims some requests more than others saves time
only in the former. (This runtime pads where that adds less than a fifth, because it takes the same
time there: `runtime.packing.pays`.)"""


class StepClock(Protocol):
    """Times of steps and of reading prompts, us; `CostModel` is one."""

    def round_us(self, steps: Steps) -> Floats:
        """`[S]`: drafting, verification and host work of each step."""
        ...

    def prefill_us(self, num_tokens: ArrayLike, *, drafts: bool) -> Floats:
        """Reading prompts of these lengths, one at a time."""
        ...


@dataclass(frozen=True)
class Timer:
    """A clock bound to one policy and one way of packing."""

    submissions: Submissions
    clock: StepClock
    packing: Packing

    def prompt_us(self, logged: Longs) -> Floats:
        """`[M]`: reading the prompts of these requests of the log."""
        positions = self.submissions.positions
        # At the first position the text is the prompt and one token.
        num_tokens = positions.context_tokens[positions.start[logged]] - 1
        return self.clock.prefill_us(num_tokens, drafts=self.submissions.drafts)

    def round_us(self, rounds: BatchRounds) -> Floats:
        """`[S]`: the rounds of each step."""
        return self.clock.round_us(self.steps(rounds))

    def steps(self, rounds: BatchRounds) -> Steps:
        """What a cost model asks of every step; the batch drafts as deep as its deepest row."""
        first, row = rounds.first, rounds.row
        context = self.submissions.positions.context_tokens[row]
        return Steps(
            batch_size=rounds.batch_sizes,
            num_tokens=self.num_processed(rounds),
            context_tokens=rounds.per_step(context) / rounds.batch_sizes - 1,  # without the root
            levels=np.maximum.reduceat(self.submissions.levels[row], first),
            level_width=self._level_width(rounds),
            num_emitted=self._num_read(rounds),
            max_tokens=self._most(rounds),
        )

    def num_processed(self, rounds: BatchRounds) -> Longs:
        """`[S]` tokens of the target's forward, padding included."""
        if self.packing == "padded":
            return np.maximum.reduceat(rounds.verified, rounds.first) * rounds.batch_sizes
        return rounds.per_step(rounds.verified)

    def _most(self, rounds: BatchRounds) -> Floats:
        """`[S]` tokens per request that may be verified at most, under the budget's limit."""
        limit = getattr(self.submissions.policy.budget, "max_tokens", None) or np.inf
        return np.minimum(self.submissions.max_tokens, limit / rounds.batch_sizes)

    def _level_width(self, rounds: BatchRounds) -> Floats:
        """`[S]` nodes that the widest row expands per level below the first."""
        asked, levels = self.submissions.asked[rounds.row], self.submissions.levels[rounds.row]
        return np.maximum.reduceat((asked - 1) / np.maximum(levels - 1, 1), rounds.first)

    def _num_read(self, rounds: BatchRounds) -> Longs | Floats:
        """`[S]` tokens a row that the drafter reads, padding included; 0 where all texts end."""
        ends = rounds.accepted + 1 >= self.submissions.positions.remaining[rounds.row]
        goes_on = ~np.logical_and.reduceat(ends, rounds.first)
        if self.packing == "padded":
            return np.maximum.reduceat(rounds.accepted + 1, rounds.first) * goes_on
        return rounds.per_step(rounds.accepted + 1) / rounds.batch_sizes * goes_on
