"""Triton kernel of `commit_kv`: one program a layer, request and head.

Why moving in place is safe. A path ascends, so path[i] >= i: what moves, moves down or stays. A
program is alone with the slots of its head. It takes 16 steps at a time, reads all of their
entries into registers, and writes them after a barrier of its threads. Writes of these steps hit
slots below every later step's own, and later steps read at path[j] >= j only: nothing that is
still to be read has been overwritten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.checks import dense_rows, refuse

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: moving bits needs no arithmetic, so one compiled kernel serves all dtypes of a size."""
STEPS = 16
"""Entries that a program holds at once; most paths are shorter."""


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
    num_planes, num_rows, num_heads, _, dim = storage.shape
    if storage.itemsize not in WORDS:
        problem = f"storage must have a dtype of 1, 2, 4 or 8 bytes, not {storage.dtype}"
        refuse("commit_kv", problem, "store real and imaginary parts apart")
    words, path = storage.view(WORDS[storage.itemsize]), dense_rows(path)
    if not (words.numel() and path.shape[1]):
        return
    block = triton.next_power_of_2(dim)
    commit_kernel[(num_planes * num_rows * num_heads,)](
        words, offset, path, *words.stride()[:4], offset.stride(0), path.stride(0),
        num_rows, num_heads, path.shape[1],
        DIM=dim, BLOCK_DIM=block, STEPS=STEPS,
        # Four loads of 16 bytes a thread: enough in flight, and few threads wait at the barrier.
        num_warps=max(1, min(8, STEPS * block * storage.itemsize // (32 * 64))),
    )  # fmt: skip
