"""How far two next-token laws are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOWEST = -1e4
"""Stands for log 0: its exponential is 0, and 0 times it is 0."""


def js_distance(draft_logp: Tensor, target_logp: Tensor, target_ids: Tensor) -> Tensor:
    """Jensen-Shannon distance; see `specctl.kernels.js_distance`, whose reference this is.

    It stands on the floor because AdaSD's acceptance decides by it (arXiv:2512.11280, 4.4).

    A token that the drafter cannot say has q = 0 and m = p / 2, so it adds p · log 2: all of them
    together add log 2 times the mass that the target gives them.

    Args:
        draft_logp: `[R, Vd]` float, natural log. target_logp: `[R, V]`.
        target_ids: `[Vd]` int64, distinct.

    Returns:
        `[R]` float32 in [0, 1], square root of bits.
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
