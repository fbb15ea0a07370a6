"""Two running means of a request: of what verification accepted, and of what it rejected first.

AdaSD's thresholds lie between them (arXiv:2512.11280, sections 4.3 and 4.4). In a round the tokens
on the accepted path and the first rejected one count; what stood behind that was never tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.policy.means import RunningMeans
from specctl.policy.verification import Outcome
from specctl.tree import TokenTree, gather

MEMORY_SIZE = 6
"""Tokens seen, their weight, and the weighted sum of their values: each accepted, then rejected."""


@dataclass(frozen=True)
class Samples:
    """What a round shows of B requests.

    Attributes:
        values: `[B, D + 1]` float64, on the accepted path and of the first rejected token.
        accepted, rejected: `[B, D + 1]` bool, which of them count, and as what.
    """

    values: Tensor
    accepted: Tensor
    rejected: Tensor


class Running:
    """The arithmetic of the two means over memories `[B, 6]` float64."""

    def __init__(self, record: RunningMeans, device: torch.device) -> None:
        priors = (record.prior_accepted or 0.0, record.prior_rejected or 0.0)
        self._prior = torch.tensor(priors, dtype=torch.float64, device=device)
        self._prior_weight, self._min_samples = record.prior_weight, record.min_samples
        self._fade = 1.0 if record.half_life is None else 0.5 ** (1 / record.half_life)

    def means(self, memory: Tensor) -> Tensor:
        """`[B, 2]` mean accepted and mean rejected value; NaN where there is nothing to mean."""
        seen, weight, total = self._columns(memory)
        prior = self._prior_weight * self._fade**seen
        mean: Tensor = (total + prior * self._prior) / (weight + prior)
        return mean

    def counts(self, memory: Tensor) -> Tensor:
        """`[B, 2]` accepted and rejected tokens, the warm start among them."""
        return self._columns(memory)[0] + self._prior_weight

    def known(self, memory: Tensor) -> Tensor:
        """`[B, 2]` bool: enough of the class was seen for its mean to be used."""
        counts = self.counts(memory)
        return (counts >= self._min_samples) & (counts > 0)

    def noted(self, memory: Tensor, samples: Samples) -> Tensor:
        """The memories after a round, `[B, 6]`."""
        seen, weight, total = self._columns(memory)
        chosen = torch.stack([samples.accepted, samples.rejected], 1)
        count = chosen.sum(2)
        added = torch.where(chosen, samples.values[:, None], 0.0).sum(2)
        fade = self._fade**count
        return torch.cat([seen + count, weight * fade + count, total * fade + added], 1)

    @staticmethod
    def _columns(memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return memory[:, 0:2], memory[:, 2:4], memory[:, 4:6]


def samples_of(values: Tensor, outcome: Outcome) -> Samples:
    """What a round shows.

    Args:
        values: `[B, N]` of the submitted nodes.
    """
    path = outcome.path[:, 1:]
    tested = torch.cat([path, first_rejected(outcome.tree, outcome.path)[:, None]], 1)
    exists = tested >= 0
    is_last = torch.arange(tested.shape[1], device=tested.device) == tested.shape[1] - 1
    return Samples(gather(values, tested, 0).double(), exists & ~is_last, exists & is_last)


def first_rejected(tree: TokenTree, path: Tensor) -> Tensor:
    """`[B]` int64: first of the nodes that were submitted behind the accepted path; -1 for none.

    Siblings come from one distribution, so which of them stands for all does not matter to the
    values that are measured there.
    """
    deepest = (path >= 0).sum(1, keepdim=True) - 1
    behind = tree.parent == path.gather(1, deepest)
    found, index = behind.to(torch.int8).max(1)
    return index.masked_fill(found == 0, -1)
