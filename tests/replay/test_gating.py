"""What `fit echo` reads of a log, against plain Python; and the verb as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from specctl.artifacts import load_artifact
from specctl.logs.fit_data import PositionRows
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import ElasticBudget, Policy, SparseGates, StaticTree
from specctl.replay.batch_simulation import Load, simulate
from specctl.replay.fit_inputs import Replayer, gate_rows
from specctl.replay.rounds import replay
from specctl.replay.submissions import submissions_of
from specctl.train.echo import EchoReport
from tests.cli.command import Outcome, refuses, specctl
from tests.replay.logs import PlainTree, plain_trees, random_traces
from tests.replay.serving import linear
from tests.replay.tune_cases import linear_file

SHAPE = SparseGates(depth=4, width=2, max_width=3, gate_levels=(1,), thresholds=(0.9,))
USAGE, INPUT = 2, 4
SMALL = ("--depth", 4, "--width", 2, "--max-width", 3, "--threads", 1)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    return random_traces(folder, num_prompts=8, depth=4, top_k=3)


@pytest.fixture(scope="module")
def folder(traces: TraceSet) -> Path:
    return Path(traces.parts[0].place.name)


@pytest.fixture(scope="module")
def found(traces: TraceSet) -> PositionRows:
    return gate_rows(DenseLog.open(traces), SHAPE)


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
    wanted = [told_plainly(tree) for trees in plain_trees(traces) for tree in trees]
    remaining = [tree.remaining for trees in plain_trees(traces) for tree in trees]
    whole = [
        not (accepted >= left and accepted < SHAPE.depth)
        for (accepted, _), left in zip(wanted, remaining, strict=True)
    ]
    assert found.num_left_out == whole.count(False) > 0
    kept = [one for one, is_whole in zip(wanted, whole, strict=True) if is_whole]
    assert found.rows["accepted"].to_list() == [accepted for accepted, _ in kept]
    levels = found.rows.select(pl.col("^level_.*$")).to_numpy()
    assert np.array_equal(levels, np.array([best for _, best in kept], np.float32))
    assert len(set(found.rows["accepted"].to_list())) > 3, "too tame to tell"


def test_gates_of_the_shape_do_not_matter(traces: TraceSet, found: PositionRows) -> None:
    other = SHAPE.model_copy(update={"gate_levels": (1, 3), "thresholds": (1.0, 1.0)})
    assert gate_rows(DenseLog.open(traces), other).rows.equals(found.rows)


def test_replayed_sums_are_of_the_named_prompts(traces: TraceSet) -> None:
    log, policy = DenseLog.open(traces), Policy(shape=StaticTree(depth=3, top_k=3, num_tokens=8))
    [rounds] = replay(log, [policy])
    chosen = rounds.positions.prompt_ids[1:4]
    rows = np.isin(rounds.positions.row_prompts[rounds.visited], chosen)
    [sums] = Replayer(log)([policy], chosen)
    outcomes = rounds.outcomes
    assert sums.calls == rows.sum()
    assert sums.tokens == rounds.emitted[rows].sum()
    assert sums.accepted == outcomes.accepted[rows].sum()
    assert sums.verified == outcomes.verified[rows].sum()
    assert sums.utilisation == pytest.approx((outcomes.accepted[rows] / 3).mean())
    assert sums.time_us is None
    [timed] = Replayer(log, lambda run: 2.0 + 0.0 * run.request)([policy], chosen)
    assert timed.time_us == 2.0 * rows.sum()


# --------------------------------------------------------------------------- the verb


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
    assert artifact.digest in shown
    assert "held-out AUC" in shown
    [made] = submissions_of(DenseLog.open(TraceSet.open(folder)), [artifact.policy])
    rounds = simulate(made, Load(4, num_requests=8), linear()).rounds
    verified = rounds.per_step(rounds.verified)
    assert verified.max() == 20
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
