"""The torch `policy_eval` against the rules, and the parameter buffer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specctl.errors import UsageError
from specctl.features import NODE_FEATURES
from specctl.kernels.policy_eval import bin_rows, choose_bins, prune_level
from specctl.kernels.policy_eval.layout import (
    COLUMNS,
    BinTable,
    GateTable,
    Network,
    PruneTable,
    layout_of,
    pack,
)
from specctl.policy.records import (
    EntropyBins,
    JointThreshold,
    ScoredTree,
    Shape,
    SparseGates,
    StaticTree,
)
from specctl.runtime.policy_buffer import recapture_reason, table_of
from tests.kernels.cases_policy_eval import (
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
from tests.policy.scorers import SCORED, random_network

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_edges", [1, 5, 255])
def test_bins(num_edges: int) -> None:
    check_bins(num_edges, CPU)


def test_gates() -> None:
    check_gates(CPU)


def test_thresholds() -> None:
    check_threshold(CPU)


@pytest.mark.parametrize("hidden", [2, 16, 48, 64])
def test_networks(hidden: int) -> None:
    check_network(hidden, CPU)


@pytest.mark.parametrize("name", SHAPES)
def test_a_round_as_the_rule_decides_it(name: str) -> None:
    rounds = [check_round(name, CPU, rows=12, seed=seed) for seed in range(4)]
    sizes = {len(row) for found in rounds for row in found.submitted}
    assert len(sizes) > 1 or name == "eagle2"


def test_phi_where_rows_end_early() -> None:
    check_phi(CPU)


def test_the_surest_nodes_keep_their_order() -> None:
    check_surest(CPU)


def test_nan_is_told() -> None:
    check_faults(CPU)


def test_trees_are_scored_outside() -> None:
    """Boosted trees have no kernel: their scores come as a column."""
    shape = SCORED["c2t chain"]
    table = table_of(shape)
    assert isinstance(table, PruneTable)
    assert table.own == "given"
    pool, scores = level_pool(torch.tensor([[-1.0, -0.5, -math.inf]]), 0), torch.zeros(1, 4)
    own = torch.tensor([[[-0.2], [-3.0], [-0.1]]])
    found = prune_level(pack(table), pool, scores, None, start=1, depth=1, width=2, extra=own)
    assert scores.tolist() == [[math.inf, *own[0, :2, 0].tolist(), -math.inf]]
    assert found.index.tolist() == [[1, 2]]
    assert found.keep.tolist() == [[True, False]]


def test_columns_of_text_come_from_outside() -> None:
    """Their order among the features does not matter."""
    names = ("suffix_support", "joint_logp", "suffix_length")
    scorer = random_network(3, 5).model_copy(update={"features": names})
    table = table_of(ScoredTree(scorer=scorer, beta=0.5, depth=2))
    assert table is not None
    assert layout_of(table).extra == ("suffix_support", "suffix_length")
    pool = level_pool(torch.tensor([[-1.0, -0.5]]), 0)
    extra = torch.tensor([[[0.5, 3.0], [0.1, 0.0]]])
    scores = torch.zeros(1, 3)
    prune_level(pack(table), pool, scores, None, start=1, depth=1, width=1, extra=extra)
    x = torch.tensor([[0.5, -1.0, 3.0], [0.1, -0.5, 0.0]], dtype=torch.float64)
    x = (x - torch.tensor(scorer.mean)) / torch.tensor(scorer.scale, dtype=torch.float64)
    hidden = (x @ torch.tensor(scorer.w1).double().T + torch.tensor(scorer.b1)).relu()
    odds = hidden @ torch.tensor(scorer.w2).double() + scorer.b2[0]
    torch.testing.assert_close(scores[0, 1:].double(), odds.sigmoid().log(), rtol=1e-5, atol=0)


def test_columns_are_named_as_the_registry_names_them() -> None:
    assert set(COLUMNS) <= NODE_FEATURES.keys()
    assert all(NODE_FEATURES[name].reads_text for name in NODE_FEATURES.keys() - set(COLUMNS))


# --------------------------------------------------------------------------- the buffer


def hetero(edges: tuple[float, ...], **changes: object) -> EntropyBins:
    base = StaticTree(depth=3, top_k=4, num_tokens=20)
    return EntropyBins(base=base, edges=edges, gammas=(0.5, 1.0), **changes)  # type: ignore[arg-type]


def c2t(seed: int, hidden: int, **changes: object) -> ScoredTree:
    given = {"scorer": random_network(seed, hidden), "beta": 0.5, "depth": 3, **changes}
    return ScoredTree(**given)  # type: ignore[arg-type]


def gates(*thresholds: float, **changes: object) -> SparseGates:
    levels = tuple(range(2, 2 + len(thresholds)))
    return SparseGates(gate_levels=levels, thresholds=thresholds, **changes)  # type: ignore[arg-type]


def bar(min_prob: float) -> JointThreshold:
    return JointThreshold(min_prob=min_prob, num_tokens=40)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (hetero((1.0, 2.0)), hetero((0.5, 2.5)), None),
        (hetero((1.0,)), hetero((1.0, 2.0, 3.0, 4.0)), None),
        (hetero((1.0,)), hetero((1.0,), alpha=0), None),
        (hetero((1.0,), alpha=0), hetero((1.0,)), "max_depth changes from 3 to 5"),
        (c2t(1, 8, num_tokens=20), c2t(2, 64, beta=0.9, num_tokens=20, keep_leaves=False), None),
        (c2t(1, 8), c2t(1, 8, second_top_k=3), "width changes"),
        (c2t(1, 8), SCORED["c2t chain"], "layout changes"),
        (gates(0.5), gates(0.1, 0.2), None),
        (gates(0.5), gates(0.5, width=2), "width changes"),
        (gates(0.5), hetero((1.0,)), "kind changes from echo to hetero"),
        (bar(0.1), bar(0.2), None),
        (StaticTree(), StaticTree(), None),
        (StaticTree(), StaticTree(num_tokens=30), "has no parameter buffer"),
    ],
)  # fmt: skip
def test_what_fits_the_same_buffer(old: Shape, new: Shape, why: str | None) -> None:
    found = recapture_reason(old, new)
    assert found == why if why is None else found is not None and why in found
    if why is None and old != new:
        buffer = buffer_of(old, CPU)
        there = buffer.storage.data_ptr()
        buffer.write(buffer_of(new, CPU))
        assert buffer.storage.data_ptr() == there
        assert torch.equal(buffer.header, buffer_of(new, CPU).header)


def test_a_buffer_written_in_place_decides_by_the_new_policy() -> None:
    value = torch.tensor([0.2, 1.5, 9.0])
    buffer = buffer_of(hetero((1.0,)), CPU)
    assert bin_rows(buffer, value).bins.tolist() == [0, 1, 1]
    buffer.write(buffer_of(hetero((0.1, 2.0, 3.0)), CPU))
    assert bin_rows(buffer, value).bins.tolist() == [1, 1, 3]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (BinTable([1.0, 1.0], [1, 2, 3], [4, 5, 6], 1), "edges: expected ascending"),
        (BinTable([0.1], [1, 2], [4, 5], 1), "edges: expected float32 numbers"),
        (BinTable([1.0], [1], [4, 5], 1), "2 depths and tokens, found"),
        (BinTable(list(range(256)), [1] * 257, [4] * 257, 1), "1 to 255, found 256"),
        (GateTable({65: -1.0}, 8), "levels of 1 to 64"),
        (PruneTable(-1.0, "network"), "a network iff it scores"),
    ],
)
def test_what_does_not_fit_is_refused(
    table: BinTable | GateTable | PruneTable, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pack(table)


@pytest.mark.parametrize(
    ("features", "hidden", "message"),
    [(17, 4, "features: expected 1 to 16, found 17"), (3, 65, "hidden units: expected 1 to 64")],
)
def test_networks_beyond_room_are_refused(features: int, hidden: int, message: str) -> None:
    columns = (COLUMNS * 3)[:features]
    w1, row = np.zeros((features, hidden)), np.zeros(hidden)
    with pytest.raises(UsageError, match=message):
        pack(PruneTable(-1.0, "network", network=Network(columns, w1, row, row, 0.0)))


def test_calls_that_do_not_fit_are_refused() -> None:
    bins, network = buffer_of(hetero((1.0,)), CPU), buffer_of(c2t(1, 4), CPU)
    pool, scores = level_pool(torch.zeros(2, 4), 0), torch.zeros(2, 5)
    with pytest.raises(UsageError, match="expected bins, found pruned"):
        bin_rows(network, torch.zeros(3))
    with pytest.raises(UsageError, match="value: expected float32 of any"):
        bin_rows(bins, torch.zeros(3).double())
    with pytest.raises(UsageError, match="expected bins"):
        choose_bins(network, pool)
    with pytest.raises(UsageError, match="expected a policy of its layout"):
        network.write(bins)
    options = {"depth": 1, "width": 2}
    with pytest.raises(UsageError, match="4 nodes"):
        prune_level(network, pool, scores, torch.zeros(2, 3), start=1, **options)
    with pytest.raises(UsageError, match="slots: expected at most 4, found 5"):
        prune_level(network, pool, scores[:, :4], None, start=1, **options)
    trees = pack(PruneTable(-1.0, "given"))
    with pytest.raises(UsageError, match="extra: expected 1 columns"):
        prune_level(trees, pool, scores, None, start=1, **options)
