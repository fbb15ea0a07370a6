"""`bookkeeping` in any memory layout against the reference on dense tensors, and its bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.kernels.bookkeeping import (
    Opened,
    Settled,
    Walked,
    lay_out,
    open_level,
    open_tree,
    settle,
)
from specctl.kernels.dispatch import forced
from specctl.kernels.tree_build import COLUMN_TYPES, BuiltTree
from tests.kernels import drawn
from tests.kernels.helpers import assert_same, moved, poisoned, spread

FEW = 8
"""Rows above which one way of standing in memory will do."""
TREES = {
    "one slot": (1, 1),
    "eagle2": (8, 711),
    "two programs a row": (3, 1025),
    "odd": (33, 61),
}
LEVELS = {
    "one node": drawn.Level(1, 1),
    "first": drawn.Level(3, 10),
    "all of a word": drawn.Level(2, 32, num_words=1, top_k=32),
    "second": drawn.Level(5, 10, num_words=3, depth=2, parents=10, behind=10),
    "to the last bit": drawn.Level(8, 10, num_words=4, depth=5, parents=10, behind=118),
    "across words": drawn.Level(33, 7, num_words=2, depth=3, parents=4, top_k=3, behind=29),
    "two programs a row": drawn.Level(2, 19, num_words=9, depth=2, parents=19, top_k=1, behind=250),
}
AXES = {
    "one node": drawn.Axis(1, 1),
    "full": drawn.Axis(8, 60),
    "padded": drawn.Axis(5, 60, spare=70),
    "odd": drawn.Axis(33, 7, spare=3),
    "two blocks a row": drawn.Axis(3, 65, spare=1),
    "five words": drawn.Axis(4, 150, spare=90),
    "ten words": drawn.Axis(2, 300, spare=1),
    "cut": drawn.Axis(6, 20, spare=-9),
    "more rows than are added up at once": drawn.Axis(66, 2, spare=5),
}
ROUNDS = {
    "plain": drawn.Round(1, 1, 1, 1, 1),
    "eagle2": drawn.Round(8, 8, 60, 711, 60),
    "padded": drawn.Round(33, 3, 5, 21, 7, spare=9),
    "one level more than a block": drawn.Round(3, 17, 20, 1025, 48, spare=1),
    "more submitted than drafted": drawn.Round(2, 4, 3, 5, 1030),
    "more nodes than a block": drawn.Round(2, 6, 1029, 40, 9, spare=4),
    "nothing submitted": drawn.Round(4, 2, 2, 3, 0, spare=1),
}


def both(buffers: NamedTuple, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Copies for a loop, and for an op."""
    return [part.clone() for part in buffers], [part.clone().to(device) for part in buffers]


def assert_buffers(names: Iterable[str], found: list[Tensor], wanted: list[Tensor]) -> None:
    """Whole buffers, what must not be touched too."""
    for name, mine, theirs in zip(names, found, wanted, strict=True):
        assert torch.equal(mine.cpu(), theirs), f"{name}: {mine.cpu()}, not {theirs}"


def by_reference(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """On dense tensors on the CPU; captured rounds hold it to the ordinary loop's."""
    with forced("reference"):
        return op(*args, **options)


def check_open_tree(case: tuple[int, int], device: torch.device) -> None:
    draw = np.random.default_rng(case[1])
    rows, size = case
    root_ids, vacant = drawn.integers(draw, rows), drawn.flags(draw, rows)
    opened = drawn.junk_opened(draw, rows, 4, 2)
    pool = drawn.junk_pool(draw, rows, size)
    there = pool.each(lambda column: _apart(column, device))
    wanted, found = both(opened, device)
    by_reference(open_tree, pool, root_ids, vacant, Opened(*drawn.views(wanted, rows)))
    open_tree(there, root_ids.to(device), vacant.to(device), Opened(*drawn.views(found, rows, 4)))
    assert_buffers(Opened._fields, found, wanted)
    for name, column, expected in zip(COLUMN_TYPES, there, pool, strict=False):
        assert torch.equal(column.cpu().nan_to_num(5.0), expected.nan_to_num(5.0)), name


def _apart(column: Tensor, device: torch.device) -> Tensor:
    """On the device, still with something between its rows."""
    return torch.nn.functional.pad(column, (0, 5)).to(device)[:, : column.shape[1]]


def check_open_level(case: drawn.Level, device: torch.device, *, shared: bool) -> None:
    """`shared`: one verdict for all nodes of a row, as an expanded column; else rows that are
    every second column of something wider."""
    chosen, sizes = drawn.drawn_level(case, seed=case.width + case.rows)
    keep = chosen.keep[:, :1].expand_as(chosen.keep) if shared else chosen.keep
    opened = drawn.junk_opened(np.random.default_rng(1), case.rows, case.width, case.num_words)
    wanted, found = both(opened, device)
    above = None if chosen.above is None else chosen.above[: case.rows]
    given = chosen._replace(keep=keep, above=above)
    by_reference(open_level, *given, Opened(*drawn.views(wanted, case.rows)), **sizes)
    there = drawn.Chosen(
        pool=chosen.pool.each(lambda column: _apart(column, device)),
        slots=spread(chosen.slots, device),
        keep=chosen.keep.to(device)[:, :1].expand_as(keep) if shared else spread(keep, device),
        vacant=chosen.vacant.to(device),
        stable=chosen.stable.to(device),
        above=None
        if chosen.above is None
        else chosen.above.to(device)[: case.rows, : case.parents],
    )
    open_level(*there, Opened(*drawn.views(found, case.rows, case.width + 1)), **sizes)
    assert_buffers(Opened._fields, found, wanted)


def check_lay_out(case: drawn.Axis, device: torch.device) -> None:
    """With trees that stand dense, and with columns that do not."""
    tree, prefix, positions = drawn.drawn_axis(case, seed=case.rows + case.columns)
    options = {"num_tokens": int(tree.num_nodes.sum()) + case.spare, "last_place": drawn.LARGE + 5}
    wanted = by_reference(lay_out, tree, prefix, positions, **options)
    there = BuiltTree(*moved(tree, device))
    apart = {name: spread(getattr(tree, name), device) for name in ("token_ids", "depth")}
    for trees in (there._replace(**apart), there)[: 1 if case.rows > FEW else 2]:
        with poisoned():
            found = lay_out(trees, prefix.to(device), positions.to(device), **options)
        assert_same(found, wanted, str(case))


def check_settle(case: drawn.Round, dtype: torch.dtype, device: torch.device) -> None:
    """With tables that stand dense, with rows that lie apart, and with columns that do."""
    found = drawn.drawn_round(case, dtype, seed=case.rows + case.steps)
    tables = ("path", "token_ids", "node_at", "parent", "depth", "submitted")
    there = Walked(*moved(found, device))
    apart = {name: _apart(getattr(found, name), device) for name in tables}
    every_second = {name: spread(getattr(found, name), device) for name in tables}
    best = {"best": spread(found.best[:, None], device)[:, 0]}
    ways = (there._replace(**apart, **best), there, there._replace(**every_second))
    for given in ways[: 1 if case.rows > FEW else 3]:
        wanted, buffers = both(drawn.junk_settled(case.rows, case.steps), device)
        by_reference(settle, found, drawn.settled_of(wanted))
        settle(given, drawn.settled_of(buffers))
        assert_buffers(Settled._fields, buffers, wanted)


def _cases() -> dict[str, Callable[[torch.device], None]]:
    found: dict[str, Callable[[torch.device], None]] = {}
    for name, tree in TREES.items():
        found[f"open_tree, {name}"] = partial(check_open_tree, tree)
    for name, level in LEVELS.items():
        for shared in (True, False):
            way = "shared" if shared else "apart"
            found[f"open_level, {name}, {way}"] = partial(check_open_level, level, shared=shared)
    for name, axis in AXES.items():
        found[f"lay_out, {name}"] = partial(check_lay_out, axis)
    for name, size in ROUNDS.items():
        found[f"settle, {name}"] = partial(check_settle, size, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        found[f"settle, {dtype}"] = partial(check_settle, ROUNDS["eagle2"], dtype)
    return found


CASES = _cases()
"""Every check, for a device."""


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_in_any_layout(name: str, device: torch.device) -> None:
    CASES[name](device)


def test_no_rows(device: torch.device) -> None:
    check_open_tree((0, 5), device)
    check_open_level(drawn.Level(0, 3), device, shared=False)
    check_open_level(drawn.Level(3, 0), device, shared=False)
    check_settle(drawn.Round(0, 3, 4, 5, 6, spare=1), torch.float32, device)


def test_programs_run_in_any_order(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last first: the next program does not mend superfluous writes of one before."""
    if backend != "interpreter":
        pytest.skip("the order is the interpreter's to choose")
    from triton.runtime.interpreter import interpreter_builder as builder

    forward, turned = builder.set_grid_idx, list[bool]()

    def backward(*index: int) -> None:
        turned.append(any(size > 1 for size in builder.grid_dim))
        forward(*(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backward)
    for name in CASES:
        if name.startswith("lay_out") or "two programs" in name or name == "settle, eagle2":
            CASES[name](device)
    assert any(turned), "no kernel had a second program"
