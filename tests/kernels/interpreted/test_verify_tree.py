"""The fused walk as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.verify_tree import Judged, verify_tree, walk_tree
from tests.kernels.cases_verify_tree import (
    ACCEPTANCES,
    check_first_two_of_more,
    check_verify,
    check_walk,
    random_batch,
    walked,
)
from tests.kernels.cases_walk_edges import check_edges

CPU = torch.device("cpu")
SHAPES = {"small": (20, 13, 4), "bushy": (8, 64, 30), "deep": (18, 100, 3)}
PLAIN = ("strict", "judged")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACCEPTANCES)
def test_walk_equals_the_loop(name: str, shape: str) -> None:
    batch = random_batch(len(name), *SHAPES[shape])
    wanted = check_walk(batch, name, CPU, spare_depth=min(2, 64 - batch.max_depth))
    # Not in vain: walks end early and late, behind leaves and before refused children.
    assert wanted.num_accepted.max() >= 3
    assert (wanted.first_rejected == -1).any()
    assert (wanted.first_rejected >= 0).any()


def test_the_largest_tree() -> None:
    for name in ("strict", "ratio, cut", "near law, cut"):
        check_walk(random_batch(5, 2, 1024, 40), name, CPU)


@pytest.mark.parametrize("name", [name for name in ACCEPTANCES if name not in PLAIN])
def test_relaxations_are_reached(name: str) -> None:
    """Each acceptance goes where strict does not, or the tests above say little."""
    batch = random_batch(11, 200, 13, 4)
    strict = walked(batch, None, batch.max_depth + 1).num_accepted
    relaxed = walked(batch, ACCEPTANCES[name](batch), batch.max_depth + 1).num_accepted
    assert (relaxed > strict).sum() >= 10


@pytest.mark.parametrize("shape", [(12, 13, 4), (3, 300, 9)])
def test_verify_equals_the_loop(shape: tuple[int, int, int]) -> None:
    check_verify(random_batch(3, *shape), CPU)


def test_a_root_alone_and_no_rows() -> None:
    root = torch.tensor([[-1]])
    walk = walk_tree(root, root, torch.tensor([[7]]), 0)
    assert [field.tolist() for field in walk] == [[[0]], [[7]], [7], [0], [-1]]
    nothing = torch.zeros(0, 5, dtype=torch.int64)
    assert walk_tree(nothing, nothing, nothing, 3).path.shape == (0, 4)
    assert verify_tree(nothing, nothing.bool(), 3).shape == (0, 4)


def test_depth_is_cut_where_the_caller_says() -> None:
    chain = torch.tensor([[-1, 0, 1, 2]])
    tokens, targets = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[1, 2, 3, 4]])
    walk = walk_tree(chain, tokens, targets, 2)
    assert [field.tolist() for field in walk] == [[[0, 1, 2]], [[1, 2, 3]], [3], [2], [3]]


def test_pairs_within_longer_rows() -> None:
    check_first_two_of_more(CPU)


def test_thresholds_are_exceeded_not_met() -> None:
    check_edges(CPU)


@pytest.mark.parametrize(("slots", "depth"), [(1025, 3), (8, 65)])
def test_trees_above_capacity_are_refused(slots: int, depth: int) -> None:
    parent = torch.full((1, slots), -2)
    for acceptance in (None, Judged(parent > 0)):
        with pytest.raises(UsageError, match=r"kernel walk_tree, .*expected at most"):
            walk_tree(parent, parent, parent, depth, acceptance)
    with pytest.raises(UsageError, match=r"kernel verify_tree, .*expected at most"):
        verify_tree(parent, parent > 0, depth)
