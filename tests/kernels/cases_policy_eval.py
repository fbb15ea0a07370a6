"""Decisions on the device against the torch rules, row by row."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.kernels.dispatch import forced
from specctl.kernels.policy_eval import (
    PolicyBuffer,
    bin_rows,
    close_gates,
    prune_level,
)
from specctl.kernels.policy_eval.layout import pack
from specctl.kernels.policy_eval.results import new_gate_state
from specctl.kernels.tree_build import (
    Best,
    Pool,
    select_nodes,
)
from specctl.policy import build_shape
from specctl.policy.gates import SparseGatesShape, gate_closes, stop_levels
from specctl.policy.hetero import EntropyBinsShape, entropy_bin
from specctl.policy.pruning import PrunedShape
from specctl.policy.records import (
    EntropyBins,
    FfnScorer,
    JointThreshold,
    ScoredTree,
    Shape,
    SparseGates,
    StaticTree,
)
from specctl.policy.scored import log_prob
from specctl.runtime.policy_buffer import table_of
from specctl.tree import TokenTree
from tests.kernels.cases_tree_build import Growth, assert_same, empty_pool, moved
from tests.kernels.poison import poisoned
from tests.policy.scorers import random_network

NUM_ROWS = 100_000
BASE = StaticTree(depth=2, top_k=4, num_tokens=12)


def buffer_of(shape: Shape, device: torch.device) -> PolicyBuffer:
    table = table_of(shape)
    assert table is not None
    return pack(table).to(device)


def edge_rows(bars: Tensor, seed: int, num_rows: int = NUM_ROWS) -> Tensor:
    """Every bar, its float32 neighbours, the odd ones of float32, and random values around."""
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan])
    edges = torch.cat([bars, torch.nextafter(bars, up), torch.nextafter(bars, down), odd])
    draw = torch.Generator().manual_seed(seed)
    spread = float(bars.std(correction=0)) + 0.5
    rest = bars.mean() + 2 * spread * torch.randn(num_rows - len(edges), generator=draw)
    return torch.cat([edges, rest])[torch.randperm(num_rows, generator=draw)]


# --------------------------------------------------------------------------- rows


def check_bins(num_edges: int, device: torch.device, num_rows: int = NUM_ROWS) -> None:
    """The bin, depth and size of values of Φ, against the rule's."""
    draw = np.random.default_rng(num_edges)
    edges = np.unique(draw.normal(8, 3, num_edges).astype(np.float32))
    shape = EntropyBins(base=BASE, edges=tuple(map(float, edges)), gammas=(0.5, 1.0))
    rule = build_shape(shape)
    assert isinstance(rule, EntropyBinsShape)
    value = edge_rows(torch.from_numpy(edges), num_edges, num_rows)
    with poisoned():
        found = bin_rows(buffer_of(shape, device), value.to(device))
    bins = entropy_bin(value, rule.edges)
    assert len(bins.unique()) == len(edges) + 1
    assert torch.equal(found.bins.cpu(), bins)
    assert torch.equal(found.max_depth.cpu(), rule.bin_depths[bins])
    assert torch.equal(found.num_tokens.cpu(), rule.bin_tokens[bins])
    assert torch.equal(found.value.cpu().nan_to_num(), value.nan_to_num())


def check_gates(device: torch.device) -> None:
    """Two gates on 100,000 rows, the levels between them without one."""
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
    # The rule's own telling of a whole log, where every level holds something.
    told = stop_levels(shape, torch.stack([first, last], 1))
    whole = exists.all(1)
    assert torch.equal(torch.where(deepest < 4, deepest, 0)[whole], told[whole])
    assert len(told.unique()) == 3


def level_pool(joint_logp: Tensor, seed: int) -> Pool:
    """Pools of a root and one level with these path log-probabilities."""
    rows, size = joint_logp.shape
    pool = empty_pool(Growth(rows, 1, 1, size), torch.device("cpu"))
    draw = torch.Generator().manual_seed(seed)
    pool.parent[:, 1:], pool.depth[:, 1:] = 0, 1
    pool.joint_logp[:, 1:], pool.draft_logp[:, 1:] = joint_logp, joint_logp
    for column in (pool.entropy, pool.topk_entropy, pool.path_entropy):
        column[:, 1:] = 4 * torch.rand(rows, size, generator=draw) ** 2
    pool.sibling_rank[:, 1:] = torch.randint(16, (rows, size), generator=draw)
    return pool


def check_threshold(device: torch.device, rows: int = 98) -> None:
    """Which of 1,024 nodes a row reach a threshold of the path's probability."""
    shape = JointThreshold(depth=3, top_k=4, min_prob=0.05, num_tokens=64)
    rule = build_shape(shape)
    assert isinstance(rule, PrunedShape)
    values = edge_rows(torch.tensor([rule.min_score]), 5, rows * 1024)
    joint = values.clamp(max=0.0).nan_to_num(-0.5).view(rows, 1024)
    pool, params = level_pool(joint, 3), buffer_of(shape, device)
    scores = torch.full((rows, 1030), math.nan, device=device)
    with poisoned():
        there = Pool(*moved(pool, device))
        found = prune_level(params, there, scores, None, start=1, depth=1, width=5)
        submitted = select_nodes(scores[:, :1025], 1024, min_score=params.min_score)
    assert bool(scores[:, 1025:].isnan().all())
    assert not bool(found.faulty.any())
    reach = torch.cat([torch.ones(rows, 1, dtype=torch.bool), joint >= rule.min_score], 1)
    assert 0.2 < float(reach.float().mean()) < 0.8
    chosen = torch.zeros(rows, 1026, dtype=torch.bool)
    chosen.scatter_(1, submitted.cpu().where(submitted.cpu() >= 0, 1025), value=True)
    assert torch.equal(chosen[:, :1025], reach)


def check_network(hidden: int, device: torch.device, rows: int = 98, size: int = 1024) -> None:
    """Scores of nodes: the reference's bits; decisions: the torch rule's."""
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
    options = {"start": 1, "depth": 1, "width": 4}
    exact, found = (torch.full((rows, size + 1), math.nan) for _ in range(2))
    with forced("reference"):
        wanted = prune_level(buffer_of(shape, torch.device("cpu")), pool, exact, None, **options)
    found, params = found.to(device), buffer_of(shape, device)
    with poisoned():
        best = prune_level(params, Pool(*moved(pool, device)), found, None, **options)
    assert torch.equal(found.cpu(), exact)
    assert_same(best, wanted, f"{hidden} hidden units")
    rule = build_shape(shape)
    assert isinstance(rule, PrunedShape)
    told = log_prob(network, torch.device("cpu"))(draft_pool(pool), 1)
    plain = pool.joint_logp[:, 1:] > -50  # beyond, float32 cancels huge terms
    torch.testing.assert_close(told[plain], exact[:, 1:][plain], rtol=1e-4, atol=1e-6)
    reaches = exact[:, 1:] >= rule.min_score
    assert 0.01 < float(reaches.float().mean()) < 0.99
    assert int((reaches != (told >= rule.min_score)).sum()) == 0
    _check_network_edges(shape, pool, exact, device)


def _check_network_edges(
    shape: ScoredTree, pool: Pool, exact: Tensor, device: torch.device
) -> None:
    """A bar at a score, and at its neighbours: the node itself passes, the next does not."""
    scores = torch.full_like(exact, math.nan).to(device)
    table = table_of(shape)
    assert table is not None
    row = Pool(*(column[:1] for column in pool))
    best = float(exact[0, 1:][exact[0, 1:] < 0].max())
    up = float(torch.nextafter(torch.tensor(best), torch.tensor(0.0)))
    down = float(torch.nextafter(torch.tensor(best), torch.tensor(-math.inf)))
    for bar, passes in ((best, True), (up, False), (down, True)):
        params = pack(type(table)(**{**vars(table), "min_score": bar})).to(device)
        place = Pool(*moved(row, device))
        found = prune_level(params, place, scores[:1], None, start=1, depth=1, width=8)
        at = found.score.cpu() == best
        assert bool(at.any())
        assert bool(found.keep.cpu()[at].all()) == passes


def check_surest(device: torch.device) -> None:
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
    there = Pool(*moved(pool, device))
    options = {"start": 1, "depth": 1, "width": 4}
    found = prune_level(buffer_of(shape, device), there, scores, None, **options)
    wanted = -torch.log1p(torch.exp(pool.joint_logp[:, 1:].double())).float()
    assert torch.equal(scores[:, 1:].cpu(), wanted)
    assert found.index.tolist() == [[300, 299, 298, 297]]


def draft_pool(pool: Pool) -> DraftPool:
    """The same columns as features and rules read them."""
    tree = TokenTree(pool.token_ids, pool.parent, pool.depth, pool.draft_logp)
    return DraftPool(
        tree,
        *(pool.joint_logp, pool.entropy, pool.topk_entropy, pool.sibling_rank, pool.expanded),
    )


def check_faults(device: torch.device) -> None:
    """NaN ranks first, is never kept, and is told."""
    pool = level_pool(torch.tensor([[-1.0, math.nan, -0.5, -math.inf]] * 2), 1)
    pool.joint_logp[1, 2] = -2.0
    scores = torch.zeros(2, 5, device=device)
    params = buffer_of(JointThreshold(min_prob=0.3), device)
    found = prune_level(params, Pool(*moved(pool, device)), scores, None, start=1, depth=1, width=3)
    assert found.index.tolist() == [[2, 3, 1], [3, 1, 2]]
    assert found.keep.tolist() == [[False, True, True], [True, True, False]]
    assert found.faulty.tolist() == [True, False]
