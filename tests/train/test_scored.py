"""`fit c2t`: beta by its rule, curves of thresholds, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specctl.errors import UsageError
from specctl.logs.node_sample import LoggedNodes
from specctl.policy import JointThreshold, ScoredTree, build_shape
from specctl.stats import Interval, calibration_errors
from specctl.train.c2t import fit_c2t
from specctl.train.curves import BETAS, Curve, equal_mass, trace_curve
from specctl.train.report import Fit
from specctl.train.scored import (
    RECALLS,
    RecallRow,
    choose_beta,
    compared,
    read_sides,
    references,
    verdict_on,
)
from tests.train.cases import DEPTH, NODE_PROMPTS, TOP_K, c2t_config

Fits = dict[str, Fit[Any]]


def shape_of(fit: Fit[Any]) -> ScoredTree:
    assert isinstance(fit.policy.shape, ScoredTree)
    return fit.policy.shape


def test_beta_is_the_highest_that_keeps_the_training_recall(fits: Fits) -> None:
    data = fits["c2t"].data
    assert data.train.recall >= 0.7
    assert data.train.beta == data.beta == data.held_out.beta
    assert [point for point in data.curve if point.beta > data.beta]
    assert data.held_out.recall == pytest.approx(0.7, abs=0.06)
    for point, found in data.held_out_interval.items():
        assert found.value == getattr(data.held_out, point)
        assert found.low <= found.value <= found.high
    assert [row.recall for row in data.comparisons] == list(RECALLS)


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ([(0.03, -0.04, 0.11), (-0.07, -0.22, 0.20)], "; not told apart from the plain threshold."),
        ([(-0.14, -0.25, -0.05), (0.02, -0.1, 0.1)], "; up to 14% below the plain threshold."),
        ([(0.09, 0.02, 0.20)], "; up to 9% above the plain threshold."),
        ([(-0.1, -0.2, -0.01), (0.3, 0.1, 0.5)], "; up to 10% below and up to 30% above the plain "
         "threshold."),
    ],
)  # fmt: skip
def test_the_verdict_on_a_scorer_is_that_of_its_intervals(
    fits: Fits, changes: list[tuple[float, float, float]], end: str
) -> None:
    """A rank of areas is none: an interval that holds 0 tells nothing apart."""
    rows = tuple(
        RecallRow(recall=r, num_tokens=1.0, joint_num_tokens=1.0, change=own[0],
                  change_interval=Interval(*own))
        for r, own in zip(RECALLS, changes, strict=False)
    )  # fmt: skip
    data = fits["c2t"].data.model_copy(update={"comparisons": rows, "auc": 0.5, "joint_auc": 0.9})
    held_out = data.sides["held_out"].num_prompts
    assert f", on {held_out} held-out prompts" in verdict_on(data)
    assert verdict_on(data).endswith(end)


def test_it_finds_the_distribution_of_the_log(fits: Fits) -> None:
    """The joint probability is the best score there is; the area's standard error is 0.005."""
    data = fits["c2t"].data
    assert data.auc > data.joint_auc - 0.02
    assert data.calibration[0].ece < 0.03
    assert data.label.auc > 0.75
    assert data.label.log_loss < 0.48  # 0.59 of the base rate alone
    change = {row.recall: row for row in data.comparisons}[0.7].change_interval
    assert change is not None
    assert change.value == pytest.approx(0.0, abs=0.12)
    assert change.low <= change.value <= change.high


def test_beta_that_was_given_is_kept_exactly(source: LoggedNodes) -> None:
    config = c2t_config({"predicts": "joint"}, beta=0.123)
    found = fit_c2t(source, NODE_PROMPTS, config)
    assert found.data.beta == shape_of(found).beta == found.data.held_out.beta == 0.123
    assert 0 < found.data.held_out.num_tokens < found.data.curve[0].num_tokens


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"beta": 1.0}, "beta 1 is reached by no node"),
    ({"second_top_k": 1}, {"recall": 0.999999}, "no beta keeps a share of 0.999999"),
    ({"depth": 9}, {}, "--depth 9 is more than the traces hold, 4"),
    ({"first_top_k": 5}, {}, "--first-top-k 5 is more"),
    ({"second_top_k": 5}, {}, "--second-top-k 5 is more"),
]


@pytest.mark.parametrize(("nodes", "changes", "says"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_the_log_cannot_give_is_refused(
    nodes: dict[str, Any], changes: dict[str, Any], says: str, source: LoggedNodes
) -> None:
    made = c2t_config()
    config = made.model_copy(update={"nodes": made.nodes.model_copy(update=nodes), **changes})
    with pytest.raises(UsageError, match=says):
        fit_c2t(source, NODE_PROMPTS, config)


def test_references_are_trees_on_the_same_nodes_and_the_drafter(fits: Fits) -> None:
    """The drafter knows the law of such logs; trees come near it, as the network does."""
    data = fits["c2t"].data
    assert data.references.keys() == {"boosted trees", "drafter"}
    drafter = data.references["drafter"]
    assert data.references["boosted trees"].log_loss == pytest.approx(drafter.log_loss, abs=0.02)
    assert drafter.log_loss < data.label.log_loss
    _, label, *_ = fits["c2t"].report.tables
    assert [row[0] for row in label.rows] == ["c2t", "boosted trees", "drafter"]


@pytest.mark.parametrize("predicts", ["joint", "conditional"])
def test_trees_of_sampled_negatives_speak_of_all(source: LoggedNodes, predicts: str) -> None:
    """Half of the rejected nodes: the loss is that of trees fitted to all of them."""
    names = ("joint_logp", "draft_logp", "depth")
    losses = []
    for negatives in (0.0, 0.7):
        nodes = {"features": names, "predicts": predicts, "negatives": negatives}
        config = c2t_config(nodes)
        sides = read_sides(source, NODE_PROMPTS, config)
        assert (sides.train.kept_frac < 0.7) == bool(negatives)
        losses.append(references(config, sides)["boosted trees"].log_loss)
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


@pytest.mark.parametrize(
    "options", [{"predicts": "joint"}, {"predicts": "conditional", "keep_leaves": False}], ids=str
)
def test_thresholds_keep_what_their_rules_submit(
    options: dict[str, Any], fits: Fits, source: LoggedNodes
) -> None:
    def rule(beta: float) -> Any:
        return build_shape(shape_of(fits["c2t"]).model_copy(update={"beta": beta, **options}))

    curve, kept = trace_curve(source, rule(0.0), NODE_PROMPTS), []
    for index in (40, 60, 75, 90):
        submitted = accepted = 0
        for batch in source.batches(rule(BETAS[index])):
            chosen = batch.submitted.clamp(min=0)
            submitted += int((batch.submitted > 0).sum())
            accepted += int((batch.accepted.gather(1, chosen) & (batch.submitted > 0)).sum())
        point = curve.point(index)
        assert curve.kept[:, index].sum() == submitted
        assert curve.accepted[:, index].sum() == accepted
        assert point.num_tokens == pytest.approx(1 + submitted / 2048)
        assert point.recall == pytest.approx(accepted / curve.longest.sum())
        kept.append(submitted)
    assert kept[0] > 2 * kept[-1] > 0


JOINT = build_shape(JointThreshold(depth=DEPTH, top_k=TOP_K, min_prob=0.0))


@pytest.fixture(scope="module")
def joint(source: LoggedNodes) -> Curve:
    return trace_curve(source, JOINT, NODE_PROMPTS)


@pytest.mark.parametrize(("missing", "lacking"), [(0, []), (3.2, [0.9, 0.95])])
def test_recalls_that_a_narrow_log_cannot_judge_have_no_figures(
    joint: Curve, missing: float, lacking: list[float]
) -> None:
    curve = replace(joint, num_missing=int(missing * joint.num_positions))
    rows = compared(curve, joint, 0)
    assert [row.recall for row in rows] == list(RECALLS)
    assert [row.recall for row in rows if row.num_tokens is None] == lacking
    assert all(row.found_change is None for row in rows if row.recall in lacking)


def test_a_recall_has_a_threshold_and_a_size(joint: Curve) -> None:
    index = joint.index_of_recall(0.7)
    assert index is not None
    assert joint.point(index).recall >= 0.7 > joint.point(index + 1).recall
    assert choose_beta(joint, c2t_config(recall=0.7)) == joint.betas[index]
    [tokens] = joint.tokens_at_recall(0.7)
    assert joint.point(index + 1).num_tokens <= tokens <= joint.point(index).num_tokens
    assert joint.index_of_recall(1.01) is None
    assert np.isnan(joint.tokens_at_recall(1.01)).all()


def test_areas_agree_with_scikit_learn(source: LoggedNodes, joint: Curve) -> None:
    from sklearn.metrics import roc_auc_score

    scores, labels = [], []
    for batch in source.batches(JOINT):
        known = batch.known.clone()
        known[:, 0] = False
        scores.append(batch.scores[known])  # type: ignore[index]
        labels.append(batch.accepted[known])
    area = roc_auc_score(torch.cat(labels), torch.cat(scores))
    assert joint.calibration.auc() == pytest.approx(area, abs=1e-4)


@pytest.mark.parametrize("shift", [0.0, 0.04])
def test_error_of_known_size_is_found_and_chance_is_taken_off(shift: float) -> None:
    """Chance alone gives gaps of 0.011; the mean's standard error is 0.0035."""
    random = np.random.default_rng(3)
    prob = random.uniform(0.2, 0.8, 20_000)
    accepted = random.random(20_000) < prob
    order = np.argsort(prob)
    cells = [np.ones(20_000), accepted[order].astype(float), (prob + shift)[order]]
    debiased, plain = calibration_errors(*equal_mass(*cells))
    assert plain > 0.006
    assert abs(debiased - shift) < 0.014
