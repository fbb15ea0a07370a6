"""The torch `tree_build` against its loops, and against the code of rules and runtime."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.features import DraftPool, path_sum
from specctl.kernels.tree_build import (
    Pool,
    append_level,
    finish_tree,
    link_tree,
    select_nodes,
    written,
)
from specctl.policy.rules import Frontier, Level, best_nodes, best_of_level
from specctl.runtime.growth import Children, new_pool
from specctl.runtime.growth import append_level as runtime_append
from specctl.tree import TokenTree, ancestor_mask, child_links, pack_bits, take
from tests.kernels.cases_tree_build import (
    GROWTHS,
    Growth,
    check_edges,
    check_finish,
    check_growth,
    check_orphans,
    drawn_children,
    empty_pool,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", GROWTHS)
def test_a_tree_grows_and_is_cut_as_the_loops_say(name: str) -> None:
    pool = check_growth(len(name), GROWTHS[name], CPU)
    for num_tokens in (1, 9, 60):
        check_finish(pool, num_tokens, CPU, seed=num_tokens)


def test_what_does_not_hang_together_is_emptied() -> None:
    check_orphans(CPU)


def test_ties_and_edges() -> None:
    check_edges(CPU)


@pytest.mark.parametrize("seed", range(6))
def test_equal_to_what_the_runtime_does(seed: int) -> None:
    """Bit by bit, the order of ties too, on pools above and below the rules' `SORTED_WHOLE`."""
    import numpy as np

    rows = (3, 40)[seed % 2]
    size = Growth(rows, 4, 10, 10)
    draw = np.random.default_rng(seed)
    ours = empty_pool(size, CPU)
    theirs = new_pool(ours.token_ids[:, 0], size.capacity)
    frontier = Frontier(torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1).bool())
    for depth in range(1, size.levels + 1):
        children = drawn_children(draw, rows, frontier.index.shape[1], size.top_k)
        best = append_level(
            ours,
            *(frontier.index, frontier.keep, children),
            start=theirs.size,
            depth=depth,
            num_best=size.width,
        )
        runtime_append(theirs, depth, frontier, Children(*children))
        index = best_of_level(Level(depth, theirs.view(), theirs.level_start), size.width)
        assert torch.equal(best.index, index)
        frontier = Frontier(index, torch.from_numpy(draw.random(index.shape) < 0.8))
    _assert_equal_pools(ours, theirs.view())
    limit = torch.from_numpy(draw.integers(1, 60, rows))
    submitted = best_nodes(theirs.view(), 48, limit)
    built = finish_tree(ours, ours.joint_logp, 48, 4, limit=limit)
    assert torch.equal(built.submitted, submitted)
    tree = take(theirs.view().tree, submitted)
    for name in ("token_ids", "parent", "depth", "draft_logp", "valid", "num_nodes"):
        assert torch.equal(getattr(built, name), getattr(tree, name)), name
    assert torch.equal(torch.stack([built.first_child, built.next_sibling]), _links(tree))
    words = pack_bits(ancestor_mask(tree.parent, 4))
    assert torch.equal(built.ancestor_bits.view(torch.int64), words)


def _assert_equal_pools(ours: Pool, theirs: DraftPool) -> None:
    end = theirs.joint_logp.shape[1]
    for name in ("token_ids", "parent", "depth", "draft_logp"):
        assert torch.equal(getattr(written(ours, end), name), getattr(theirs.tree, name)), name
    for name in ("joint_logp", "entropy", "topk_entropy", "sibling_rank", "expanded"):
        assert torch.equal(getattr(written(ours, end), name), getattr(theirs, name)), name
    sums = path_sum(theirs.topk_entropy, theirs.tree.parent, 4)
    assert torch.equal(written(ours, end).path_entropy, sums)


def _links(tree: TokenTree) -> torch.Tensor:
    return torch.stack(child_links(tree.parent))


def test_refusals() -> None:
    pool = empty_pool(Growth(2, 2, 2, 3), CPU)
    scores = torch.zeros(2, 9)
    frontier = torch.zeros(2, 1, dtype=torch.int64)
    import numpy as np

    children = drawn_children(np.random.default_rng(0), 2, 1, 3)
    sizes = {"start": 8, "depth": 1, "num_best": 2}
    with pytest.raises(UsageError, match="append_level, slots: expected at most 10, found 11"):
        append_level(pool, frontier, frontier.bool(), children, **sizes)
    with pytest.raises(UsageError, match="append_level, keep: expected bool of 2 x 1"):
        append_level(pool, frontier, frontier, children, **sizes)
    with pytest.raises(UsageError, match=r"children.entropy: expected float32 of 2 x 1"):
        append_level(pool, frontier, frontier.bool(), children._replace(entropy=scores), **sizes)
    with pytest.raises(UsageError, match=r"pool.depth.*dense rows"):
        link_tree(pool._replace(depth=pool.depth.clone()), frontier, 3)
    with pytest.raises(UsageError, match="select_nodes, scores: expected float32"):
        select_nodes(scores.double(), 3)
    with pytest.raises(UsageError, match="num_tokens: expected at least the root"):
        select_nodes(scores, 0)
    with pytest.raises(UsageError, match="limit: expected int64 of 2"):
        finish_tree(pool, scores, 3, 2, limit=torch.ones(3, dtype=torch.int64))
    with pytest.raises(UsageError, match="finish_tree, scores: expected at most 10, found 12"):
        finish_tree(pool, torch.zeros(2, 12), 3, 2)
    with pytest.raises(UsageError, match="positions: expected int64 of 2"):
        finish_tree(pool, scores, 3, 2, positions=torch.zeros(2))
