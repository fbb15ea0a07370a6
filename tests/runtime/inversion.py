"""Drawing by inversion: one coin a position, cut into cells that tests can count.

Production draws by Gumbel noise, whose distribution cannot be enumerated. Whatever draws, each
token follows the distribution at its node if its coin is independent of the other positions' and of
the policy, so the loop is enumerated with coins of this kind; `test_draws.py` holds production's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def invert(logits: Tensor, coins: Tensor) -> Tensor:
    """`[N]` int64: the token whose cumulative-probability interval holds the coin.

    Token v owns [F(v - 1), F(v)) in vocabulary order; one of probability 0 owns nothing.
    """
    mass = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    total = mass[:, -1:]
    # Rounding must not lift a coin just below 1 to the total, beyond the last owner.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum(coins[:, None] * total, below_total)
    return torch.searchsorted(mass, wanted, right=True)[:, 0]


class CellDraw:
    """Request `seed` draws its tokens from the middles of cells `cells[seed]`, by position."""

    def __init__(self, cells: Sequence[Sequence[int]], num_cells: int) -> None:
        self.coins = (torch.tensor(cells, dtype=torch.float64) + 0.5) / num_cells

    def __call__(self, processed: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        # Nodes beyond the end of the text are drawn too, and never emitted.
        return invert(processed, self.coins[seeds, positions.clamp(max=self.coins.shape[1] - 1)])
