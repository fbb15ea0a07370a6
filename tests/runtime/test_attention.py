"""Torch's attention of a pass against its definition, in float32 and in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specctl.runtime.attention import Pass

HEADS, KV_HEADS, DIM, CAPACITY = 6, 2, 16, 40
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def pass_of(prefixes: list[int], sizes: list[int], behind: int) -> Pass:
    """A pass of requests with so many nodes each, every node under some of the tail."""
    total, widest = sum(sizes), max(sizes)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    row = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    own = behind + torch.arange(total) - offsets[row]
    visible = torch.rand(total, behind + widest, generator=torch.Generator().manual_seed(1)) < 0.5
    visible &= torch.arange(behind + widest) < own[:, None]
    visible[torch.arange(total), own] = True
    ends = [
        p + behind + (n if len(sizes) == 1 else widest)
        for p, n in zip(prefixes, sizes, strict=True)
    ]
    starts = torch.tensor(prefixes)
    positions = starts[row] + own
    facts = (offsets, widest, behind, max(ends))
    return Pass(positions, positions, row, positions, starts, *facts, visible=visible, exact=True)


def defined(reads: Pass, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The softmax of each token over what it sees, token by token, in float64."""
    assert reads.visible is not None
    found = []
    for token, slot in enumerate(reads.row.tolist()):
        before = int(reads.prefixes[slot])
        tail = reads.visible[token].nonzero()[:, 0] + before
        at = torch.cat([torch.arange(before), tail])
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = keys[slot, kv, at].double() @ query[0, head, token].double() * DIM**-0.5
            found.append(scores.softmax(-1) @ values[slot, kv, at].double())
    return torch.stack(found).view(1, len(reads.row), HEADS, DIM)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("prefixes", "sizes", "behind"),
    [
        pytest.param([9], [1], 0, id="plain"),
        pytest.param([9], [7], 0, id="tree"),
        pytest.param([9], [4], 3, id="level"),
        pytest.param([9, 3, 17], [1, 1, 1], 0, id="plain-batch"),
        pytest.param([9, 3, 17], [5, 5, 5], 2, id="even-batch"),
        pytest.param([9, 3, 17], [2, 7, 1], 0, id="uneven-batch"),
        pytest.param([2], [40], 0, id="many-nodes"),
    ],
)
def test_attention_of_a_pass(
    prefixes: list[int], sizes: list[int], behind: int, dtype: torch.dtype
) -> None:
    reads = pass_of(prefixes, sizes, behind)
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, sum(sizes), DIM).to(dtype)
    both = torch.randn(2, len(sizes), KV_HEADS, max(CAPACITY, reads.width + 1), DIM).to(dtype)
    both[..., reads.width :, :] = torch.nan  # what lies behind the pass is not read
    keys, values = both[..., : reads.width, :]
    found = reads.attend(query, keys, values)
    wanted = defined(reads, query, keys, values)
    assert (found.dtype, found.shape) == (dtype, wanted.shape)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)
