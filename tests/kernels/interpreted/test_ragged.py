"""The fused packing as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.ragged import fused, pack_ragged, unpack_ragged
from tests.kernels.cases_ragged import DTYPES, SIZES, TRAILING, check_ragged

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("trailing", TRAILING, ids=str)
def test_equals_the_loop(sizes: str, trailing: tuple[int, ...]) -> None:
    if sizes == "long" and trailing == (1100,):
        trailing = (70,)
    check_ragged(SIZES[sizes], trailing, torch.float32, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype) -> None:
    check_ragged(SIZES["uneven"], (33,), dtype, CPU)
    check_ragged(SIZES["uneven"], (), dtype, CPU, spare=0)


def test_a_row_that_is_shared_by_all() -> None:
    """As the runtime packs one mask for a batch: stride 0."""
    shared = torch.arange(12).reshape(1, 4, 3).expand(3, -1, -1)
    packed = pack_ragged(shared, torch.tensor([0, 2, 2, 6]), 6)
    assert torch.equal(packed, torch.cat([shared[0, :2], shared[0]]))


def test_entries_that_do_not_stand_side_by_side() -> None:
    values = torch.arange(48).reshape(2, 4, 6)[..., ::2]
    packed = pack_ragged(values, torch.tensor([0, 3, 4]), 4)
    assert torch.equal(packed, torch.cat([values[0, :3], values[1, :1]]))


def test_axes_that_cannot_be_seen_as_one() -> None:
    values = torch.arange(48).reshape(2, 4, 3, 2).transpose(2, 3)
    packed = pack_ragged(values, torch.tensor([0, 1, 4]), 4)
    assert torch.equal(packed, torch.cat([values[0, :1], values[1, :3]]))
    swapped = packed.transpose(1, 2).contiguous().transpose(1, 2)
    back = unpack_ragged(swapped, torch.tensor([0, 1, 4]), 3)
    assert torch.equal(back[1], values[1, :3])


def test_nothing_to_move() -> None:
    offsets = torch.tensor([0])
    assert pack_ragged(torch.zeros(0, 3, 2), offsets, 0).shape == (0, 2)
    assert unpack_ragged(torch.zeros(0, 2), offsets, 3).shape == (0, 3, 2)
    assert unpack_ragged(torch.zeros(0, 2), torch.tensor([0, 0]), 0).shape == (1, 0, 2)
    assert pack_ragged(torch.zeros(1, 3, 0), torch.tensor([0, 2]), 2).shape == (2, 0)


def test_a_row_beyond_the_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MAX_GRID", 1)
    with pytest.raises(UsageError, match="kernel ragged, blocks of a row: expected at most 1, fou"):
        pack_ragged(torch.zeros(1, 5000), torch.tensor([0, 5000]), 5000)
