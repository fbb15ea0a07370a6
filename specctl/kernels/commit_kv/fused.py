"""Triton twin of `commit_kv`: one program a layer, request and head.

Why moving in place is safe. A path ascends, so path[i] >= i: what moves, moves down or stays. A
program is alone with the slots of its head. It takes 16 steps at a time, reads all of their
entries into registers, and writes them after a barrier of its threads. Writes of these steps hit
slots below every later step's own, and later steps read at path[j] >= j only: nothing that is
still to be read has been overwritten.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.aot import Case
from specctl.kernels.words import as_words

STEPS = 16
"""Entries a program holds at once; most paths are shorter."""


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_steps"])
def commit_kernel(
    storage, offset, path,
    layer_stride, row_stride, head_stride, slot_stride, offset_stride, path_stride,
    num_rows, num_heads, num_steps,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = program % num_heads
    row = program // num_heads % num_rows
    layer = program // (num_heads * num_rows)
    root = tl.load(offset + row * offset_stride)
    base = storage + layer * layer_stride + row * row_stride + head * head_stride
    base += root * slot_stride
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    for first in range(0, num_steps, STEPS):
        steps = first + tl.arange(0, STEPS)
        node = tl.load(path + row * path_stride + steps, mask=steps < num_steps, other=-1)
        moves = (node >= 0) & (node != steps)
        mask = moves[:, None] & (columns < DIM)
        entries = tl.load(base + node[:, None] * slot_stride + columns, mask=mask)
        # Another thread of this program may be about to read what this one writes.
        tl.debug_barrier()
        tl.store(base + steps.to(tl.int64)[:, None] * slot_stride + columns, entries, mask=mask)


def commit_kv(storage: Tensor, offset: Tensor, path: Tensor) -> None:
    """See `specctl.kernels.commit_kv.commit_kv`."""
    num_planes, num_rows, num_heads, _, dim = storage.shape
    words = as_words("commit_kv", "storage", storage)
    if not (words.numel() and path.shape[1]):
        return
    path = path if path.stride(1) == 1 else path.contiguous()
    commit_kernel[(num_planes * num_rows * num_heads,)](
        words,
        offset,
        path,
        *words.stride()[:4],
        offset.stride(0),
        path.stride(0),
        num_rows,
        num_heads,
        path.shape[1],
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        STEPS=STEPS,
        num_warps=_num_warps(dim, storage.itemsize),
    )


def _num_warps(dim: int, itemsize: int) -> int:
    """Four loads of 16 bytes a thread: enough in flight, and few threads wait at the barrier."""
    size = STEPS * triton.next_power_of_2(dim) * itemsize
    return max(1, min(8, size // (32 * 64)))


def _case(name: str, word: str, dim: int, max_registers: int) -> Case:
    tensors = {"storage": f"*{word}", "offset": "*i64", "path": "*i64"}
    strides = ("layer_stride", "row_stride", "head_stride", "slot_stride")
    small = ("offset_stride", "path_stride", "num_rows", "num_heads", "num_steps")
    constexprs = {"DIM": dim, "BLOCK_DIM": triton.next_power_of_2(dim), "STEPS": STEPS}
    return Case(
        name=name,
        kernel=commit_kernel,
        signature=tensors
        | {"layer_stride": "i64"}
        | dict.fromkeys((*strides[1:], *small), "i32")
        | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        divisible=(*tensors, *strides),
        num_warps=_num_warps(dim, int(word[1:]) // 8),
        max_registers=max_registers,
        vector_loads=True,
    )


AOT_CASES: tuple[Case, ...] = (
    _case("16 bits x 64", "i16", 64, 64),
    _case("16 bits x 128", "i16", 128, 64),
    _case("16 bits x 80", "i16", 80, 64),
    _case("32 bits x 128", "i32", 128, 64),
    _case("16 bits x 256", "i16", 256, 64),
    _case("8 bits x 128", "i8", 128, 64),
)
