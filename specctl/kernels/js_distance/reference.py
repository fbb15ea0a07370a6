"""Torch reference of `js_distance`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOWEST = -1e4
"""Stands for log 0: its exponential is 0, and 0 times it is 0."""


def js_distance(draft_logp: Tensor, target_logp: Tensor, target_ids: Tensor) -> Tensor:
    """See `specctl.kernels.js_distance.js_distance`.

    A token that the drafter cannot say has q = 0 and m = p / 2, so it adds p · log 2: all of them
    together add log 2 times the mass that the target gives them.
    """
    draft = draft_logp.float().clamp(min=LOWEST)
    target = target_logp.float()[:, target_ids].clamp(min=LOWEST)
    q, p = draft.exp(), target.exp()
    middle = ((p + q) / 2).log().clamp(min=LOWEST)
    shared = p * (target - middle) + q * (draft - middle)
    unsaid = torch.ones(target_logp.shape[1], dtype=torch.bool, device=target_ids.device)
    unsaid[target_ids] = False
    unshared = target_logp[:, unsaid].float().exp().sum(-1) * math.log(2)
    bits = (shared.sum(-1) + unshared) / (2 * math.log(2))
    return bits.clamp(0, 1).sqrt()
