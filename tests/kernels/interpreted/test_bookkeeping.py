"""The fused bookkeeping as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.bookkeeping import lay_out, settle
from tests.kernels.cases_bookkeeping import CASES, check_open_level, check_open_tree, check_settle
from tests.kernels.drawn_bookkeeping import (
    CPU,
    Axis,
    Level,
    Round,
    Tree,
    drawn_axis,
    drawn_round,
    junk_settled,
    settled_of,
)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loops(name: str) -> None:
    CASES[name](CPU)


def test_programs_run_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last first: what one writes too much is not mended by the next."""
    from triton.runtime.interpreter import interpreter_builder as builder

    forward = builder.set_grid_idx

    def backward(*index: int) -> None:
        forward(*(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backward)
    wide = "two programs a row"
    laid = ("full", "padded", "two blocks a row", "cut")
    names = [f"open_tree, {wide}", f"open_level, {wide}, apart", "settle, eagle2"]
    for name in (*names, *(f"lay_out, {axis}" for axis in laid)):
        CASES[name](CPU)


def test_no_rows() -> None:
    """Nothing is launched, and nothing written."""
    check_open_tree(Tree(0, 5), CPU)
    check_open_level(Level(0, 3), CPU, shared=False)
    check_open_level(Level(3, 0), CPU, shared=False)
    check_settle(Round(0, 3, 4, 5, 6, spare=1), torch.float32, CPU)


def test_above_capacity() -> None:
    with pytest.raises(UsageError, match="lay_out, nodes of a tree: expected at most 1024"):
        lay_out(*drawn_axis(Axis(1, 1025), seed=0), num_tokens=9, last_place=9)
    found = drawn_round(Round(2, 129, 4, 5, 6), torch.float32, seed=0)
    with pytest.raises(UsageError, match="settle, nodes of a path: expected at most 128, found 12"):
        settle(found, settled_of(junk_settled(2, 129)))
