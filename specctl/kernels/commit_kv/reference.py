"""Torch reference of `commit_kv`."""

from __future__ import annotations

import torch
from torch import Tensor


def commit_kv(storage: Tensor, offset: Tensor, path: Tensor) -> None:
    """See `specctl.kernels.commit_kv.commit_kv`."""
    steps = torch.arange(path.shape[1], device=path.device)
    source = offset[:, None] + torch.where(path >= 0, path, steps)
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    storage[:, rows, :, offset[:, None] + steps] = storage[:, rows, :, source]
