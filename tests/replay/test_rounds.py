"""Replay against a telling in plain Python, node by node; summaries against replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specctl.errors import TraceError, UsageError
from specctl.logs import tree_log
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, SegmentFiles
from specctl.policy import (
    Chain,
    FullTree,
    Mars,
    Policy,
    RootOnly,
    ScoredTree,
    SignalStop,
    StaticTree,
)
from specctl.replay.outcomes import is_ranked, needs_entropy
from specctl.replay.rounds import Rounds, replay
from specctl.replay.run import refuse_in_vain
from specctl.replay.summary import static_accepted, static_verified, summarise
from specctl.replay.walk import walk
from tests.policy.scorers import SCORED, random_network, steps
from tests.replay.logs import log_fixtures, plain_trees, plain_walk, random_log, static_tree
from tests.replay.reports import live_traces

traces, log = log_fixtures(num_prompts=2, depth=5, top_k=4)


def told(rounds: Rounds) -> list[tuple[int, int, int]]:
    o = rounds.outcomes
    return list(zip(o.accepted.tolist(), o.verified.tolist(), o.tcr.tolist(), strict=True))


SHAPES = [(1, 1, 2), (3, 1, 4), (5, 1, 6), (2, 2, 4), (4, 3, 9), (5, 4, 6), (5, 4, 21), (5, 4, 999)]


@pytest.mark.parametrize(("depth", "top_k", "num_tokens"), SHAPES)
def test_static_shapes_equal_the_plain_telling(
    traces: TraceSet, log: DenseLog, depth: int, top_k: int, num_tokens: int
) -> None:
    shape = StaticTree(depth=depth, top_k=top_k, num_tokens=num_tokens)
    shapes = [shape, Chain(num_draft_tokens=depth)] if top_k == 1 else [shape]
    wanted = [
        step
        for trees in plain_trees(traces)
        for step in plain_walk(trees, lambda t: static_tree(t, depth, top_k, num_tokens))
    ]
    for kind in shapes:
        [found] = replay(log, [Policy(shape=kind)])
        assert told(found) == wanted
        assert not found.outcomes.missing.any()
        assert (found.bounds.calls_low == found.bounds.calls_high).all()


def test_the_text_is_emitted_exactly_once(log: DenseLog) -> None:
    tree = StaticTree(depth=4, top_k=3, num_tokens=9)
    for found in replay(log, [Policy(shape=shape) for shape in (tree, Chain(), RootOnly())]):
        emitted = np.bincount(found.request, found.emitted)
        assert emitted.tolist() == found.positions.num_tokens.tolist() == [128, 128]
        assert found.is_last.sum() == found.positions.num_requests
    assert found.visited.all()  # by plain decoding
    assert (set(found.outcomes.verified), set(found.outcomes.levels)) == ({1}, {0})


def test_threads_and_chunks_change_nothing(log: DenseLog, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = [Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=9)), Policy(shape=Chain())]
    whole = replay(log, policies)
    monkeypatch.setattr(tree_log, "CHUNK_NODES", 1000)  # a chunk a request
    for one, two in zip(whole, replay(log, policies, num_threads=2), strict=True):
        assert told(one) == told(two)
        assert one.request.tolist() == two.request.tolist()


def test_what_the_log_lacks_is_counted_and_bounded(tmp_path: Path) -> None:
    """A shallow log of the same trees: the deep log tells what the bounds must contain."""
    deep = random_log(tmp_path / "deep", num_prompts=4, depth=5, top_k=4, seed=3)
    policy = Policy(shape=StaticTree(depth=5, top_k=4, num_tokens=12))
    wanted = replay(deep, [policy])[0]
    shallow = replace(deep, files=tuple(map(cut_at_level_3, deep.files)))
    [found] = replay(shallow, [policy])
    assert found.outcomes.missing.sum() > 0
    assert found.outcomes.censored.sum() > 0
    truth = np.bincount(wanted.request)
    assert (found.bounds.calls_low <= truth).all()
    assert (found.bounds.calls_high >= truth).all()
    verified = np.bincount(wanted.request, wanted.outcomes.verified)
    assert (found.bounds.verified_low <= verified).all()
    assert (found.bounds.verified_high >= verified).all()
    assert (found.bounds.calls_low < found.bounds.calls_high).any()


def cut_at_level_3(files: SegmentFiles) -> SegmentFiles:
    """The same commit without the nodes below level 3."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    nodes, rounds = pq.read_table(files["nodes"]), pq.read_table(files["rounds"])
    kept = nodes.filter(pc.less_equal(nodes["depth"], 3))
    sizes = np.diff(np.flatnonzero(np.append(kept["parent_idx"].to_numpy() < 0, True)))
    at = rounds.column_names.index("num_drafted")
    rounds = rounds.set_column(at, "num_drafted", [(sizes - 1).astype(np.int32)])
    cut = {table: path.with_name(f"cut-{path.name}") for table, path in files.items()}
    pq.write_table(kept, cut["nodes"])
    pq.write_table(rounds, cut["rounds"])
    return cut


def test_a_policy_wider_than_the_log_is_marked(log: DenseLog) -> None:
    [found] = replay(log, [Policy(shape=StaticTree(depth=3, top_k=6, num_tokens=12))])
    assert (found.outcomes.missing == found.outcomes.wanted).all()
    assert (found.bounds.calls_low == 128 / 4).all()  # rounds that accept three, or nothing
    assert (found.bounds.calls_high == 128).all()


NARROW = {
    "chain": Chain(num_draft_tokens=5),
    "stop": SignalStop(signal="confidence", threshold=0.2, window=5),
}


@pytest.mark.parametrize("name", NARROW)
def test_the_narrow_frontier_of_an_unnested_log_is_missed(tmp_path: Path, name: str) -> None:
    policy = Policy(shape=NARROW[name])
    [nested] = replay(random_log(tmp_path / "a", depth=5, top_k=3), [policy])
    [plain] = replay(random_log(tmp_path / "b", depth=5, top_k=3, nested=False), [policy])
    assert nested.outcomes.missing.sum() == 0
    assert plain.outcomes.missing.sum() > 0
    assert (plain.bounds.verified_low < plain.bounds.verified_high).any()
    # Nothing is lost above the missing node, so the bounds stay within a few rounds.
    assert (plain.bounds.calls_high - plain.bounds.calls_low <= 0.1 * 128).all()


def test_a_lossy_policy_is_refused(log: DenseLog) -> None:
    with pytest.raises(UsageError, match="lossless"):
        replay(log, [Policy(shape=Chain(), acceptance=Mars())])


def test_the_full_tree_submits_the_whole_log(traces: TraceSet, log: DenseLog) -> None:
    [found] = replay(log, [Policy(shape=FullTree(depth=5, top_k=4))])
    matched = np.concatenate([chunk.matched for chunk in log.chunks()])
    sizes = np.array([len(tree.parent) for trees in plain_trees(traces) for tree in trees])
    assert found.outcomes.verified.tolist() == sizes[found.visited].tolist()
    assert found.outcomes.accepted.tolist() == matched[found.visited].tolist()


def test_live_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--dense"):
        DenseLog.open(live_traces(tmp_path / "live"))


@pytest.fixture(scope="module")
def plain_log(tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    """Without the narrow frontiers of static trees."""
    return random_log(tmp_path_factory.mktemp("log") / "log", depth=3, top_k=3, nested=False)


def tree(beta: float, **changes: object) -> Policy:
    fields = {"scorer": random_network(8), "depth": 3, "first_top_k": 3, "second_top_k": 3}
    return Policy(shape=ScoredTree(**{**fields, "beta": beta, **changes}))  # type: ignore[arg-type]


def test_a_beta_that_keeps_nothing_is_refused(plain_log: DenseLog) -> None:
    keeps, does_not = replay(plain_log, [tree(0.1), tree(1.0)])
    assert keeps.outcomes.verified.max() > 4
    assert set(does_not.outcomes.verified.tolist()) == {1}
    refuse_in_vain([keeps])
    with pytest.raises(UsageError, match=r"beta 1: .* found no node in \d+ rounds"):
        refuse_in_vain([keeps, does_not])


def test_a_frontier_of_its_own_meets_what_the_log_lacks(plain_log: DenseLog) -> None:
    """The least likely child is scored best; the log expands the three likeliest of nine."""
    least = steps("draft_logp", [-1.5], [0.9, 0.2])
    [run] = replay(plain_log, [tree(0.01, scorer=least, predicts="conditional")])
    assert run.outcomes.missing.any()
    assert (run.bounds.calls_low < run.bounds.calls_high).any()


def test_bounds_are_close_for_chains_alone() -> None:
    assert [name for name, shape in SCORED.items() if is_ranked(shape)] == ["c2t chain"]
    assert all(needs_entropy(Policy(shape=shape)) for shape in SCORED.values())


CHAIN_LENGTHS = [(1, length, length + 1) for length in (1, 3, 5)]
TREE_SIZES = [(3, d, max(n, d + 1)) for d in (1, 2, 4, 5) for n in (2, 6, 17, 41)]


@pytest.mark.parametrize(("top_k", "depth", "num_tokens"), CHAIN_LENGTHS + TREE_SIZES)
def test_a_summary_scores_static_settings_as_replay_does(
    log: DenseLog, top_k: int, depth: int, num_tokens: int
) -> None:
    summary = summarise(log, top_k=top_k)
    [wanted] = replay(
        log, [Policy(shape=StaticTree(depth=depth, top_k=top_k, num_tokens=num_tokens))]
    )
    accepted = static_accepted(summary, depth, num_tokens)
    visited = walk(summary.positions, accepted + 1)
    assert accepted[visited].tolist() == wanted.outcomes.accepted.tolist()
    verified = static_verified(summary, depth, num_tokens)[visited]
    assert verified.tolist() == wanted.outcomes.verified.tolist()


def test_summaries_beyond_the_log_are_refused(log: DenseLog) -> None:
    for asked in ({"top_k": 5}, {"top_k": 2, "depth": 6}):
        with pytest.raises(UsageError, match="deeper or wider"):
            summarise(log, **asked)
    with pytest.raises(UsageError, match="depth 1 to 5"):
        static_accepted(summarise(log, top_k=3), 6, 42)
