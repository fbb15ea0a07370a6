"""Torch reference of `race`."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.noise import gumbels


def race(law: Tensor, keys: Tensor, greedy: Tensor) -> Tensor:
    """See `specctl.kernels.race.race`."""
    noise = gumbels(keys, law.shape[1]).masked_fill_(greedy[:, None], 0)
    score = noise.add_(law)
    # argmax promises no order of ties; the largest has one of its own.
    ids = torch.arange(law.shape[1], device=law.device)
    is_best = score == score.amax(1, keepdim=True)
    return ids.where(is_best, law.shape[1]).amin(1)
