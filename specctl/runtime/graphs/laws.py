"""The target's own tokens at packed nodes, drawn or likeliest, without asking the device.

The processors are those of `runtime.sampling`, by columns instead of by request.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from specctl.kernels.sample_tokens import sample_tokens
from specctl.noise import noise_keys
from specctl.runtime.graphs.state import Rows
from specctl.runtime.observe import Sampling

Mode = Literal["greedy", "temperature", "nucleus"]
"""A batch needs argmax alone, sampling, or sampling after top-k and top-p."""


def mode_of(samplings: list[Sampling]) -> Mode:
    """The least that serves all of them."""
    drawn = [s for s in samplings if not s.greedy]
    if not drawn:
        return "greedy"
    return "nucleus" if any(s.top_k > 0 or s.top_p < 1.0 for s in drawn) else "temperature"


def law_of(logits: Tensor, rows: Rows, row: Tensor, mode: Mode) -> Tensor:
    """`[T, V]` logits after the processors, float32; `logits` itself if all rows are greedy.

    Args:
        logits: `[T, V]`. row: `[T]`, whose token each is.
    """
    if mode == "greedy":
        return logits
    law = logits.float() / rows.temperature[row, None].float()
    return law if mode == "temperature" else _nucleus(law, rows, row)


def tokens_of(
    likeliest: Tensor, law: Tensor, rows: Rows, row: Tensor, positions: Tensor, mode: Mode
) -> Tensor:
    """`[T]` int64, the target's token after every node.

    Args:
        likeliest: `[T]`, which greedy rows take. law: of `law_of`. positions: `[T]`, output
            position of each token.
    """
    if mode == "greedy":
        return likeliest
    keys = noise_keys(rows.seeds[row], positions)
    return sample_tokens(law, keys, rows.greedy[row])


def _nucleus(law: Tensor, rows: Rows, row: Tensor) -> Tensor:
    """Top-k, which keeps ties, then the smallest set of likeliest tokens whose mass reaches p."""
    size = law.shape[-1]
    ordered, index = law.sort(dim=-1, descending=True, stable=True)
    top_k, greedy = rows.top_k[row, None], rows.greedy[row, None]
    last = torch.where((top_k > 0) & (top_k < size), top_k, size) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, last), float("-inf"))
    mass = ordered.softmax(-1, dtype=torch.float64).cumsum(-1)
    before = torch.nn.functional.pad(mass[..., :-1], (1, 0))
    top_p = rows.top_p[row, None]
    outside = (ordered == float("-inf")) | ((before >= top_p) & (top_p < 1.0))
    excluded = torch.zeros_like(outside).scatter_(-1, index, outside)
    return torch.where(excluded & ~greedy, float("-inf"), law)
