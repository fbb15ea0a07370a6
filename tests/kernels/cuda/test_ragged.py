"""The fused packing on a GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from specctl.kernels.dispatch import forced
from specctl.kernels.ragged import pack_ragged, unpack_ragged
from tests.kernels.cases_ragged import (
    DTYPES,
    SIZES,
    TRAILING,
    check_ragged,
    packed_by_loop,
    unpacked_by_loop,
)
from tests.kernels.cuda.capture import CUDA, captured, overwrite

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trailing", TRAILING, ids=str)
def test_equals_the_loop(trailing: tuple[int, ...], dtype: torch.dtype) -> None:
    with forced("fused"):
        for sizes in SIZES.values():
            check_ragged(sizes, trailing, dtype, CUDA)


@pytest.mark.parametrize("batch_size", [8, 60, 240])
def test_states_of_8b(batch_size: int) -> None:
    draw = torch.Generator().manual_seed(batch_size)
    sizes = torch.randint(0, 61, (batch_size,), generator=draw).tolist()
    with forced("fused"):
        check_ragged(sizes, (4096,), torch.bfloat16, CUDA)


def test_a_graph_sees_what_is_overwritten() -> None:
    """Rows share the packed axis otherwise from replay to replay; its length is the graph's."""
    values = torch.randn(4, 20, 96, device=CUDA)
    offsets = torch.tensor([0, 8, 16, 24, 32], device=CUDA)
    with forced("fused"):
        graph, (packed, back) = captured(
            lambda: (p := pack_ragged(values, offsets, 32), unpack_ragged(p, offsets, 20))
        )
    for sizes in ([20, 0, 11, 1], [8, 8, 8, 8], [0, 0, 12, 20]):
        fresh = torch.randn(4, 20, 96)
        overwrite([values, offsets], [fresh, torch.tensor([0, *accumulate(sizes)])])
        graph.replay()
        expected = packed_by_loop(fresh, sizes)
        assert torch.equal(packed.cpu(), expected)
        assert torch.equal(back.cpu(), unpacked_by_loop(expected, sizes, 20))
