"""Draws by race against the definition in Python's own integers and floats, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specctl.kernels.race import race
from tests.kernels.poison import poisoned

MASK = 2**64 - 1


def score_of(key: int, token: int) -> float:
    """The Gumbel number of a token: one output of SplitMix64, the middle of its cell."""
    x = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return -math.log(-math.log(((x >> 12) + 0.5) / 2**52))


def looped(law: Tensor, keys: Tensor, greedy: Tensor) -> list[int]:
    """The docstring."""
    found = []
    for row, key, is_greedy in zip(law.double().tolist(), keys.tolist(), greedy, strict=True):
        score = row if is_greedy else [x + score_of(key % 2**64, v) for v, x in enumerate(row)]
        found.append(max(range(len(row)), key=lambda v: (score[v], -v)))
    return found


def random_laws(
    seed: int, num_rows: int, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Laws, keys of all 64 bits, and every third row greedy; row 1 is cut by top-p, row 2 has one
    token left, row 3 ties throughout."""
    draw = torch.Generator().manual_seed(seed)
    law = 2 * torch.randn(num_rows, vocab_size, generator=draw)
    law[1, torch.rand(vocab_size, generator=draw) < 0.9] = -math.inf
    law[2] = -math.inf
    law[2, vocab_size - 1] = -3.0
    law[3] = 1.5
    words = torch.randint(-(2**62), 2**62, (2, num_rows), generator=draw)
    keys = words[0] * 2 + words[1]
    return law.to(dtype), keys, torch.arange(num_rows) % 3 == 0


def check_race(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows that are slices of wider ones, behind poisoned outputs."""
    law, keys, greedy = random_laws(vocab_size, num_rows, vocab_size, dtype)
    wide = torch.cat([law, torch.full((num_rows, 3), 99.0, dtype=dtype)], 1).to(device)
    with poisoned():
        found = race(wide[:, :vocab_size], keys.to(device), greedy.to(device))
    assert found.dtype == torch.int64
    assert found.tolist() == looped(law, keys, greedy)
