"""What fits read of a log, against plain Python: labels, gates, tested tokens, costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from specctl.artifacts import load_artifact
from specctl.errors import UsageError
from specctl.logs.fit_data import ROUND_COLUMNS, PositionRows
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, join_chunks, read_chains
from specctl.policy import (
    Chain,
    ElasticBudget,
    EntropyStop,
    Policy,
    RootOnly,
    SignalStop,
    SparseGates,
    StaticTree,
)
from specctl.replay import fit_inputs
from specctl.replay.batch_simulation import Load, simulate
from specctl.replay.rounds import Rounds, replay
from specctl.replay.submissions import submissions_of
from specctl.train.echo import EchoReport
from tests.cli.command import Outcome, refuses, specctl
from tests.replay.logs import PlainTree, log_fixtures, plain_trees, random_traces, static_tree
from tests.replay.reports import live_traces
from tests.replay.serving import linear
from tests.replay.tune_cases import linear_file

DEPTH, NUM_PROMPTS = 4, 8
BASE = "eagle2:depth=3:top_k=3:num_tokens=8"
SHAPE = SparseGates(depth=4, width=2, max_width=3, gate_levels=(1,), thresholds=(0.9,))
USAGE, INPUT = 2, 4
SMALL = ("--depth", 4, "--width", 2, "--max-width", 3, "--threads", 1)

traces, log = log_fixtures(num_prompts=NUM_PROMPTS, depth=DEPTH, top_k=3)


def label(tree: PlainTree) -> tuple[int, int | None, bool]:
    """Accepted length, rank of its end and whether both are known, node by node."""
    nodes = static_tree(tree, 3, 3, 8)
    path = [node for node in nodes[1:] if tree.on_path[node]]
    whole = len(path) < tree.remaining or len(path) == 3
    return len(path), nodes.index(path[-1]) if path else None, whole


def test_labels_equal_the_plain_telling(traces: TraceSet) -> None:
    found = fit_inputs.rounds_to_fit(traces, BASE, num_threads=2)
    told = [label(tree) for request in plain_trees(traces) for tree in request]
    rounds = found.rounds
    assert found.num_left_out == sum(not whole for *_, whole in told) > 0
    assert rounds["num_accepted"].to_list() == [a for a, _, whole in told if whole]
    assert rounds["tcr"].to_list() == [rank for _, rank, whole in told if whole]
    assert (rounds["fully_accepted"] == (rounds["num_accepted"] == 3)).all()
    assert rounds["prompt_id"].n_unique() == NUM_PROMPTS
    assert set(ROUND_COLUMNS) <= set(rounds.columns)


def test_a_bound_takes_a_sample_of_all_prompts_that_chunks_do_not_change(
    traces: TraceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit_inputs.rounds_to_fit(traces, BASE)
    most = whole.num_rounds // 3
    parts = []
    for size in (1 << 19, 64):
        monkeypatch.setattr("specctl.logs.tree_log.CHUNK_NODES", size)
        parts.append(fit_inputs.rounds_to_fit(traces, BASE, max_rows=most, seed=4))
    found, other = parts
    assert found.rounds.equals(other.rounds)
    assert (found.rounds.height, found.num_rounds) == (most, whole.num_rounds)
    assert found.num_left_out == whole.num_left_out
    assert found.rounds["prompt_id"].n_unique() == NUM_PROMPTS
    rows = whole.rounds.with_row_index()
    places = rows.join(found.rounds, on=whole.rounds.columns, how="semi", nulls_equal=True)["index"]
    assert places.is_sorted()
    assert places.max() > most, "not the first ones"  # type: ignore[operator]
    again = fit_inputs.rounds_to_fit(traces, BASE, max_rows=most, seed=5)
    assert not again.rounds.equals(found.rounds)


def test_phi_is_the_meta_path_entropy_of_the_base_alone(traces: TraceSet) -> None:
    """Equal entropies at every node of a path would hide depth: compare two bases."""
    shallow = fit_inputs.rounds_to_fit(traces, "eagle2:depth=2:top_k=3:num_tokens=8").rounds
    deep = fit_inputs.rounds_to_fit(traces, BASE).rounds
    assert shallow["phi"].mean() < deep["phi"].mean()
    assert shallow["phi_depth"].unique().to_list() == [2]


def test_the_base_is_a_static_tree_and_live_traces_keep_their_own(
    traces: TraceSet, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="static tree"):
        fit_inputs.rounds_to_fit(traces, "chain")
    live = live_traces(tmp_path / "live")
    found = fit_inputs.rounds_to_fit(live, None)
    assert found.rounds.equals(live.scan("rounds").select(ROUND_COLUMNS).collect())
    assert found.num_rounds == found.rounds.height > 0
    with pytest.raises(UsageError, match="--base"):
        fit_inputs.rounds_to_fit(live, BASE)


@pytest.mark.parametrize(("held", "base"), [((4, 3), (4, 3)), ((7, 9), (6, 8))])
def test_without_a_base_it_is_eagle2s_within_the_traces(
    held: tuple[int, int], base: tuple[int, int], tmp_path: Path
) -> None:
    depth, top_k = held
    random_traces(tmp_path / "traces", num_prompts=2, depth=depth, top_k=top_k)
    policy = fit_inputs.rounds_to_fit(TraceSet.open(tmp_path / "traces"), None).policy
    assert (policy["shape"]["depth"], policy["shape"]["top_k"]) == base


@pytest.fixture(scope="module")
def found(log: DenseLog) -> PositionRows:
    return fit_inputs.gate_rows(log, SHAPE)


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
    assert fit_inputs.gate_rows(log, other).rows.equals(found.rows)


def test_replayed_sums_are_of_the_named_prompts(log: DenseLog) -> None:
    policy = Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=8))
    [rounds] = replay(log, [policy])
    chosen = rounds.positions.prompt_ids[1:4]
    rows = np.isin(rounds.positions.row_prompts[rounds.visited], chosen)
    [sums] = fit_inputs.Replayer(log)([policy], chosen)
    accepted, verified = rounds.outcomes.accepted[rows], rounds.outcomes.verified[rows]
    assert (sums.calls, sums.tokens) == (rows.sum(), rounds.emitted[rows].sum())
    assert (sums.accepted, sums.verified) == (accepted.sum(), verified.sum())
    assert sums.utilisation == pytest.approx((accepted / 3).mean())
    assert sums.time_us is None
    [timed] = fit_inputs.Replayer(log, lambda run: 2.0 + 0.0 * run.request)([policy], chosen)
    assert timed.time_us == 2.0 * rows.sum()


@pytest.fixture(scope="module")
def chains(log: DenseLog) -> DenseLog:
    return read_chains(log, extra=(fit_inputs.DISTANCE,))


def rows_of(rounds: Rounds) -> list[tuple[int, ...]]:
    names = ("accepted", "verified", "levels", "wanted", "missing", "censored")
    columns = (getattr(rounds.outcomes, name).tolist() for name in names)
    return list(zip(rounds.request.tolist(), *columns, strict=True))


CHAINS = {
    "ar": RootOnly(),
    "chain": Chain(num_draft_tokens=3),
    "deeper than the log": Chain(num_draft_tokens=DEPTH + 2),
    "stop": SignalStop(signal="entropy", threshold=1.0, window=DEPTH),
    "online": EntropyStop(window=DEPTH, min_samples=1),
    "online, deeper": EntropyStop(window=DEPTH + 1, min_samples=1),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_replay_as_in_the_whole_log(log: DenseLog, chains: DenseLog, name: str) -> None:
    policy = Policy(shape=CHAINS[name])
    [whole], [part] = replay(log, [policy]), replay(chains, [policy])
    assert rows_of(part) == rows_of(whole)
    for name in ("calls_low", "calls_high", "verified_low", "verified_high"):
        assert getattr(part.bounds, name).tolist() == getattr(whole.bounds, name).tolist()


def test_trees_are_missed_and_not_guessed(chains: DenseLog) -> None:
    [found] = replay(chains, [Policy(shape=StaticTree(depth=2, top_k=3, num_tokens=6))])
    assert (found.outcomes.missing > 0).all()


def test_chunks_join_without_a_seam(log: DenseLog, chains: DenseLog) -> None:
    held = replace(chains, held=(join_chunks(chains.held * 2),))
    policy = Policy(shape=EntropyStop(window=DEPTH, min_samples=1))
    [once], [doubled] = replay(chains, [policy]), replay(held, [policy])
    again = [(request + NUM_PROMPTS, *row) for request, *row in rows_of(once)]
    assert rows_of(doubled) == rows_of(once) + again


def plain_tokens(traces: TraceSet, window: int) -> list[tuple[str, bool, float, float]]:
    """Node by node: accepted tokens and the first rejected one of every round."""
    table = traces.scan("nodes").select(
        "request_id", "round_idx", "parent_entropy", fit_inputs.DISTANCE
    )
    nodes = table.collect().partition_by("request_id", "round_idx", maintain_order=True)
    found, first = [], 0
    for name, trees in zip(traces.prompt_ids, plain_trees(traces), strict=True):
        here = 0
        while here < len(trees):
            tree, values = trees[here], nodes[first + here]
            node, accepted = 0, 0
            while accepted < window:
                node = tree.children[node][0]
                if accepted == tree.remaining:
                    break  # the text ends here: nothing was rejected
                entropy, distance = (
                    values[c][node] for c in ("parent_entropy", fit_inputs.DISTANCE)
                )
                found.append((name, tree.on_path[node], entropy, distance))
                if not tree.on_path[node]:
                    break
                accepted += 1
            here += accepted + 1
        first += len(trees)
    return found


@pytest.mark.parametrize("window", [1, 3, DEPTH])
def test_tested_tokens_are_those_of_the_plain_telling(
    traces: TraceSet, log: DenseLog, chains: DenseLog, window: int
) -> None:
    wanted = sorted(plain_tokens(traces, window))
    for source in (log, chains):
        found = fit_inputs.tokens_tested(source, window)
        columns = (found.prompt_id, found.accepted, found.entropy, found.distance)
        rows = sorted(zip(*(c.tolist() for c in columns), strict=True))
        assert [row[:2] for row in rows] == [row[:2] for row in wanted]
        numbers = [[float(v) for v in row[2:]] for row in rows]
        expected = [[np.nan if v is None else v for v in row[2:]] for row in wanted]
        np.testing.assert_allclose(numbers, expected, rtol=1e-6)
    assert {accepted for _, accepted, *_ in wanted} == {True, False}


def test_costs_are_sums_by_prompt(chains: DenseLog) -> None:
    policy = Policy(shape=Chain(num_draft_tokens=3))
    [run] = replay(chains, [policy])
    [costs] = fit_inputs.prompt_costs(chains, [policy], fit_inputs.target_steps(0.25))
    assert costs.time.tolist() == pytest.approx((costs.calls * 1.75).tolist())
    assert costs.levels.tolist() == (3 * costs.calls).tolist()
    assert costs.verified.tolist() == (4 * costs.calls).tolist()
    assert costs.tokens.tolist() == run.positions.num_tokens.tolist()
    assert costs.calls.sum() == len(run.request)
    assert costs.support == 1.0


def test_reading_tells_its_progress(log: DenseLog) -> None:
    seen: list[int] = []
    read_chains(log, on_positions=seen.append)
    assert sum(seen) == 128 * NUM_PROMPTS


def fit(folder: Path, out: Path, *options: object) -> Outcome:
    done = specctl("fit", "echo", folder, "-o", out, *SMALL, "--delta", 0.55, *options)
    assert done.code == 0, done
    return done


def test_verb_writes_an_artifact_that_replays(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy"
    shown = fit(folder, out, "--max-tokens", 20).out
    artifact = load_artifact(out)
    assert isinstance(artifact.policy.shape, SparseGates)
    assert artifact.policy.budget == ElasticBudget(max_tokens=20, default_width=2, max_width=3)
    assert "20 nodes a round" in (out / "README.md").read_text()
    assert artifact.digest in shown
    assert "held-out AUC" in shown
    [made] = submissions_of(DenseLog.open(TraceSet.open(folder)), [artifact.policy])
    rounds = simulate(made, Load(4, num_requests=8), linear()).rounds
    assert rounds.per_step(rounds.verified).max() == 20
    assert (rounds.verified >= 1).all()


def test_json_and_thresholds_by_cost(folder: Path, tmp_path: Path) -> None:
    costs = linear_file(tmp_path / "cost_model.json")
    options = ("--thresholds", "cost", "--cost-model", costs, "--max-gates", 1, "--json")
    told = json.loads(fit(folder, tmp_path / "policy", *options).out)
    report = EchoReport.model_validate_json(json.dumps(told["report"]))
    assert told["artifact_digest"] == load_artifact(tmp_path / "policy").digest
    assert report.config["thresholds"] == "cost"
    gates, no_gates = report.replayed["gates"], report.replayed["no_gates"]
    assert gates.token_us is not None
    assert gates.token_us <= 1.02 * no_gates.token_us, "chosen on other prompts, yet no worse"


def test_refusals(folder: Path, tmp_path: Path) -> None:
    verb = ("fit", "echo", folder, "-o", tmp_path / "policy", *SMALL)
    assert "level 4" in refuses(INPUT, *verb, "--delta", 1)
    assert "specctl profile" in refuses(USAGE, *verb, "--delta", 0.55, "--thresholds", "cost")
    assert "thresholds" in refuses(USAGE, *verb, "--thresholds", "luck")
    assert "width exceeds max_width" in refuses(USAGE, *verb, "--width", 4)
    assert not (tmp_path / "policy").exists()
