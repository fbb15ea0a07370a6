"""Torch implementation of `commit_kv`."""

from __future__ import annotations

import torch
from torch import Tensor


def commit_kv(storage: Tensor, offset: Tensor, path: Tensor) -> None:
    # Padding moves the root onto itself: beyond the path the slot may have no entries left.
    steps = torch.arange(path.shape[1], device=path.device).where(path >= 0, 0)
    source, place = offset[:, None] + path.clamp(min=0), offset[:, None] + steps
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    storage[:, rows, :, place] = storage[:, rows, :, source]
