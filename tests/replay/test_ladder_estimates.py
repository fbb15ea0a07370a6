"""Fits, features and ranked trees: against plain Python, and against looking ahead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from specctl.errors import TraceCorruptError, TraceEmptyError, TraceError
from specctl.logs import tree_log
from specctl.logs.node_table import TABLE_COLUMNS, LabelledNodes, labelled_nodes, node_table
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.replay.ladder import estimates as fits
from specctl.replay.ladder.limits import rank_log
from specctl.replay.static import summarise
from tests.replay.logs import log_fixtures, plain_trees, target_log

traces, log = log_fixtures(num_prompts=6, depth=4, top_k=3, seed=5)


def only_chunk(log: DenseLog) -> LogChunk:
    [chunk] = log.chunks(extra=TABLE_COLUMNS)
    return chunk


def test_node_tables_equal_plain_python(traces: TraceSet, log: DenseLog) -> None:
    nodes, start = node_table(only_chunk(log)), 0
    for row, tree in enumerate(t for request in plain_trees(traces) for t in request):
        here = slice(start, start + len(tree.parent))
        start = here.stop
        above = list(zip(tree.parent, tree.depth, strict=True))
        ranks = [tree.children[up].index(n) if n else 0 for n, (up, _) in enumerate(above)]
        labelled = [up >= 0 and tree.on_path[up] and d <= tree.remaining for up, d in above]
        assert (nodes.row[here] == row).all()
        found = np.where(nodes.parent[here] < 0, -1, nodes.parent[here] - here.start)
        assert found.tolist() == tree.parent
        assert nodes.depth[here].tolist() == tree.depth
        assert nodes.rank[here].tolist() == ranks
        assert nodes.joint_logp[here].tolist() == [float(value) for value in tree.joint]
        assert nodes.labelled[here].tolist() == labelled
    assert start == len(nodes.row)


@pytest.mark.parametrize("column", ["depth", "sibling_rank", "joint_logp"])
def test_columns_that_contradict_the_tree_are_refused(column: str, log: DenseLog) -> None:
    chunk = only_chunk(log)
    values = chunk.extra[column].copy()
    values[int(chunk.root[1]) - 1] -= 1  # the last node of the first tree
    with pytest.raises(TraceCorruptError, match="depths, ranks or joint_logp"):
        node_table(replace(chunk, extra=chunk.extra | {column: values}))


def coins(seed: int, prob: np.ndarray) -> np.ndarray:
    return np.random.default_rng(seed).random(len(prob)) < prob


def test_a_logistic_probability_is_recovered() -> None:
    """20,000 labels of sigmoid(2 x - 1); without its slope a fit would miss by 0.3."""
    x = np.random.default_rng(0).normal(size=(20_000, 1)).astype(np.float32)
    prob = 1 / (1 + np.exp(-(2 * x[:, 0] - 1)))
    fit = fits.fit_logistic(x, coins(1, prob))
    at = np.linspace(-1.5, 2, 8, dtype=np.float32)[:, None]
    truth = 1 / (1 + np.exp(-(2 * at[:, 0] - 1)))
    assert fit(at) == pytest.approx(truth, abs=0.04)
    boosted = fits.fit_boosted(x, coins(1, prob), seed=0)
    assert boosted(at) == pytest.approx(truth, abs=0.12)


def test_the_isotonic_step_mends_a_probability_that_is_not_logistic() -> None:
    x = np.random.default_rng(2).uniform(-3, 3, size=(20_000, 1)).astype(np.float32)
    prob = np.where(x[:, 0] > 1, 0.9, 0.2)
    accepted = coins(3, prob)
    fit = fits.fit_logistic(x, accepted)
    straight = LogisticRegression().fit(x, accepted).predict_proba(x)[:, 1]
    assert fits.quality(fit(x), accepted).calibration_error < 0.02
    assert fits.quality(straight.astype(np.float32), accepted).calibration_error > 0.05


def test_quality_by_hand() -> None:
    prob = np.array([0.1, 0.1, 0.8, 0.8], np.float32)
    accepted = np.array([False, True, True, True])
    found = fits.quality(prob, accepted)
    wanted = -(np.log(0.9) + np.log(0.1) + 2 * np.log(0.8)) / 4
    assert found.log_loss == pytest.approx(wanted, rel=1e-6)
    assert found.calibration_error == pytest.approx((0.1 + 0.9 + 0.2 + 0.2) / 4, rel=1e-6)
    assert (found.num_nodes, found.base_rate) == (4, 0.75)


@pytest.mark.parametrize("label", [1, 0])
def test_labels_of_one_kind_are_refused(label: int) -> None:
    features, accepted = np.zeros((9, 1), np.float32), np.full(9, bool(label))
    for fit in (fits.fit_logistic, lambda f, a: fits.fit_boosted(f, a, seed=0)):
        with pytest.raises(TraceEmptyError, match="9 of one kind"):
            fit(features, accepted)


def by_draft(log: DenseLog) -> fits.Estimates:
    """The drafter taken at its word."""
    [chunk] = log.chunks()
    folds = dict.fromkeys(chunk.positions.prompt_ids, 0)
    return fits.Estimates({"draft": lambda nodes, _: np.exp(nodes.draft_logp)}, folds, (), {})


def test_ranking_by_the_drafters_own_word_is_the_summary(log: DenseLog) -> None:
    """Two independent ways to one order: joint probabilities here, log-probabilities there."""
    ranked = dict(rank_log(log, by_draft(log), (1, 2, 3), num_kept=25))
    [chunk] = log.chunks()
    for width in (1, 2, 3):
        found, summary = ranked["draft", width], summarise(log, top_k=width)
        ranks = summary.path_rank[:, -1].astype(int)  # of unlikely nodes no order is promised
        row, place = np.nonzero(found.on_path & (found.prob >= fits.LEAST_PROB))
        assert (ranks[row, found.depth[row, place] - 1] == place + 1).all()
        assert len(row) > len(found.matched) / 2
        assert found.prob.shape == (len(found.matched), min(25, width + 3 * width**2))
        assert found.matched.tolist() == chunk.matched.tolist()


def test_no_child_outranks_its_parent(log: DenseLog) -> None:
    nodes = node_table(only_chunk(log))
    features = estimated(labelled_nodes(log)).conditionals["features"]
    fold, wanted = np.zeros_like(nodes.row), np.ones(len(nodes.row), bool)
    joint = fits.joint_acceptance(features, nodes, fold, wanted)
    below = nodes.parent >= 0
    assert (joint[below] <= joint[nodes.parent[below]]).all()
    assert (joint[~below] == 1).all()


def altered(sample: LabelledNodes, prompt: str) -> LabelledNodes:
    """The sample with the labels of one prompt turned round."""
    turned = np.where(sample.prompt == prompt, ~sample.nodes.on_path, sample.nodes.on_path)
    return replace(sample, nodes=replace(sample.nodes, on_path=turned))


def estimated(sample: LabelledNodes, *, is_sampled: bool = False) -> fits.Estimates:
    """Fitted with three training prompts, in two folds."""
    train = frozenset(sample.prompt_ids[:3])
    return fits.fit_estimates(sample, train, num_folds=2, is_sampled=is_sampled, seed=0)


def test_no_prompt_is_estimated_by_a_model_that_saw_it(log: DenseLog) -> None:
    """The oracle of a fold never saw its prompts, and features are of training prompts alone."""
    sample = labelled_nodes(log)
    first = estimated(sample)
    held_out = sample.prompt_ids[4]
    fold = first.fold_of[held_out]
    assert np.bincount(list(first.fold_of.values())).tolist() == [3, 3]
    seen = next(name for name in sample.prompt_ids[:3] if first.fold_of[name] != fold)
    rest = [estimated(altered(sample, prompt)) for prompt in (held_out, seen)]
    for name in ("features", "oracle"):
        one, two, three = (
            of.conditionals[name](sample.nodes, np.full(len(sample.prompt), fold)).tolist()
            for of in (first, *rest)
        )
        assert one == two != three
    # The change is seen where it may be.
    assert first.quality["features"] != rest[0].quality["features"]
    absent = {"root_target_entropy", "root_target_margin"}
    assert set(first.oracle_features) == set(fits.ORACLE_FEATURES) - absent


def test_sampled_texts_use_the_targets_distribution_at_depth_1_alone(log: DenseLog) -> None:
    known = target_log(log)
    sample = labelled_nodes(known)
    oracle = estimated(sample, is_sampled=True).conditionals["oracle"]
    nodes = node_table(only_chunk(known))
    below = nodes.take(nodes.depth > 0)
    first, fold = below.depth == 1, np.zeros_like(below.row)
    prob = oracle(below, fold)
    assert prob[first].tolist() == np.exp(below.target_logp[first]).tolist()
    # Where it is logged below depth 1 is where the text went: it must not matter.
    hidden = replace(below, target_logp=np.where(first, below.target_logp, 0.0), on_path=~first)
    assert oracle(hidden, fold).tolist() == prob.tolist()
    forgotten = labelled_nodes(target_log(log, forgotten=True))
    with pytest.raises(TraceError, match="log-probability at every node of depth 1"):
        estimated(forgotten, is_sampled=True)


def test_the_log_is_read_in_any_chunks(log: DenseLog, monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = by_draft(log)
    whole = dict(rank_log(log, estimates, (2,), num_kept=12))["draft", 2]
    monkeypatch.setattr(tree_log, "CHUNK_NODES", 9000)
    parts = dict(rank_log(log, estimates, (2,), num_kept=12))["draft", 2]
    for name in ("prob", "on_path", "matched"):
        assert (getattr(whole, name) == getattr(parts, name)).all()
