"""The fused building of trees as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.tree_build import link_tree, select_nodes
from tests.kernels.cases_tree_build import (
    GROWTHS,
    Growth,
    check_edges,
    check_finish,
    check_growth,
    check_orphans,
    empty_pool,
)

CPU = torch.device("cpu")
TOKENS = {"chain": (1, 9), "odd": (33,), "eagle2": (60,), "widest": (256,)}


@pytest.mark.parametrize("name", GROWTHS)
def test_a_tree_grows_and_is_cut_as_the_loops_say(name: str) -> None:
    pool = check_growth(len(name), GROWTHS[name], CPU)
    for num_tokens in TOKENS[name]:
        tree = check_finish(pool, num_tokens, CPU, seed=num_tokens)
        assert int(tree.num_nodes.max()) > 1 or num_tokens == 1


def test_the_largest_pool() -> None:
    """2,577 slots, above which digits are taken two bits at a time."""
    pool = check_growth(3, Growth(1, 11, 16, 16), CPU)
    check_finish(pool, 300, CPU)


def test_what_does_not_hang_together_is_emptied() -> None:
    check_orphans(CPU)


def test_ties_and_edges() -> None:
    check_edges(CPU)


def test_above_capacity() -> None:
    with pytest.raises(UsageError, match=r"slots of the pool.*at most 4096"):
        select_nodes(torch.zeros(1, 4097), 8)
    with pytest.raises(UsageError, match=r"num_tokens.*at most 1024"):
        select_nodes(torch.zeros(1, 2000), 1025)


def test_no_rows() -> None:
    pool = empty_pool(Growth(0, 2, 2, 2), CPU)
    assert select_nodes(torch.zeros(0, 9), 4).shape == (0, 4)
    assert link_tree(pool, torch.zeros(0, 4, dtype=torch.int64), 3).ancestor_bits.shape == (0, 4, 1)
