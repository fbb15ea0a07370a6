"""Machine time of rounds at a load: what every rung of the ladder is charged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from specctl.logs.positions import Floats
from specctl.replay.cost.model import CostModel, Steps, steps_of
from specctl.replay.rounds import Rounds


@dataclass(frozen=True)
class LoadClock:
    """A request's share of a batch of `batch_size` requests that run rounds of one kind.

    At batch size 1 this is the round's own time. Above, the batch is taken to be B copies of the
    round at hand, and each copy pays one B-th: exact where time is linear in the tokens, and a
    mean-field statement elsewhere, because a real batch waits for its deepest draft
    (`replay.batch` simulates that).
    """

    model: CostModel
    batch_size: int = 1

    def share_us(
        self,
        *,
        context_tokens: ArrayLike,
        num_tokens: ArrayLike,
        levels: ArrayLike,
        level_width: ArrayLike,
        num_emitted: ArrayLike,
    ) -> Floats:
        """us of machine time per request, of the arguments' common shape.

        Args:
            context_tokens: text up to and with the root. num_tokens: nodes verified, root
                counted. levels: drafted. level_width: nodes that each level below the first
                evaluates. num_emitted: tokens emitted; 0 where the request ends, so that the
                drafter reads nothing more.
        """
        cached = np.asarray(context_tokens) - 1
        tokens = np.asarray(num_tokens)
        return self._share(Steps(1, tokens, cached, levels, level_width, num_emitted))

    def __call__(self, run: Rounds) -> Floats:
        """`[M]`: the same of replayed rounds."""
        return self._share(steps_of(run))

    def check(self) -> None:
        """Refuses at once what would be refused after minutes of reading.

        Raises:
            UsageError: a load that was not measured, or no timings of a drafter.
        """
        self.share_us(context_tokens=2, num_tokens=2, levels=1, level_width=1, num_emitted=1)

    def _share(self, steps: Steps) -> Floats:
        tokens = np.asarray(steps.num_tokens) * self.batch_size
        batch = replace(steps, batch_size=self.batch_size, num_tokens=tokens)
        return self.model.round_us(batch) / self.batch_size
