"""The torch `bookkeeping` against its loops, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.bookkeeping import lay_out, open_level, open_tree, settle
from specctl.kernels.bookkeeping.columns import FACTS, Settled, Walked, new_opened, new_settled
from specctl.kernels.tree_build import BuiltTree
from tests.kernels.cases_bookkeeping import CASES, check_open_level, check_open_tree, check_settle
from tests.kernels.drawn_bookkeeping import (
    CPU,
    Axis,
    Level,
    Round,
    Tree,
    drawn_axis,
    drawn_level,
    drawn_round,
    junk_pool,
)

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loops(name: str) -> None:
    CASES[name](CPU)


def test_no_rows() -> None:
    check_open_tree(Tree(0, 5), CPU)
    check_open_level(Level(0, 3), CPU, shared=False)
    check_settle(Round(0, 3, 4, 5, 6, spare=1), torch.float32, CPU)


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
        offsets=torch.tensor([0, 3]),
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
    ({"above": None}, "above: expected who the level before sees, .* found nothing"),
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
    with pytest.raises(UsageError, match="settle, offsets: expected int64 of 3"):
        settle(found._replace(offsets=found.stable), settled)
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
