"""How far two next-token laws are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOWEST = -1e4
"""Stands for log 0: its exponential is 0, and 0 times it is 0."""


def js_distance(draft_logp: Tensor, target_logp: Tensor, target_ids: Tensor) -> Tensor:
    """Jensen-Shannon distance of two next-token distributions, by which AdaSD's acceptance decides
    (arXiv:2512.11280, 4.4).

    With q the drafter's distribution spread over the target's vocabulary, p the target's and
    m = (p + q) / 2, the distance is sqrt(sum(p log2(p / m)) / 2 + sum(q log2(q / m)) / 2): 0 for
    equal distributions, 1 for disjoint ones. A token that the drafter cannot say has q = 0 and
    m = p / 2, so it adds p · log 2: all of them together add log 2 times their mass under p.

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
    unshared = _unsaid_mass(target_logp, target_ids) * math.log(2)
    bits = (shared.sum(-1) + unshared) / (2 * math.log(2))
    return bits.clamp(0, 1).sqrt()


def _unsaid_mass(target_logp: Tensor, target_ids: Tensor) -> Tensor:
    """`[R]` probability of what the drafter cannot say.

    A mask as index would be shorter, and wait for the device to count it.
    """
    if len(target_ids) == target_logp.shape[1]:
        return target_logp.new_zeros(len(target_logp), dtype=torch.float32)
    return target_logp.float().index_fill(1, target_ids, -math.inf).exp().sum(-1)
