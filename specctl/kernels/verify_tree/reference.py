"""Torch reference of `verify_tree`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def verify_tree(parent: Tensor, admitted: Tensor, max_depth: int) -> Tensor:
    """See `specctl.kernels.verify_tree.verify_tree`."""
    is_root, admitted = parent == -1, admitted & (parent >= 0)
    links = parent.clamp(min=0)
    reached = is_root
    for _ in range(max_depth):
        reached = is_root | (admitted & reached.gather(1, links))
    # Parents stand before children, so ascending indices of the reached nodes are the path.
    size = parent.shape[1]
    slots = torch.arange(size, device=parent.device).expand_as(parent)
    ordered = slots.masked_fill(~reached, size).sort(1).values[:, : max_depth + 1]
    path = ordered.masked_fill(ordered == size, -1)
    return F.pad(path, (0, max_depth + 1 - path.shape[1]), value=-1)
