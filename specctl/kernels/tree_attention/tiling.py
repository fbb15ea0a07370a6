"""How `tree_attention` is cut into programs, decided from capacities alone.

Nothing here was measured on a GPU yet: the table follows registers and shared memory as compiled
(tests/kernels/test_aot_tree_attention.py) and the counts of the chip.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

MAX_SPLITS = 32
MAX_HEAD_DIM = 256


class Tiles(NamedTuple):
    """A tuned configuration.

    Attributes:
        rows: taken up to so many queries of a request, each node counted once a head of its group.
        queries: of a program. entries: of a block of keys.
    """

    rows: int
    queries: int
    entries: int
    num_warps: int
    num_stages: int


_ANY = 1 << 31
NARROW = (Tiles(16, 16, 64, 4, 3), Tiles(64, 64, 64, 4, 3), Tiles(_ANY, 128, 64, 8, 3))
"""Two bytes a number, heads of up to 128, matrix units that read shared memory."""
NARROW_AMPERE = (Tiles(16, 16, 64, 4, 3), Tiles(_ANY, 64, 32, 4, 3))
"""The same where operands live in registers and shared memory is less: all other chips."""
WIDE = (Tiles(_ANY, 64, 32, 8, 2),)
"""Two bytes a number, heads of up to 256."""
FLOAT32 = (Tiles(_ANY, 16, 32, 8, 2),)
"""Exact products leave no room for more; this is the width of tests, not of serving."""


def tiles_for(num_rows: int, head_dim: int, dtype: torch.dtype, generation: int) -> Tiles:
    """The first configuration with room for a request's queries.

    Args:
        num_rows: nodes at capacity times query heads a key head.
        generation: major compute capability: 8 Ampere, 9 Hopper, 10 Blackwell.
    """
    if dtype == torch.float32:
        table = FLOAT32
    elif head_dim > 128:
        table = WIDE
    else:
        table = NARROW if generation in (9, 10) else NARROW_AMPERE
    return next(tiles for tiles in table if num_rows <= tiles.rows)


def padded_dim(head_dim: int) -> int:
    """The next power of two, which a matrix unit takes; 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def merge_warps(num_splits: int, dim: int) -> int:
    """So many that a thread holds at most 128 numbers."""
    return max(1, num_splits * dim // 4096)


@lru_cache(maxsize=1024)
def num_splits_for(num_tiles: int, most: int, num_sms: int) -> int:
    """The fewest splits of the keys that fill the last wave of programs nearly as well as any.

    Args:
        num_tiles: programs without splitting. most: blocks of keys, or a limit below.
    """

    def filled(splits: int) -> float:
        waves = num_tiles * splits / num_sms
        return waves / -(-num_tiles * splits // num_sms)

    if 5 * num_tiles >= 4 * num_sms:  # a merge would cost more than the idle ones
        return 1
    choices = range(1, most + 1)
    best = max(map(filled, choices))
    return next(splits for splits in choices if filled(splits) >= 0.85 * best)


class Chip(NamedTuple):
    """What the cutting depends on."""

    num_sms: int
    generation: int


H200 = Chip(132, 9)
"""Stands in where there is no chip: the interpreter."""


@lru_cache(maxsize=8)
def chip_of(device: torch.device) -> Chip:
    """Asked once, as the answer is the same."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, found.major)
