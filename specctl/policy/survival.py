"""The survival budget: the batch verifies its likeliest nodes, as many as pay for their time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.calibration import CalibrationTable
from specctl.policy.rules import Plan
from specctl.policy.sharing import rank_batch


@dataclass(frozen=True)
class SurvivalRule:
    """Global top slots; the size is fixed, or the one of most tokens per time.

    vLLM's adaptive verification (PR 47808) and DSpark (arXiv:2607.05147) rank the slots of
    chains so and take the size of most expected tokens per profiled step cost; here over trees.

    Attributes:
        max_tokens: nodes of the batch at most, roots counted; None leaves the size to `step_us`.
        step_us: `[S + 1]` float64, us of a round that verifies so many tokens; None fills up to
            `max_tokens`.
    """

    max_tokens: int | None
    step_us: Tensor | None
    calibration: CalibrationTable | None

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        del plan
        ranking = rank_batch(pool, submitted, self.calibration)
        limit = len(ranking.order)
        if self.max_tokens is not None:
            limit = min(limit, self.max_tokens - len(submitted))
        if self.step_us is None:
            return ranking.keep(submitted, limit)
        tokens = ranking.expected_tokens[: limit + 1]
        return ranking.keep(submitted, best_rate(tokens, self.step_us[len(submitted) :]))


def best_rate(expected_tokens: Tensor, step_us: Tensor) -> Tensor:
    """`[]` int64: the number of draft nodes m that maximises expected tokens over step time.

    The maximum over all sizes: a cost with stairs has many local ones, and the first descent
    would stop at the first step (TensorRT-LLM PR 17056). Of equal rates the smaller size wins.

    Args:
        expected_tokens: `[M + 1]`. step_us: `[M + 1]` or more, both by m.
    """
    return (expected_tokens / step_us[: len(expected_tokens)]).argmax()
