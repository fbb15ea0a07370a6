"""Torch implementation of `sample_tokens`."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.noise import gumbels


def sample_tokens(logits: Tensor, keys: Tensor, greedy: Tensor) -> Tensor:
    noise = gumbels(keys, logits.shape[1]).masked_fill_(greedy[:, None], 0)
    score = noise.add_(logits)
    # argmax promises no order of ties; the largest has one of its own.
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_best = score == score.amax(1, keepdim=True)
    return ids.where(is_best, logits.shape[1]).amin(1)
