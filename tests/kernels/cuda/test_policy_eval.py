"""Fused decisions on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specctl.kernels.dispatch import forced
from specctl.kernels.policy_eval import Bins, Pruned, bin_rows, prune_level
from specctl.kernels.tree_build import Pool
from specctl.policy.records import EntropyBins, ScoredTree
from tests.kernels.cases_policy_eval import (
    BASE,
    buffer_of,
    check_bins,
    check_faults,
    check_gates,
    check_network,
    check_surest,
    check_threshold,
    level_pool,
)
from tests.kernels.cases_policy_rounds import SHAPES, check_phi, check_round
from tests.kernels.cases_tree_build import assert_same, moved
from tests.kernels.cuda.capture import CUDA, captured
from tests.policy.scorers import random_network

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with forced("fused"):
        yield


@pytest.mark.parametrize("num_edges", [1, 5, 255])
def test_bins_of_100_000_rows(num_edges: int) -> None:
    check_bins(num_edges, CUDA)


def test_gates_and_thresholds_of_100_000_rows() -> None:
    check_gates(CUDA)
    check_threshold(CUDA)


@pytest.mark.parametrize("hidden", [2, 16, 17, 48, 64])
def test_networks_on_100_000_nodes(hidden: int) -> None:
    check_network(hidden, CUDA)
    check_network(hidden, CUDA, rows=8, size=100)


@pytest.mark.parametrize("rows", [1, 8, 60])
@pytest.mark.parametrize("name", SHAPES)
def test_a_round_as_the_rule_decides_it(name: str, rows: int) -> None:
    check_round(name, CUDA, rows)


def test_edges() -> None:
    check_phi(CUDA)
    check_faults(CUDA)
    check_surest(CUDA)


def test_a_graph_decides_by_the_policy_that_is_written() -> None:
    """Hot reload: more bins, and a wider network, in the buffers of graphs that are captured."""
    bins = [EntropyBins(base=BASE, edges=e, gammas=(0.5,)) for e in ((1.0,), (0.5, 2.0, 3.0))]
    trees = [
        ScoredTree(scorer=random_network(seed, hidden), beta=0.5, depth=2)
        for seed, hidden in ((1, 8), (2, 64))
    ]
    value = torch.linspace(0, 4, 60, device=CUDA)
    pool = Pool(*moved(level_pool(-3 * torch.rand(8, 100), 1), CUDA))
    scores = torch.zeros(8, 101, device=CUDA)
    binning, pruning = buffer_of(bins[0], CUDA), buffer_of(trees[0], CUDA)
    options = {"start": 1, "depth": 1, "width": 10}

    def run() -> tuple[Bins, Pruned]:
        return bin_rows(binning, value), prune_level(pruning, pool, scores, None, **options)

    graph, found = captured(run)
    for shape, tree in zip(bins[::-1], trees[::-1], strict=True):
        binning.write(buffer_of(shape, CUDA))
        pruning.write(buffer_of(tree, CUDA))
        graph.replay()
        wanted = bin_rows(buffer_of(shape, CUDA), value)
        assert all(map(torch.equal, found[0], wanted))
        fresh = prune_level(buffer_of(tree, CUDA), pool, torch.zeros_like(scores), None, **options)
        assert all(map(torch.equal, found[1], fresh))
    assert_same(Bins(*(part.cpu() for part in found[0])), Bins(*(p.cpu() for p in wanted)), "bins")
