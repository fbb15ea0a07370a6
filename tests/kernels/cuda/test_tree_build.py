"""The fused building of trees on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from specctl.kernels.dispatch import forced
from specctl.kernels.tree_build import (
    BuiltTree,
    Children,
    Pool,
    append_level,
    finish_tree,
    link_tree,
    select_nodes,
)
from tests.kernels.cases_tree_build import (
    GROWTHS,
    Growth,
    assert_same,
    check_edges,
    check_finish,
    check_growth,
    check_orphans,
    drawn_children,
    empty_pool,
    moved,
)
from tests.kernels.cuda.capture import CUDA, captured, overwrite

pytestmark = pytest.mark.cuda
ROUNDS = {
    "chain, 64": Growth(64, 10, 1, 1),
    "eagle2, 1": Growth(1, 6, 10, 10),
    "eagle2, 32": Growth(32, 6, 10, 10),
    "c2t, 8": Growth(8, 11, 10, 10),
    "widest, 8": Growth(8, 4, 16, 16),
}


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with forced("fused"):
        yield


@pytest.mark.parametrize("name", [*GROWTHS, *ROUNDS])
def test_a_tree_grows_and_is_cut_as_the_loops_say(name: str) -> None:
    pool = check_growth(len(name), (GROWTHS | ROUNDS)[name], CUDA)
    for num_tokens in (1, 9, 60, 64, 256):
        check_finish(pool, num_tokens, CUDA, seed=num_tokens)


def test_the_largest_pool() -> None:
    pool = check_growth(3, Growth(2, 16, 16, 16), CUDA)
    for num_tokens in (300, 1024):
        check_finish(pool, num_tokens, CUDA)


def test_edges() -> None:
    for seed in range(10):
        check_orphans(CUDA, seed)
    check_edges(CUDA)


def test_a_graph_sees_what_is_overwritten() -> None:
    """Two levels and a finished tree in one graph; drafts, limits and bars change in between."""
    size = Growth(8, 2, 10, 10)
    pool, root = empty_pool(size, CUDA), torch.zeros(8, 1, dtype=torch.int64, device=CUDA)
    inputs = [tensor.to(CUDA) for tensor in _drawn(size, 0)]
    keep = torch.ones(8, 10, dtype=torch.bool, device=CUDA)

    def run() -> BuiltTree:
        first, second = Children(*inputs[:4]), Children(*inputs[4:8])
        best = append_level(pool, root, keep[:, :1], first, start=1, depth=1, num_best=10)
        append_level(pool, best.index, keep, second, start=11, depth=2, num_best=10)
        options = {"limit": inputs[8], "min_score": inputs[9]}
        return finish_tree(pool, pool.joint_logp, 60, 2, positions=inputs[10], **options)

    graph, found = captured(run)
    for seed in (1, 2):
        fresh = _drawn(size, seed)
        overwrite(inputs, fresh)
        graph.replay()
        with forced("reference"):
            there = Pool(*moved(pool, torch.device("cpu")))
            submitted = select_nodes(there.joint_logp, 60, limit=fresh[8], min_score=fresh[9])
            wanted = link_tree(there, submitted, 2, fresh[10])
        assert_same(found, wanted, f"replay {seed}")


def _drawn(size: Growth, seed: int) -> list[torch.Tensor]:
    draw = np.random.default_rng(seed)
    levels = [drawn_children(draw, size.rows, width, size.top_k)[:4] for width in (1, 10)]
    limit = torch.from_numpy(draw.integers(1, 70, size.rows))
    positions = torch.from_numpy(draw.integers(0, 4096, size.rows))
    return [*levels[0], *levels[1], limit, torch.tensor([-4.0 + seed]), positions]
