"""`bookkeeping` against the loops of its docstrings, and its refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.bookkeeping import (
    FACTS,
    Opened,
    Settled,
    Walked,
    lay_out,
    new_opened,
    new_settled,
    open_level,
    open_tree,
    settle,
)
from specctl.kernels.dispatch import forced
from specctl.kernels.tree_build import BuiltTree, Pool
from tests.kernels import loops
from tests.kernels.drawn import (
    LARGE,
    Axis,
    Chosen,
    Level,
    Round,
    drawn_axis,
    drawn_level,
    drawn_round,
    flags,
    integers,
    junk_opened,
    junk_pool,
    junk_settled,
    settled_of,
    views,
)
from tests.kernels.helpers import CPU, assert_same, moved, poisoned, spread

FEW = 8
"""Rows above which one way of standing in memory will do."""
TREES = {
    "one slot": (1, 1),
    "eagle2": (8, 711),
    "two programs a row": (3, 1025),
    "odd": (33, 61),
}
LEVELS = {
    "one node": Level(1, 1),
    "first": Level(3, 10),
    "all of a word": Level(2, 32, num_words=1, top_k=32),
    "second": Level(5, 10, num_words=3, depth=2, parents=10, behind=10),
    "to the last bit": Level(8, 10, num_words=4, depth=5, parents=10, behind=118),
    "across words": Level(33, 7, num_words=2, depth=3, parents=4, top_k=3, behind=29),
    "two programs a row": Level(2, 19, num_words=9, depth=2, parents=19, top_k=1, behind=250),
}
AXES = {
    "one node": Axis(1, 1),
    "full": Axis(8, 60),
    "padded": Axis(5, 60, spare=70),
    "odd": Axis(33, 7, spare=3),
    "two blocks a row": Axis(3, 65, spare=1),
    "five words": Axis(4, 150, spare=90),
    "ten words": Axis(2, 300, spare=1),
    "cut": Axis(6, 20, spare=-9),
    "more rows than are added up at once": Axis(66, 2, spare=5),
}
ROUNDS = {
    "plain": Round(1, 1, 1, 1, 1),
    "eagle2": Round(8, 8, 60, 711, 60),
    "padded": Round(33, 3, 5, 21, 7, spare=9),
    "one level more than a block": Round(3, 17, 20, 1025, 48, spare=1),
    "more submitted than drafted": Round(2, 4, 3, 5, 1030),
    "more nodes than a block": Round(2, 6, 1029, 40, 9, spare=4),
    "nothing submitted": Round(4, 2, 2, 3, 0, spare=1),
}


def both(buffers: NamedTuple, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Copies for a loop, and for an op."""
    return [part.clone() for part in buffers], [part.clone().to(device) for part in buffers]


def assert_buffers(names: Iterable[str], found: list[Tensor], wanted: list[Tensor]) -> None:
    """Whole buffers, what must not be touched too."""
    for name, mine, theirs in zip(names, found, wanted, strict=True):
        assert torch.equal(mine.cpu(), theirs), f"{name}: {mine.cpu()}, not {theirs}"


def check_open_tree(case: tuple[int, int], device: torch.device) -> None:
    draw = np.random.default_rng(case[1])
    rows, size = case
    root_ids, vacant = integers(draw, rows), flags(draw, rows)
    opened = junk_opened(draw, rows, 4, 2)
    pool = junk_pool(draw, rows, size)
    there = Pool(*(_apart(column, device) for column in pool))
    wanted, found = both(opened, device)
    loops.open_tree(pool, root_ids, vacant, Opened(*views(wanted, rows)))
    open_tree(there, root_ids.to(device), vacant.to(device), Opened(*views(found, rows, 4)))
    assert_buffers(Opened._fields, found, wanted)
    for name, column, expected in zip(Pool._fields, there, pool, strict=True):
        assert torch.equal(column.cpu().nan_to_num(5.0), expected.nan_to_num(5.0)), name


def _apart(column: Tensor, device: torch.device) -> Tensor:
    """On the device, still with something between its rows."""
    return torch.nn.functional.pad(column, (0, 5)).to(device)[:, : column.shape[1]]


def check_open_level(case: Level, device: torch.device, *, shared: bool) -> None:
    """`shared`: one verdict for all nodes of a row, as an expanded column; else rows that are
    every second column of something wider."""
    chosen, sizes = drawn_level(case, seed=case.width + case.rows)
    keep = chosen.keep[:, :1].expand_as(chosen.keep) if shared else chosen.keep
    opened = junk_opened(np.random.default_rng(1), case.rows, case.width, case.num_words)
    wanted, found = both(opened, device)
    given = chosen._replace(keep=keep)
    loops.open_level(*given, Opened(*views(wanted, case.rows)), **sizes)
    there = Chosen(
        pool=Pool(*(_apart(column, device) for column in chosen.pool)),
        slots=spread(chosen.slots, device),
        keep=chosen.keep.to(device)[:, :1].expand_as(keep) if shared else spread(keep, device),
        vacant=chosen.vacant.to(device),
        stable=chosen.stable.to(device),
        above=None
        if chosen.above is None
        else chosen.above.to(device)[: case.rows, : case.parents],
    )
    open_level(*there, Opened(*views(found, case.rows, case.width + 1)), **sizes)
    assert_buffers(Opened._fields, found, wanted)


def check_lay_out(case: Axis, device: torch.device) -> None:
    """With trees that stand dense, and with columns that do not."""
    tree, prefix, positions = drawn_axis(case, seed=case.rows + case.columns)
    options = {"num_tokens": int(tree.num_nodes.sum()) + case.spare, "last_place": LARGE + 5}
    wanted = loops.lay_out(tree, prefix, positions, **options)
    there = BuiltTree(*moved(tree, device))
    apart = {name: spread(getattr(tree, name), device) for name in ("token_ids", "depth")}
    for trees in (there._replace(**apart), there)[: 1 if case.rows > FEW else 2]:
        with poisoned():
            found = lay_out(trees, prefix.to(device), positions.to(device), **options)
        assert_same(found, wanted, str(case))


def check_settle(case: Round, dtype: torch.dtype, device: torch.device) -> None:
    """With tables that stand dense, with rows that lie apart, and with columns that do."""
    found = drawn_round(case, dtype, seed=case.rows + case.steps)
    tables = ("path", "token_ids", "node_at", "parent", "depth", "submitted")
    there = Walked(*moved(found, device))
    apart = {name: _apart(getattr(found, name), device) for name in tables}
    every_second = {name: spread(getattr(found, name), device) for name in tables}
    best = {"best": spread(found.best[:, None], device)[:, 0]}
    ways = (there._replace(**apart, **best), there, there._replace(**every_second))
    for given in ways[: 1 if case.rows > FEW else 3]:
        wanted, buffers = both(junk_settled(case.rows, case.steps), device)
        loops.settle(found, settled_of(wanted))
        settle(given, settled_of(buffers))
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
DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loops(name: str, device: torch.device) -> None:
    CASES[name](device)


def test_no_rows(device: torch.device) -> None:
    check_open_tree((0, 5), device)
    check_open_level(Level(0, 3), device, shared=False)
    check_open_level(Level(3, 0), device, shared=False)
    check_settle(Round(0, 3, 4, 5, 6, spare=1), torch.float32, device)


def test_programs_run_in_any_order(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last first: the next program does not mend superfluous writes of one before."""
    if backend != "interpreter":
        pytest.skip("the order is the interpreter's to choose")
    from triton.runtime.interpreter import interpreter_builder as builder

    forward = builder.set_grid_idx

    def backward(*index: int) -> None:
        forward(*(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backward)
    for name in CASES:
        if name.startswith("lay_out") or "two programs" in name or name == "settle, eagle2":
            CASES[name](device)


def test_above_capacity(backend: str, device: torch.device) -> None:
    if backend == "reference":
        pytest.skip("the reference has room")
    with pytest.raises(UsageError, match="lay_out, nodes of a tree: expected at most 1024"):
        lay_out(*moved_axis(Axis(1, 1025), device), num_tokens=9, last_place=9)
    found = Walked(*moved(drawn_round(Round(2, 129, 4, 5, 6), torch.float32, seed=0), device))
    buffers = settled_of(moved(junk_settled(2, 129), device))
    with pytest.raises(UsageError, match="settle, nodes of a path: expected at most 128, found 12"):
        settle(found, buffers)


def moved_axis(case: Axis, device: torch.device) -> tuple[BuiltTree, Tensor, Tensor]:
    tree, *rest = drawn_axis(case, seed=0)
    return BuiltTree(*moved(tree, device)), *moved(rest, device)  # type: ignore[return-value]


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_real_sizes(batch: int) -> None:
    """EAGLE-2's trees of 60 nodes, eight levels of ten, in a pool of 711."""
    there = torch.device("cuda")
    with forced("fused"):
        check_open_tree((batch, 711), there)
        for depth in (1, 2, 7):
            parents, behind = (1, 0) if depth == 1 else (10, 10 * (depth - 1))
            check_open_level(Level(batch, 10, 3, depth, parents, 10, behind), there, shared=True)
        check_lay_out(Axis(batch, 60, spare=batch), there)
        check_lay_out(Axis(1024, 3, spare=700), there)
        check_settle(Round(batch, 9, 60, 711, 60, spare=batch), torch.bfloat16, there)


def test_two_trees_and_a_vacant_row_by_hand() -> None:
    """Rows of 2, 0 and 1 nodes on five places."""
    tree = drawn_axis(Axis(3, 2), seed=0)[0]
    ids = torch.tensor([[10, 11], [0, 0], [30, 0]])
    tree = tree._replace(
        token_ids=ids,
        depth=torch.tensor([[0, 1], [0, 0], [0, 0]]),
        num_nodes=torch.tensor([2, 0, 1]),
    )
    prefix, positions = torch.tensor([100, 200, 300]), torch.tensor([7, 8, 9])
    laid = lay_out(tree, prefix, positions, num_tokens=5, last_place=999)
    assert laid.offsets.tolist() == [0, 2, 2, 3]
    assert laid.row.tolist() == [0, 0, 2, 0, 0]
    assert laid.place.tolist() == [100, 101, 300, 999, 999]
    assert laid.token_ids.tolist() == [10, 11, 30, 0, 0]
    assert laid.positions.tolist() == [7, 8, 9, 0, 0]
    assert laid.node_at.tolist() == [[0, 1], [2, 3], [2, 3]]


def test_a_round_by_hand() -> None:
    """Two nodes accepted of three verified; a fourth logit is nobody's and no number."""
    found = Walked(
        path=torch.tensor([[0, 2, -1]]),
        token_ids=torch.tensor([[5, 6, -1]]),
        num_nodes=torch.tensor([3]),
        node_at=torch.tensor([[0, 1, 2]]),
        best=torch.tensor([1.0, 2.0, 3.0, float("nan")]),
        parent=torch.tensor([[-1, 0, 0, 1, -2]]),
        depth=torch.tensor([[0, 1, 1, 2, 3]]),
        submitted=torch.tensor([[0, 1, 2, 3, -1]]),
        faulty=torch.tensor([False]),
        stable=torch.tensor([40]),
    )
    settled = new_settled(1, 3, CPU)
    settle(found, settled)
    facts = dict(zip(FACTS, settled.outcome[0].tolist(), strict=False))
    assert facts == {"count": 2, "num_verified": 3, "num_levels": 2, "faulty": 0, "finite": 1,
                     "wanted": 4}  # fmt: skip
    assert settled.outcome[0, len(FACTS) :].tolist() == [5, 6, -1]
    assert settled.path_at.tolist() == [[0, 2, 0]]
    assert settled.read_ids.tolist() == [[5, 6, 0]]
    assert settled.read_place.tolist() == [[40, 41, 42]]
    assert (settled.last.tolist(), settled.next_root.tolist()) == ([1], [6])


# --------------------------------------------------------------------------- refusals


def level(**changed: object) -> None:
    """A good call of `open_level`, but for what is changed."""
    chosen, sizes = drawn_level(Level(2, 3, num_words=2, depth=2, parents=3, top_k=4), seed=0)
    given = {**chosen._asdict(), **sizes, "opened": new_opened(2, 3, 2, CPU), **changed}
    above = given["above"]
    given["above"] = above[:2] if above is chosen.above else above  # type: ignore[index]
    open_level(**given)  # type: ignore[arg-type]


def test_a_good_level_is_not_refused() -> None:
    level()


OPENED = new_opened(2, 3, 2, CPU)
LONG = torch.zeros(2, 3, dtype=torch.int64)
BAD_LEVELS: list[tuple[dict[str, object], str]] = [
    ({"slots": LONG[0]}, "slots: expected int64 of 2 x any, found int64 of 3"),
    ({"keep": LONG}, "keep: expected bool of 2 x 3, found int64"),
    ({"vacant": torch.zeros(3).bool()}, "vacant: expected bool of 2, found bool of 3"),
    ({"stable": torch.zeros(2)}, "stable: expected int64 of 2"),
    ({"above": torch.zeros(2, 3, 1, dtype=torch.int32)}, "above: expected int32 of 2 x any x 2"),
    ({"above": None}, "above: expected the words of the level before.* found nothing"),
    ({"above": OPENED.words, "opened": OPENED}, "above: .* another buffer .* found the same"),
    ({"behind": 62}, "nodes: expected at most 64, found 65"),
    ({"opened": new_opened(2, 2, 2, CPU)}, "width: expected at most 2, found 3"),
    ({"opened": new_opened(3, 3, 2, CPU)}, "opened.slots: expected int64 of 2 x any"),
    ({"opened": OPENED._replace(place=LONG.float())}, "opened.place: expected int64 of 2 x 3"),
    ({"opened": OPENED._replace(parent=LONG.T.contiguous().T)}, "opened.parent: expected dense r"),
    (
        {"opened": OPENED._replace(words=torch.zeros(2, 3, 4, dtype=torch.int32)[..., ::2])},
        "opened.words: expected dense rows",
    ),
]


@pytest.mark.parametrize(("changed", "message"), BAD_LEVELS, ids=[m for _, m in BAD_LEVELS])
def test_bad_levels_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"kernel open_level, {message}"):
        level(**changed)


def test_bad_roots_are_refused() -> None:
    pool, opened = junk_pool(DRAW, 2, 4), new_opened(2, 3, 2, CPU)
    ids, vacant = torch.zeros(2, dtype=torch.int64), torch.zeros(2).bool()
    with pytest.raises(UsageError, match="open_tree, root_ids: expected int64 of 2"):
        open_tree(pool, vacant, vacant, opened)
    with pytest.raises(UsageError, match="open_tree, entries of opened: expected at least 1"):
        open_tree(pool, ids, vacant, new_opened(2, 0, 2, CPU))
    with pytest.raises(UsageError, match=r"open_tree, pool.depth: expected dense rows, strides"):
        open_tree(pool._replace(depth=pool.depth.clone()), ids, vacant, opened)


def test_bad_trees_are_refused() -> None:
    tree, prefix, positions = drawn_axis(Axis(2, 3), seed=0)
    sizes = {"num_tokens": 6, "last_place": 9}

    def refused(message: str, **changed: object) -> None:
        given = tree._replace(**{k: v for k, v in changed.items() if k in BuiltTree._fields})
        options = sizes | {k: v for k, v in changed.items() if k in sizes}
        with pytest.raises(UsageError, match=f"kernel lay_out, {message}"):
            lay_out(given, prefix, positions, **options)  # type: ignore[arg-type]

    refused("depth: expected int64 of 2 x 3", depth=tree.depth[:, :2])
    refused("num_nodes: expected int64 of 2", num_nodes=prefix.float())
    refused("ancestor_bits: expected int32 of 2 x 3 x 1", ancestor_bits=tree.depth)
    refused("num_tokens: expected at least 1", num_tokens=0)
    none, *of_none = drawn_axis(Axis(2, 3), seed=0)
    empty = BuiltTree(*(part[:0] for part in none))
    with pytest.raises(UsageError, match="rows: expected at least 1, found 0"):
        lay_out(empty, *(part[:0] for part in of_none), **sizes)
    with pytest.raises(UsageError, match="entries of parent: expected at least 1, found 0"):
        lay_out(*drawn_axis(Axis(2, 0), seed=0), **sizes)
    many, *of_many = drawn_axis(Axis(1025, 1), seed=0)
    with pytest.raises(UsageError, match="rows: expected at most 1024, found 1025"):
        lay_out(many, *of_many, **sizes)


def test_bad_rounds_are_refused() -> None:
    found, settled = drawn_round(Round(2, 3, 4, 5, 6), torch.float32, 0), new_settled(4, 3, CPU)
    with pytest.raises(UsageError, match="settle, best: expected float32 or bfloat16 or float16"):
        settle(found._replace(best=found.best.double()), settled)
    with pytest.raises(UsageError, match="settle, node_at: expected int64 of 2 x any"):
        settle(found._replace(node_at=found.stable), settled)
    with pytest.raises(UsageError, match="settle, path: expected int64 of any x any"):
        settle(found._replace(path=found.stable), settled)
    with pytest.raises(UsageError, match="settle, entries of node_at: expected at least 1"):
        settle(found._replace(node_at=found.node_at[:, :0]), settled)
    with pytest.raises(UsageError, match=r"settle, settled.outcome: expected int64 of 2 x 9"):
        settle(found, new_settled(2, 4, CPU))
    with pytest.raises(UsageError, match=r"settle, settled.last: expected int64 of 4, found int64"):
        settle(found, settled._replace(last=settled.last[:3]))
    few = Settled(*(part[:1] for part in settled))
    with pytest.raises(UsageError, match=r"settle, settled.outcome: expected int64 of 2 x 9"):
        settle(found, few)
    with pytest.raises(UsageError, match=r"settle, settled.read_ids: expected dense rows"):
        settle(found, settled._replace(read_ids=torch.zeros(4, 6, dtype=torch.int64)[:, ::2]))
