"""Triton twins of `pack_ragged` and `unpack_ragged`: one kernel, two directions.

A program owns a block of one row's entries, so that it knows its row and needs no search in the
offsets; blocks behind a row's end only write zeros (unpacking) or nothing (packing).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.aot import Case
from specctl.kernels.checks import require_at_most
from specctl.kernels.words import as_words

TILE_BYTES, NUM_WARPS = 8192, 4
"""Of a program: four loads of 16 bytes a thread."""
MAX_GRID = 65535
"""CUDA's limit of a grid's second and third axis."""


@triton.jit(do_not_specialize=["num_columns", "num_packed"])
def ragged_kernel(
    values, packed, offsets,
    row_stride, entry_stride, offset_stride,
    num_columns, num_packed, width,
    UNPACKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = (tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    start = tl.load(offsets + row * offset_stride)
    size = tl.load(offsets + (row + 1) * offset_stride) - start
    inside = (entry < num_columns)[:, None] & (column < width)
    own = ((entry < size) & (start + entry < num_packed))[:, None] & inside
    there = packed + (start + entry)[:, None] * width + column
    here = values + row * row_stride + entry.to(tl.int64)[:, None] * entry_stride + column
    if UNPACKS:
        tl.store(here, tl.load(there, mask=own, other=0), mask=inside)
    else:
        tl.store(there, tl.load(here, mask=own), mask=own)


def pack_ragged(values: Tensor, offsets: Tensor, num_packed: int) -> Tensor:
    """See `specctl.kernels.ragged.pack_ragged`."""
    shape = (num_packed, *values.shape[2:])
    packed = torch.empty(shape, dtype=values.dtype, device=values.device)
    _move(values, packed, offsets, unpacks=False)
    return packed


def unpack_ragged(packed: Tensor, offsets: Tensor, num_columns: int) -> Tensor:
    """See `specctl.kernels.ragged.unpack_ragged`."""
    shape = (len(offsets) - 1, num_columns, *packed.shape[1:])
    values = torch.empty(shape, dtype=packed.dtype, device=packed.device)
    _move(values, packed.contiguous(), offsets, unpacks=True)
    return values


def _move(values: Tensor, packed: Tensor, offsets: Tensor, *, unpacks: bool) -> None:
    num_rows, num_columns = values.shape[:2]
    if not values.numel() or not (unpacks or packed.numel()):
        return
    width = values[0, 0].numel()
    rows = as_words("ragged", "values", values).reshape(num_rows, num_columns, width)
    rows = rows if width == 1 or rows.stride(2) == 1 else rows.contiguous()
    flat = as_words("ragged", "packed", packed)  # its rows stand side by side
    block_n, block_w = _blocks(width, values.itemsize)
    grid = (num_rows, triton.cdiv(num_columns, block_n), triton.cdiv(width, block_w))
    require_at_most("ragged", "blocks of a row", max(grid[1:]), MAX_GRID)
    ragged_kernel[grid](
        rows,
        flat,
        offsets,
        *rows.stride()[:2],
        offsets.stride(0),
        num_columns,
        len(packed),
        width,
        UNPACKS=unpacks,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        num_warps=NUM_WARPS,
    )


def _blocks(width: int, itemsize: int) -> tuple[int, int]:
    """Entries and numbers of a tile. Wide rows are cut, narrow ones taken together."""
    block_w = min(triton.next_power_of_2(width), TILE_BYTES // itemsize)
    return TILE_BYTES // itemsize // block_w, block_w


def _case(name: str, word: str, width: int, *, unpacks: bool) -> Case:
    block_n, block_w = _blocks(width, int(word[1:]) // 8)
    tensors = {"values": f"*{word}", "packed": f"*{word}", "offsets": "*i64"}
    small = ("offset_stride", "num_columns", "num_packed", "width")
    constexprs = {"UNPACKS": unpacks, "BLOCK_N": block_n, "BLOCK_W": block_w}
    is_wide = width % 16 == 0
    return Case(
        name=f"{'unpack' if unpacks else 'pack'} {name}",
        kernel=ragged_kernel,
        signature=tensors
        | dict.fromkeys(("row_stride", "entry_stride", *small), "i32")
        | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        divisible=(*tensors, *(("row_stride", "entry_stride", "width") if is_wide else ())),
        num_warps=NUM_WARPS,
        max_registers=64,
        vector_loads=is_wide,
    )


AOT_CASES: tuple[Case, ...] = tuple(
    _case(name, word, width, unpacks=unpacks)
    for unpacks in (False, True)
    for name, word, width in (
        ("hidden states of 16 bits", "i16", 4096),
        ("states of 32 bits", "i32", 512),
        ("rows of a mask", "i8", 64),
        ("token ids", "i64", 1),
    )
)
