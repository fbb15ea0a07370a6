"""What the ops of `policy_eval` give, and what they keep from level to level."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bins(NamedTuple):
    """The regime of each row.

    Attributes:
        bins, max_depth, num_tokens: `[R]` int64. value: `[R]` float32, nats, Φ itself.
    """

    bins: Tensor
    max_depth: Tensor
    num_tokens: Tensor
    value: Tensor


class GateState(NamedTuple):
    """What gates remember of B requests within a round; the first level sets it anew.

    Attributes:
        max_depth: `[B]` int64, levels to draft.
        stopped_at: `[B]` int64, level whose gate closed, 0 for none.
        num_kept: `[B]` int64, nodes kept so far, the root not counted.
        order: `[B, P]` float32, 0 at the root, -n at the n-th kept node, -inf elsewhere.
    """

    max_depth: Tensor
    stopped_at: Tensor
    num_kept: Tensor
    order: Tensor


class Pruned(NamedTuple):
    """The best of a scored level.

    Attributes:
        index: `[B, W]` int64 pool slots, best first. score: `[B, W]` float32.
        keep: `[B, W]` bool: expand this one.
        faulty: `[B]` bool: a score is NaN; such a round is better drafted by a static plan.
    """

    index: Tensor
    score: Tensor
    keep: Tensor
    faulty: Tensor


def new_gate_state(num_rows: int, capacity: int, device: torch.device | str = "cpu") -> GateState:
    """Buffers of a state, which the first level fills."""
    rows = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
    return GateState(*rows, torch.zeros(num_rows, capacity, device=device))
