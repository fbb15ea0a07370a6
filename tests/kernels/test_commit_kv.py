"""Compaction of caches against the loop of the docstring."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from specctl.kernels.commit_kv import commit_kv

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8)
SHAPES = {
    "one chain": (2, 1, 1, 12, 4),
    "odd head": (4, 3, 2, 90, 5),
    "80 wide": (2, 2, 3, 90, 80),
    "128 wide": (2, 2, 2, 120, 128),
}
"""[2 L, B, H, S, D]."""


def random_paths(seed: int, num_rows: int, num_nodes: int, num_steps: int) -> Tensor:
    """Strictly ascending from the root, -1 padded; the first row accepts nothing, the second all
    steps it can, and a third of the rest starts with a chain that is in place already."""
    random = Random(seed)
    path = torch.full((num_rows, num_steps), -1)
    for row in range(num_rows):
        length = (0, num_steps)[row] if row < 2 else random.randint(1, num_steps)
        kept = min(length, num_nodes)
        nodes = sorted(random.sample(range(1, num_nodes), max(0, kept - 1)))
        if kept and random.random() < 1 / 3:
            nodes[: kept // 2] = range(1, 1 + kept // 2)
            nodes = sorted(set(nodes))
        chosen = [0, *nodes][:kept]
        path[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    return path


def looped(storage: Tensor, offset: Tensor, path: Tensor) -> Tensor:
    """The docstring."""
    after = storage.clone()
    for row, nodes in enumerate(path.tolist()):
        for step, node in enumerate(nodes):
            if node >= 0:
                start = int(offset[row])
                after[:, row, :, start + step] = storage[:, row, :, start + node]
    return after


def check_commit(
    shape: tuple[int, ...], num_steps: int, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Rows of a cache with one more slot on each side, which must not change."""
    planes, rows, heads, slots, dim = shape
    draw = torch.Generator().manual_seed(seed)
    whole = torch.randint(-100, 100, (planes, rows + 2, heads, slots, dim), generator=draw)
    whole = whole.to(dtype)
    offset = torch.randint(0, slots // 3 + 1, (rows,), generator=draw)
    path = random_paths(seed, rows, slots - int(offset.max()), num_steps)
    expected = whole.clone()
    expected[:, 1:-1] = looped(whole[:, 1:-1], offset, path)
    there, wide = whole.clone().to(device), torch.stack([path, path], 2).to(device)
    commit_kv(there[:, 1:-1], offset.to(device), wide[..., 0])
    assert torch.equal(there.cpu(), expected)
    assert rows < 2 or num_steps == 1 or not torch.equal(expected, whole)


@pytest.mark.parametrize("num_steps", [1, 6, 16, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_loop(shape: str, num_steps: int, device: torch.device) -> None:
    """Forty steps are three of the kernel's chunks: later ones read below earlier writes."""
    for seed in range(2):
        check_commit(SHAPES[shape], num_steps, torch.float32, device, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    check_commit(SHAPES["odd head"], 20, dtype, device, 7)


def test_bits_move_as_they_are(device: torch.device) -> None:
    """NaN with a payload, negative zero and denormals of half precision."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    storage = bits.view(torch.float16).reshape(1, 1, 1, 512, 128).clone().to(device)
    offset, path = torch.tensor([3], device=device), torch.tensor([[0, 4, 9, 300]], device=device)
    commit_kv(storage, offset, path)
    rows = bits.reshape(512, 128).clone()
    rows[[4, 5, 6]] = rows[[7, 12, 303]]
    assert torch.equal(storage.cpu().view(torch.int16).reshape(512, 128), rows)


def test_nothing_to_move(device: torch.device) -> None:
    storage = torch.ones(2, 1, 2, 4, 3, device=device)
    index = torch.zeros(1, 3, dtype=torch.int64, device=device)
    commit_kv(storage, index[:, 0], index[:, :0])
    commit_kv(storage[:, :0], index[:0, 0], index[:0])
    assert bool((storage == 1).all())
