"""Gumbel-max draws against the definition in Python's own integers and floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS
from specctl.kernels.sample_tokens import sample_tokens
from specctl.noise import noise_keys, signed_seed
from specctl.runtime import sampling
from tests.kernels.helpers import poisoned

MASK = 2**64 - 1


def score_of(key: int, token: int) -> float:
    """The Gumbel number of a token: one output of SplitMix64, the middle of its cell."""
    x = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return -math.log(-math.log(((x >> 12) + 0.5) / 2**52))


def looped(logits: Tensor, keys: Tensor, greedy: Tensor) -> list[int]:
    """The docstring."""
    found = []
    for row, key, is_greedy in zip(logits.double().tolist(), keys.tolist(), greedy, strict=True):
        score = row if is_greedy else [x + score_of(key % 2**64, v) for v, x in enumerate(row)]
        found.append(max(range(len(row)), key=lambda v: (score[v], -v)))
    return found


def drawn_rows(
    seed: int, num_rows: int, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, keys of all 64 bits, and every third row greedy; row 1 is cut by top-p, row 2 has one
    token left, row 3 ties throughout."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_rows, vocab_size, generator=draw)
    logits[1, torch.rand(vocab_size, generator=draw) < 0.9] = -math.inf
    logits[2] = -math.inf
    logits[2, vocab_size - 1] = -3.0
    logits[3] = 1.5
    words = torch.randint(-(2**62), 2**62, (2, num_rows), generator=draw)
    keys = words[0] * 2 + words[1]
    return logits.to(dtype), keys, torch.arange(num_rows) % 3 == 0


def check(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows that are slices of wider ones, behind poisoned outputs."""
    logits, keys, greedy = drawn_rows(vocab_size, num_rows, vocab_size, dtype)
    wide = torch.cat([logits, torch.full((num_rows, 3), 99.0, dtype=dtype)], 1).to(device)
    with poisoned():
        found = sample_tokens(wide[:, :vocab_size], keys.to(device), greedy.to(device))
    assert found.dtype == torch.int64
    assert found.tolist() == looped(logits, keys, greedy)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 1300, 5000])
def test_equals_the_definition(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    check(9, vocab_size, dtype, device)


def test_it_draws_what_the_runtime_draws() -> None:
    """The runtime draws from noise of its own making where the kernel does not run."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(21, 900, generator=generator)
    positions = torch.randint(1, 5, (21,), generator=generator)
    seeds = torch.tensor([signed_seed(seed) for seed in (0, 17, 2**64 - 1)]).repeat(7)
    drawn = sampling.gumbel_draw(logits, seeds, positions)
    never = torch.zeros(21, dtype=torch.bool)
    assert torch.equal(sample_tokens(logits, noise_keys(seeds, positions), never), drawn)
