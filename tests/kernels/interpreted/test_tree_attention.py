"""Triton's `tree_attention`, run as Python, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from specctl.errors import UsageError
from specctl.kernels.tree_attention import fused, tree_attention
from specctl.kernels.tree_attention.tiling import FLOAT32, NARROW, NARROW_AMPERE, WIDE, Tiles
from tests.kernels.cases_tree_attention import HEADS, LAYOUTS, Heads, assert_near, check, given
from tests.kernels.poison import poisoned

CPU = torch.device("cpu")
RAGGED = LAYOUTS["ragged, one empty, one new"]


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter (3.6, 3.7) multiplies their bit patterns; make it multiply numbers."""
    dot = InterpreterBuilder.create_dot

    def widened(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_float64(layout: str) -> None:
    check(LAYOUTS[layout], HEADS["alone"], torch.float32, CPU)


@pytest.mark.parametrize("heads", HEADS)
def test_heads_share_keys(heads: str) -> None:
    check(LAYOUTS["one tree"], HEADS[heads], torch.float32, CPU)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)],
)
def test_two_bytes_a_number(dim: int, dtype: torch.dtype) -> None:
    check(RAGGED, Heads(1, 2, dim), dtype, CPU, torch.int64)


CUTS = [(tiles, 3) for tiles in (*NARROW, NARROW_AMPERE[-1], *WIDE, *FLOAT32)]
CUTS += [(NARROW[0], 1), (NARROW[0], 8)]


@pytest.mark.parametrize(("tiles", "num_splits"), CUTS)
def test_any_cut_gives_the_same(tiles: Tiles, num_splits: int) -> None:
    """Splits that hold part of the prefix, its end and the tail, the tail alone, or nothing."""
    case = given(RAGGED, Heads(1, 2, 16), torch.float32)
    with poisoned():
        found = fused.tree_attention(**case.on(CPU), tiles=tiles, num_splits=num_splits)
    assert_near(found, case.expected)


def test_lengths_are_read_where_they_lie() -> None:
    """As a captured graph does: the same launch, other lengths in place."""
    long, short = LAYOUTS["prefix of whole blocks"], LAYOUTS["one node, no prefix"]
    case, other = (given(layout, HEADS["alone"], torch.float32) for layout in (long, short))
    given_now = case.on(CPU)
    for name in ("prefixes", "offsets"):
        given_now[name].copy_(other.on(CPU)[name])
    given_now["keys"][:, :, :1] = other.on(CPU)["keys"][:, :, :1]
    given_now["values"][:, :, :1] = other.on(CPU)["values"][:, :, :1]
    given_now["query"][:1] = other.query
    given_now["ancestors"][:1, :2] = other.on(CPU)["ancestors"]
    found = tree_attention(**given_now)
    assert_near(found[:1], other.expected)
    assert found[1:].count_nonzero() == 0


def test_float64_is_refused() -> None:
    case = given(LAYOUTS["one tree"], HEADS["alone"], torch.float64)
    with pytest.raises(UsageError, match="query: expected bfloat16 or float16 or float32"):
        tree_attention(**case.on(CPU))
