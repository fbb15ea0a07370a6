"""One pass tells every threshold: held against the rule that runs with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specctl.errors import TraceEmptyError
from specctl.logs.node_sample import LoggedNodes
from specctl.policy import FfnScorer, JointThreshold, ScoredTree, build_shape
from specctl.stats import calibration_errors
from specctl.train.curves import BETAS, CalibrationTally, Curve, equal_mass, trace_curve
from specctl.train.scored import choose_beta
from tests.train.cases import DEPTH, TOP_K, c2t_config, node_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LoggedNodes:
    return node_source(tmp_path_factory.mktemp("log") / "log")


def scored(predicts: str, beta: float, **options: bool) -> ScoredTree:
    """A rough scorer that the drafter's probabilities do not order."""
    scorer = FfnScorer(
        features=("draft_logp", "parent_entropy", "depth"),
        mean=(-2.0, 1.5, 2.0),
        scale=(2.0, 0.5, 1.0),
        w1=((1.0, -0.3, -0.2), (0.5, 0.4, 0.3)),
        b1=(0.5, -0.1),
        w2=(1.5, -1.0),
        b2=(-0.8,),
    )
    return ScoredTree(
        scorer=scorer,
        predicts=predicts,
        beta=beta,
        depth=DEPTH,
        first_top_k=TOP_K,
        second_top_k=TOP_K,
        **options,
    )


@pytest.mark.parametrize(("predicts", "keep_leaves"), [("joint", True), ("conditional", False)])
def test_thresholds_keep_what_their_rules_submit(
    predicts: str,
    keep_leaves: bool,  # noqa: FBT001  parametrised
    source: LoggedNodes,
) -> None:
    curve = trace_curve(source, build_shape(scored(predicts, 0.0, keep_leaves=keep_leaves)))
    kept = []
    for index in (60, 80, 95, 110):
        rule = build_shape(scored(predicts, BETAS[index], keep_leaves=keep_leaves))
        submitted = accepted = 0
        for batch in source.batches(rule):
            chosen = batch.submitted.clamp(min=0)
            submitted += int((batch.submitted > 0).sum())
            accepted += int((batch.accepted.gather(1, chosen) & (batch.submitted > 0)).sum())
        point = curve.point(index)
        assert curve.kept[:, index].sum() == submitted
        assert curve.accepted[:, index].sum() == accepted
        assert point.num_tokens == pytest.approx(1 + submitted / 1536)
        assert point.recall == pytest.approx(accepted / curve.longest.sum())
        kept.append(submitted)
    assert kept[0] > 2 * kept[-1] > 0


@pytest.fixture(scope="module")
def joint(source: LoggedNodes) -> Curve:
    return trace_curve(source, build_shape(JointThreshold(depth=DEPTH, top_k=TOP_K, min_prob=0.0)))


def test_unpruned_tree_loses_nothing_where_its_frontier_is_the_log(joint: Curve) -> None:
    assert joint.num_missing == 0
    assert joint.accepted[:, 0].sum() <= joint.longest.sum()
    assert joint.point(0).recall > 0.98
    assert joint.point(0).positive_rate > 0.98
    assert joint.kept.shape == (12, len(BETAS))
    assert (np.diff(joint.kept, axis=1) <= 0).all()


def test_drafted_probabilities_of_such_logs_are_calibrated(joint: Curve) -> None:
    """The target takes a child with the drafter's probability. 46,000 nodes of 1536 positions;
    scores that were off by 0.05 would show."""
    whole, *levels = joint.calibration.by_depth()
    assert [level.depth for level in levels] == [1, 2, 3, 4]
    assert whole.num_nodes == sum(level.num_nodes for level in levels) > 30_000
    assert whole.ece < 0.01
    assert levels[0].ece < 0.04
    assert sum(row.num_nodes for row in whole.bins) == whole.num_nodes


def test_a_recall_has_a_threshold_and_a_size(joint: Curve) -> None:
    index = joint.index_of_recall(0.7)
    assert index is not None
    assert joint.point(index).recall >= 0.7 > joint.point(index + 1).recall
    assert choose_beta(joint, c2t_config(recall=0.7)) == joint.betas[index]
    [tokens] = joint.tokens_at_recall(0.7)
    assert joint.point(index + 1).num_tokens <= tokens <= joint.point(index).num_tokens
    assert joint.index_of_recall(1.01) is None
    assert np.isnan(joint.tokens_at_recall(1.01)).all()


def test_intervals_hold_the_point_and_shrink_to_it_for_equal_prompts(joint: Curve) -> None:
    bounds = joint.intervals(70, seed=0)
    point = joint.point(70)
    for name, interval in bounds.items():
        assert interval.low < getattr(point, name) < interval.high


def test_no_prompts_are_refused(source: LoggedNodes) -> None:
    with pytest.raises(TraceEmptyError, match="curve of thresholds"):
        trace_curve(source, build_shape(scored("joint", 0.0)), [])


def test_areas_agree_with_scikit_learn(source: LoggedNodes, joint: Curve) -> None:
    from sklearn.metrics import roc_auc_score

    scores, labels = [], []
    for batch in source.batches(
        build_shape(JointThreshold(depth=DEPTH, top_k=TOP_K, min_prob=0.0))
    ):
        known = batch.known.clone()
        known[:, 0] = False
        scores.append(batch.scores[known])  # type: ignore[index]
        labels.append(batch.accepted[known])
    area = roc_auc_score(torch.cat(labels), torch.cat(scores))
    assert joint.calibration.auc() == pytest.approx(area, abs=1e-4)


@pytest.mark.parametrize("shift", [0.0, 0.04])
def test_error_of_known_size_is_found_and_chance_is_taken_off(shift: float) -> None:
    """20,000 scores in 15 bins: chance alone gives gaps of 0.011 on average, and their mean a
    standard error of 0.0035. Four of these are allowed, so 0 and 0.04 are told apart."""
    random = np.random.default_rng(3)
    prob = random.uniform(0.2, 0.8, 20_000)
    accepted = random.random(20_000) < prob
    order = np.argsort(prob)
    cells = [np.ones(20_000), accepted[order].astype(float), (prob + shift)[order]]
    debiased, plain = calibration_errors(*equal_mass(*cells))
    assert plain > 0.006
    assert abs(debiased - shift) < 0.014


def test_empty_depths_are_left_out(source: LoggedNodes) -> None:
    tally = CalibrationTally(9)
    [batch, *_] = source.batches(build_shape(JointThreshold(depth=2, top_k=2, min_prob=0.0)))
    assert batch.scores is not None
    tally.add(batch, batch.scores)
    assert [level.depth for level in tally.by_depth()] == [None, 1, 2]
