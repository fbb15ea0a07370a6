"""What fits read of a log, against plain Python: labels, gates, tested tokens, costs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from specctl.errors import UsageError
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, Support
from specctl.policy import (
    Policy,
    SparseGates,
    StaticTree,
)
from specctl.progress import progress
from specctl.replay.rounds import replay
from specctl.train.cart import ROUND_COLUMNS, default_base, rounds_to_fit
from specctl.train.configs import CartConfig
from specctl.train.echo import Replays, gate_rows
from specctl.train.positions import PositionRows
from tests.replay.logs import PlainTree, log_fixtures, plain_trees, static_tree
from tests.replay.reports import live_traces

CONFIG = CartConfig()
DEPTH, NUM_PROMPTS = 4, 8
BASE = "eagle2:3x3/8"
SHAPE = SparseGates(depth=4, width=2, max_width=3, gate_levels=(1,), thresholds=(0.9,))

traces, log = log_fixtures(num_prompts=NUM_PROMPTS, depth=DEPTH, top_k=3)


def label(tree: PlainTree) -> tuple[int, int | None, bool]:
    """Accepted length, rank of its end and whether both are known, node by node."""
    nodes = static_tree(tree, 3, 3, 8)
    path = [node for node in nodes[1:] if tree.on_path[node]]
    whole = len(path) < tree.remaining or len(path) == 3
    return len(path), nodes.index(path[-1]) if path else None, whole


def test_labels_equal_the_plain_telling(traces: TraceSet, caplog: pytest.LogCaptureFixture) -> None:
    told = [label(tree) for request in plain_trees(traces) for tree in request]
    rounds, _ = rounds_to_fit(traces, BASE, CONFIG)
    left_out = sum(not whole for *_, whole in told)
    assert [one.message for one in caplog.records] == [
        f"{left_out} positions near the end of a text or of a logged tree cannot be judged"
    ]
    assert rounds["num_accepted"].to_list() == [a for a, _, whole in told if whole]
    assert rounds["tcr"].to_list() == [rank for _, rank, whole in told if whole]
    assert (rounds["fully_accepted"] == (rounds["num_accepted"] == 3)).all()
    assert rounds["prompt_id"].n_unique() == NUM_PROMPTS
    assert set(ROUND_COLUMNS) <= set(rounds.columns)


def test_a_bound_takes_whole_prompts(traces: TraceSet) -> None:
    whole, _ = rounds_to_fit(traces, BASE, CONFIG)
    half = CONFIG.model_copy(update={"max_positions": len(whole) // 2})
    found, _ = rounds_to_fit(traces, BASE, half)
    names = found["prompt_id"].unique()
    assert 2 <= len(names) < NUM_PROMPTS
    assert found.equals(whole.filter(pl.col("prompt_id").is_in(names.implode())))


def test_phi_is_the_meta_path_entropy_of_the_base_alone(traces: TraceSet) -> None:
    """Equal entropies at every node of a path would hide depth: compare two bases."""
    shallow, _ = rounds_to_fit(traces, "eagle2:2x3/8", CONFIG)
    deep, _ = rounds_to_fit(traces, BASE, CONFIG)
    assert shallow["phi"].mean() < deep["phi"].mean()
    assert shallow["phi_depth"].unique().to_list() == [2]


def test_the_base_is_a_static_tree_and_live_traces_keep_their_own(
    traces: TraceSet, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="static tree"):
        rounds_to_fit(traces, "chain", CONFIG)
    live = live_traces(tmp_path / "live")
    found, _ = rounds_to_fit(live, None, CONFIG)
    assert found.equals(live.scan("rounds").select(ROUND_COLUMNS).collect())
    assert found.height > 0
    with pytest.raises(UsageError, match="--base"):
        rounds_to_fit(live, BASE, CONFIG)


@pytest.mark.parametrize(
    ("held", "alpha", "base"),
    [
        ((11, 10), None, (6, 8)),
        ((9, 9), None, (6, 8)),
        ((7, 9), None, (4, 8)),
        ((4, 3), None, (2, 3)),
        ((4, 3), 1, (3, 3)),
        ((4, 3), 0, (4, 3)),
        ((1, 3), None, (1, 3)),
    ],
)
def test_without_a_base_it_is_the_largest_whose_extension_the_traces_hold(
    held: tuple[int, int], alpha: int | None, base: tuple[int, int]
) -> None:
    config = CONFIG.model_copy(update={"alpha": alpha})
    depth, top_k = held
    assert default_base(config, Support(top_k, top_k, depth, nested=True)) == base


@pytest.fixture(scope="module")
def found(log: DenseLog) -> PositionRows:
    return gate_rows(log, SHAPE)


def told_plainly(tree: PlainTree) -> tuple[int, list[float]]:
    """Accepted tokens and the confidence of each level of the tree without gates."""
    frontier, kept, best = [0], set(), []
    for _ in range(SHAPE.depth):
        candidates = [c for node in frontier for c in tree.children[node][: SHAPE.max_width]]
        best.append(max(float(tree.joint[c]) for c in candidates))
        frontier = sorted(candidates, key=lambda c: (-tree.joint[c], c))[: SHAPE.width]
        kept |= set(frontier)
    return sum(tree.on_path[node] for node in kept), best


def test_rows_equal_the_plain_telling(traces: TraceSet, found: PositionRows) -> None:
    trees = [tree for request in plain_trees(traces) for tree in request]
    wanted = [(*told_plainly(tree), tree.remaining) for tree in trees]
    kept = [one for one in wanted if not one[2] <= one[0] < SHAPE.depth]
    assert found.num_left_out == len(wanted) - len(kept) > 0
    assert found.rows["accepted"].to_list() == [accepted for accepted, *_ in kept]
    levels = found.rows.select(pl.col("^level_.*$")).to_numpy()
    assert np.array_equal(levels, np.array([best for _, best, _ in kept], np.float32))
    assert len(set(found.rows["accepted"].to_list())) > 3, "too tame to tell"


def test_gates_of_the_shape_do_not_matter(log: DenseLog, found: PositionRows) -> None:
    other = SHAPE.model_copy(update={"gate_levels": (1, 3), "thresholds": (1.0, 1.0)})
    assert gate_rows(log, other).rows.equals(found.rows)


def test_replays_behind_a_pass_leave_its_bar(
    log: DenseLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit echo` reads all positions, then replays some: no more than all are counted."""
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count

    monkeypatch.setattr("specctl.progress._show_bar", lambda label, total: nullcontext(tick))
    policy = Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=4))
    some = replay(log, [policy])[0].positions.prompt_ids[:2]
    with progress("positions", log.num_positions):
        gate_rows(log, SHAPE)
        assert done == log.num_positions
        Replays(log).sums([policy], some)
    assert done == log.num_positions


def test_replayed_sums_are_of_the_named_prompts(log: DenseLog) -> None:
    policy = Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=8))
    [rounds] = replay(log, [policy])
    chosen = rounds.positions.prompt_ids[1:4]
    rows = np.isin(rounds.positions.row_prompts[rounds.visited], chosen)
    [found] = Replays(log).sums([policy], chosen)
    assert set(found.rows) == set(chosen)
    sums = found.totals
    accepted, verified = rounds.outcomes.accepted[rows], rounds.outcomes.verified[rows]
    assert (sums["calls"], sums["tokens"]) == (rows.sum(), rounds.emitted[rows].sum())
    assert (sums["accepted"], sums["verified"]) == (accepted.sum(), verified.sum())
    assert sums["utilisation"] == pytest.approx((accepted / 3).sum())
    assert np.isnan(sums["time_us"])
    [timed] = Replays(log, lambda run: 2.0 + 0.0 * run.request).sums([policy], chosen)
    assert timed.totals["time_us"] == 2.0 * rows.sum()
