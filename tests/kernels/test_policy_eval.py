"""`policy_eval` against the torch rules by row, and the parameter buffer; captured rounds decide by
it as the ordinary loop does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.features import NODE_FEATURES
from specctl.kernels.dispatch import forced
from specctl.kernels.policy_eval import choose_bins, close_gates, new_gate_state, prune_level
from specctl.kernels.policy_eval.layout import (
    COLUMNS,
    pack,
)
from specctl.kernels.tree_build import Best, select_nodes
from specctl.policy import (
    EntropyBins,
    FfnScorer,
    JointThreshold,
    ScoredTree,
    SparseGates,
    StaticTree,
    build_shape,
)
from specctl.policy.c2t import log_prob
from specctl.policy.echo import SparseGatesShape, gate_closes, stop_levels
from specctl.policy.hetero import EntropyBinsShape, entropy_bin
from specctl.policy.pruning import PrunedShape
from specctl.runtime.deciders import table_of
from specctl.tree import DraftPool
from tests.kernels.drawn import (
    BASE,
    NUM_ROWS,
    buffer_of,
    edge_rows,
    level_pool,
    phi_pool,
)
from tests.kernels.helpers import CPU, poisoned
from tests.policy.scorers import random_network


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """To a last bit of float32: sums of float64 may be rounded in another order."""
    torch.testing.assert_close(found.cpu(), wanted, rtol=2.0**-23, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_edges", [1, 255])
def test_bins(num_edges: int, device: torch.device, *, is_quick: bool) -> None:
    """The bin, depth and size of values of Φ, against the rule's."""
    draw = np.random.default_rng(num_edges)
    edges = np.unique(draw.normal(8, 3, num_edges).astype(np.float32))
    shape = EntropyBins(base=BASE, edges=tuple(map(float, edges)), gammas=(0.5, 1.0))
    rule = build_shape(shape)
    assert isinstance(rule, EntropyBinsShape)
    value = edge_rows(torch.from_numpy(edges), num_edges, 3 * num_edges + 100)
    value = value[:: 1 if is_quick else 4].contiguous()
    with poisoned():
        found = choose_bins(
            buffer_of(shape, device), phi_pool(value).each(lambda one: one.to(device))
        )
    bins = entropy_bin(value, rule.edges)
    assert len(bins.unique()) == len(edges) + 1 or not is_quick
    assert torch.equal(found.bins.cpu(), bins)
    assert torch.equal(found.max_depth.cpu(), rule.bin_depths[bins])
    assert torch.equal(found.num_tokens.cpu(), rule.bin_tokens[bins])
    assert torch.equal(found.value.cpu().nan_to_num(), value.nan_to_num())


def test_gates(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gates on 100,000 rows, the levels between them without one."""
    if (
        backend == "interpreter"
    ):  # larger blocks than a chip has registers for: only their number costs
        from specctl.kernels.policy_eval import fused

        monkeypatch.setattr(fused, "GATE_BLOCKS", {8192: 4})
    shape = SparseGates(
        depth=4, width=1, max_width=2, gate_levels=(1, 3), thresholds=(0.55, 0.2), num_tokens=20
    )
    rule = build_shape(shape)
    assert isinstance(rule, SparseGatesShape)
    bars = torch.tensor(list(rule.gates.values()))
    first, last = edge_rows(bars[:1], 1), edge_rows(bars[1:], 2)
    params, index = buffer_of(shape, device), torch.ones(NUM_ROWS, 1, dtype=torch.int64)
    state = new_gate_state(NUM_ROWS, 5, device)
    for depth, value in ((1, first), (2, first), (3, last)):
        best = Best((index * depth).to(device), value[:, None].to(device))
        with poisoned():
            keep = close_gates(params, best, state, depth=depth, width=1)
        assert torch.equal(keep, (state.max_depth > depth)[:, None])
    shut = [gate_closes(v, rule.gates[d]) & (v > -math.inf) for d, v in ((1, first), (3, last))]
    deepest = torch.full((NUM_ROWS,), 4).masked_fill(shut[1], 3).masked_fill(shut[0], 1)
    assert torch.equal(state.max_depth.cpu(), deepest)
    stopped = torch.zeros_like(deepest).masked_fill(shut[0], 1).masked_fill(shut[1], 3)
    assert torch.equal(state.stopped_at.cpu(), stopped)
    exists = torch.stack([first, first, last], 1) > -math.inf
    assert torch.equal(state.num_kept.cpu(), exists.sum(1))
    order = torch.where(exists, -exists.cumsum(1).float(), -math.inf)
    assert torch.equal(state.order.cpu()[:, 1:4], order)
    # The rule itself on a whole log, where every level holds something.
    told = stop_levels(shape, torch.stack([first, last], 1))
    whole = exists.all(1)
    assert torch.equal(torch.where(deepest < 4, deepest, 0)[whole], told[whole])
    assert len(told.unique()) == 3


def test_thresholds(device: torch.device, *, is_quick: bool) -> None:
    """Which of 1,024 nodes a row reach a threshold of the path's probability."""
    rows = 98 if is_quick else 15
    shape = JointThreshold(depth=3, top_k=4, min_prob=0.05, num_tokens=64)
    rule = build_shape(shape)
    assert isinstance(rule, PrunedShape)
    values = edge_rows(torch.tensor([rule.min_score]), 5, rows * 1024)
    joint = values.clamp(max=0.0).nan_to_num(-0.5).view(rows, 1024)
    pool, params = level_pool(joint, 3), buffer_of(shape, device)
    scores = torch.full((rows, 1030), math.nan, device=device)
    with poisoned():
        there = pool.each(lambda one: one.to(device))
        found = prune_level(params, there, scores, None, start=1, depth=1, width=5)
        submitted = select_nodes(scores[:, :1025], 1024, min_score=params.min_score)
    assert bool(scores[:, 1025:].isnan().all())
    assert not bool(found.faulty.any())
    reach = torch.cat([torch.ones(rows, 1, dtype=torch.bool), joint >= rule.min_score], 1)
    assert 0.2 < float(reach.float().mean()) < 0.8
    chosen = torch.zeros(rows, 1026, dtype=torch.bool)
    chosen.scatter_(1, submitted.cpu().where(submitted.cpu() >= 0, 1025), value=True)
    assert torch.equal(chosen[:, :1025], reach)


@pytest.mark.parametrize("hidden", [2, 17, 64])
def test_networks(hidden: int, device: torch.device, *, is_quick: bool) -> None:
    """Scores of nodes: the reference's, to a last bit; decisions: the torch rule's."""
    rows, size = (98, 1024) if is_quick else (2, 200)
    network = random_network(hidden, hidden)
    names = ("joint_prob", "draft_logp", "parent_topk_entropy", "sibling_rank", "joint_logp")
    draw = np.random.default_rng(hidden)
    network = network.model_copy(
        update={
            "features": names,
            "mean": (0.5, -1.0, 1.0, 3.0, -2.0),
            "scale": (0.3, 1.0, 0.8, 2.0, 1.5),
            "w1": tuple(map(tuple, draw.normal(size=(hidden, 5)).tolist())),
            "w2": tuple((draw.normal(size=hidden) / math.sqrt(hidden)).tolist()),
        }
    )
    shape = ScoredTree(scorer=network, beta=0.6, depth=3, first_top_k=4, second_top_k=4)
    logp = edge_rows(torch.tensor([-1.0, -2.0]), hidden, rows * size).clamp(max=0).nan_to_num(-0.5)
    # Far below any log-probability the float32 rule itself overflows to inf - inf.
    logp = logp.where(logp == -math.inf, logp.clamp(min=-1e4))
    pool = level_pool(logp.view(rows, size), hidden)
    rule = build_shape(shape)
    assert isinstance(rule, PrunedShape)
    options = {"start": 1, "depth": 1, "width": 4}
    exact, found = (torch.full((rows, size + 1), math.nan) for _ in range(2))
    with forced("reference"):
        wanted = prune_level(buffer_of(shape, CPU), pool, exact, None, **options)
    found, params = found.to(device), buffer_of(shape, device)
    with poisoned():
        best = prune_level(params, pool.each(lambda one: one.to(device)), found, None, **options)
    assert_close(found, exact)
    assert_close(best.score, wanted.score)
    assert torch.equal(best.faulty.cpu(), wanted.faulty)
    sure = (wanted.score - rule.min_score).abs() > 1e-6
    assert torch.equal(best.keep.cpu()[sure], wanted.keep[sure])
    told = log_prob(network, CPU)(pool, 1)
    plain = pool.joint_logp[:, 1:] > -50  # beyond, float32 cancels huge terms
    torch.testing.assert_close(told[plain], exact[:, 1:][plain], rtol=1e-4, atol=1e-6)
    reaches = exact[:, 1:] >= rule.min_score
    assert 0.01 < float(reaches.float().mean()) < 0.99
    assert int((reaches != (told >= rule.min_score)).sum()) == 0
    _check_network_edges(shape, pool, exact, device)


def _check_network_edges(
    shape: ScoredTree, pool: DraftPool, exact: Tensor, device: torch.device
) -> None:
    """A bar at a score, and at its neighbours: the node itself passes, the next does not."""
    scores = torch.full_like(exact, math.nan).to(device)
    table = table_of(shape)
    assert table is not None
    row = pool.each(lambda column: column[:1])
    own = torch.full((1, exact.shape[1]), math.nan, device=device)
    there = row.each(lambda one: one.to(device))
    prune_level(buffer_of(shape, device), there, own, None, start=1, depth=1, width=8)
    best = float(own[0, 1:][own[0, 1:] < 0].max())
    up = float(torch.nextafter(torch.tensor(best), torch.tensor(0.0)))
    down = float(torch.nextafter(torch.tensor(best), torch.tensor(-math.inf)))
    for bar, passes in ((best, True), (up, False), (down, True)):
        params = pack(type(table)(**{**vars(table), "min_score": bar})).to(device)
        found = prune_level(params, there, scores[:1], None, start=1, depth=1, width=8)
        at = found.score.cpu() == best
        assert bool(at.any())
        assert bool(found.keep.cpu()[at].all()) == passes


def test_the_surest_nodes_keep_their_order(device: torch.device) -> None:
    """Log-odds of 15 to 100: all of probability 1.0 in float32, and still in order."""
    network = FfnScorer(
        features=("joint_logp",),
        mean=(0.0,),
        scale=(1.0,),
        w1=((-1.0,), (0.0,)),
        b1=(0.0, 0.0),
        w2=(1.0, 0.0),
        b2=(0.0,),
    )
    shape = ScoredTree(scorer=network, beta=0.5, depth=2)
    pool = level_pool(-torch.linspace(15, 100, 300)[None], 0)
    scores = torch.zeros(1, 301, device=device)
    there = pool.each(lambda one: one.to(device))
    options = {"start": 1, "depth": 1, "width": 4}
    found = prune_level(buffer_of(shape, device), there, scores, None, **options)
    wanted = -torch.log1p(torch.exp(pool.joint_logp[:, 1:].double())).float()
    assert_close(scores[:, 1:], wanted)
    assert found.index.tolist() == [[300, 299, 298, 297]]


def test_nan_is_reported(device: torch.device) -> None:
    """NaN ranks first, is never kept, and is reported."""
    pool = level_pool(torch.tensor([[-1.0, math.nan, -0.5, -math.inf]] * 2), 1)
    pool.joint_logp[1, 2] = -2.0
    scores = torch.zeros(2, 5, device=device)
    params = buffer_of(JointThreshold(min_prob=0.3), device)
    found = prune_level(
        params, pool.each(lambda one: one.to(device)), scores, None, start=1, depth=1, width=3
    )
    assert found.index.tolist() == [[2, 3, 1], [3, 1, 2]]
    assert found.keep.tolist() == [[False, True, True], [True, True, False]]
    assert found.faulty.tolist() == [True, False]


def test_columns_are_named_as_the_registry_names_them() -> None:
    assert set(COLUMNS) <= NODE_FEATURES.keys()
    assert all(NODE_FEATURES[name].reads_text for name in NODE_FEATURES.keys() - set(COLUMNS))


# --------------------------------------------------------------------------- the buffer


def hetero(edges: tuple[float, ...], **changes: object) -> EntropyBins:
    base = StaticTree(depth=3, top_k=4, num_tokens=20)
    return EntropyBins(base=base, edges=edges, gammas=(0.5, 1.0), **changes)  # type: ignore[arg-type]


def test_a_buffer_written_in_place_decides_by_the_new_policy(device: torch.device) -> None:
    pool = phi_pool(torch.tensor([0.2, 1.5, 9.0])).each(lambda one: one.to(device))
    buffer = buffer_of(hetero((1.0,)), device)
    assert choose_bins(buffer, pool).bins.tolist() == [0, 1, 1]
    buffer.write(buffer_of(hetero((0.1, 2.0, 3.0)), CPU))
    assert choose_bins(buffer, pool).bins.tolist() == [1, 1, 3]
