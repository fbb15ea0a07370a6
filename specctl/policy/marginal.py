"""The marginal budget: a node is verified where it earns its time at the going rate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.calibration import CalibrationTable
from specctl.policy.rules import Plan
from specctl.policy.sharing import rank_batch


@dataclass(frozen=True)
class MarginalRule:
    """Verifies a node iff its joint acceptance is at least rate times its marginal cost.

    With the long-run rate of the load as the price of time this maximises long-run tokens per
    time, where the rate of the single step (`SurvivalRule`) speculates too much in hard
    contexts and too little in easy ones (notes/state-of-the-art.md, 2.2, Dinkelbach).

    Attributes:
        tokens_per_us: λ, tokens of the whole batch per us.
        step_us: `[S + 1]` float64, us of a round that verifies so many tokens.
    """

    tokens_per_us: float
    step_us: Tensor
    calibration: CalibrationTable | None

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        del plan
        ranking = rank_batch(pool, submitted, self.calibration)
        cost = self.step_us[len(submitted) :]
        size = best_surplus(ranking.expected_tokens, cost, self.tokens_per_us)
        return ranking.keep(submitted, size)


def best_surplus(expected_tokens: Tensor, step_us: Tensor, tokens_per_us: float) -> Tensor:
    """`[]` int64: the number of draft nodes m that maximises tokens less the price of time.

    Over all sizes, since the marginal cost of a staircase is 0 on a stair and a jump behind it.
    Of equal sizes the larger wins: a node that just pays is verified.

    Args:
        expected_tokens: `[M + 1]`. step_us: `[M + 1]` or more, both by m.
    """
    surplus = expected_tokens - tokens_per_us * step_us[: len(expected_tokens)]
    return len(surplus) - 1 - surplus.flip(0).argmax()
