"""Rounds for `fit cart` from dense traces: what live rounds of the base tree would say."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from specctl.errors import UsageError
from specctl.logs.trace_set import TraceSet
from specctl.policy import StaticTree
from specctl.replay.fit_inputs import rounds_to_fit
from specctl.train.cart import COLUMNS, fit_cart
from specctl.train.configs import CartConfig
from tests.replay.logs import PlainTree, plain_trees, random_traces, static_tree

BASE = "eagle2:depth=3:top_k=3:num_tokens=8"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    return random_traces(folder, num_prompts=4, depth=5, top_k=3)


def label(tree: PlainTree) -> tuple[int, int | None, bool]:
    """Accepted length, rank of its end and whether both are known, node by node."""
    nodes = static_tree(tree, 3, 3, 8)
    path = [node for node in nodes[1:] if tree.on_path[node]]
    whole = len(path) < tree.remaining or len(path) == 3
    return len(path), nodes.index(path[-1]) if path else None, whole


def test_labels_equal_the_plain_telling(traces: TraceSet) -> None:
    found = rounds_to_fit(traces, BASE, num_threads=2)
    told = [label(tree) for request in plain_trees(traces) for tree in request]
    rounds = found.rounds.collect()
    assert found.num_left_out == sum(not whole for *_, whole in told) > 0
    assert rounds["num_accepted"].to_list() == [a for a, _, whole in told if whole]
    assert rounds["tcr"].to_list() == [rank for _, rank, whole in told if whole]
    assert (rounds["fully_accepted"] == (rounds["num_accepted"] == 3)).all()
    assert rounds["prompt_id"].n_unique() == 4
    assert set(COLUMNS) <= set(rounds.columns)


def test_a_fit_on_them_gives_bins_of_the_base(traces: TraceSet) -> None:
    found = rounds_to_fit(traces, BASE)
    base = StaticTree(depth=3, top_k=3, num_tokens=8)
    config = CartConfig(base=base, filter="all", held_out_frac=0.25, max_leaf_depth=2)
    fitted = fit_cart(found.rounds, config)
    assert fitted.policy.shape.base == base
    assert fitted.data.prompts == {"train": 3, "held_out": 1}


def test_phi_is_the_meta_path_entropy_of_the_base_alone(traces: TraceSet) -> None:
    """Equal entropies at every node of a path would hide depth: compare two bases."""
    shallow = rounds_to_fit(traces, "eagle2:depth=2:top_k=3:num_tokens=8").rounds.collect()
    deep = rounds_to_fit(traces, BASE).rounds.collect()
    assert shallow["phi"].mean() < deep["phi"].mean()
    assert shallow["phi_depth"].unique().to_list() == [2]


def test_only_a_static_tree_can_be_the_base(traces: TraceSet) -> None:
    with pytest.raises(UsageError, match="static tree"):
        rounds_to_fit(traces, "chain")


def test_live_traces_keep_their_own_tree(tmp_path: Path) -> None:
    from specctl.collect.trace_writer import TraceWriter, make_header
    from specctl.policy import Policy
    from specctl.runtime.requests import Sampling

    digests = {f"{n}_digest": "sha256:" + 64 * "0" for n in ("target", "drafter", "tokenizer")}
    header = make_header(Policy(shape=StaticTree()), Sampling(), collect={}, **digests)
    TraceWriter.open(tmp_path / "live", header).close()
    live = TraceSet.open(tmp_path / "live")
    assert isinstance(rounds_to_fit(live, None).rounds, pl.LazyFrame)
    with pytest.raises(UsageError, match="--base"):
        rounds_to_fit(live, BASE)
