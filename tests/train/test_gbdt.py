"""`fit gbdt`: the report, distillation, the artifact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specctl.artifacts import load_artifact
from specctl.errors import ArtifactError, TraceEmptyError, UsageError
from specctl.logs.logged_nodes import LoggedNodes
from specctl.policy.records import FfnScorer, Policy, ScoredTree, TreesScorer
from specctl.train.c2t_report import log_odds, report_json
from specctl.train.gbdt import GbdtFit, fit_gbdt, validation_rows
from specctl.train.gbdt_artifact import gbdt_publication
from specctl.train.gbdt_config import GbdtConfig
from specctl.train.gbdt_report import GbdtReport, quality_rows, summary
from specctl.train.publish import save_fit
from specctl.train.trees import TreesConfig
from specctl.train.twin import check_scorer_twin
from tests.artifacts.examples import PAIR, sha
from tests.train.node_cases import c2t_config, node_source

PROMPTS = tuple(f"p{number:06d}" for number in range(16))
FEATURES = ("joint_logp", "draft_logp", "parent_entropy", "depth")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LoggedNodes:
    return node_source(tmp_path_factory.mktemp("log") / "log", num_prompts=16)


def config_of(**changes: object) -> GbdtConfig:
    """A fit of a second."""
    base = c2t_config({"features": FEATURES, "negatives": 0.0}, recall=0.7, held_out_frac=0.4)
    trees = TreesConfig(num_trees=40, num_leaves=7, min_rows=30, patience=5)
    return GbdtConfig(**{**dict(base), "trees": trees, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fit(source: LoggedNodes) -> GbdtFit:
    return fit_gbdt(source, PROMPTS, config_of())


@pytest.fixture(scope="module")
def distilled(source: LoggedNodes) -> GbdtFit:
    return fit_gbdt(source, PROMPTS, config_of(distill=True))


def test_the_policy_is_of_trees(fit: GbdtFit) -> None:
    shape = fit.policy.shape
    assert isinstance(shape, ScoredTree)
    assert isinstance(shape.scorer, TreesScorer)
    assert (shape.predicts, shape.depth, shape.beta) == ("conditional", 4, fit.report.beta)
    assert fit.policy.lossless


def test_three_disjoint_sets_of_prompts(fit: GbdtFit) -> None:
    rows = fit.sides.train
    validation = validation_rows(rows, fit.config)
    stops, trains = (set(rows.prompt[chosen].tolist()) for chosen in (validation, ~validation))
    assert stops
    assert trains
    assert not stops & trains
    assert not {rows.prompt_ids[c] for c in stops | trains} & set(fit.sides.split.held_out)


def test_it_finds_the_law_of_the_log(fit: GbdtFit) -> None:
    """As `test_c2t`: the drafter's probability is the law, so nothing can beat it by much."""
    drafter, trees = fit.report.quality["drafter"], fit.report.quality["trees"]
    assert trees.log_loss == pytest.approx(drafter.log_loss, abs=0.02)
    assert trees.auc > 0.75
    assert fit.report.auc > fit.report.joint_auc - 0.02
    assert fit.report.calibration[0].ece < 0.03
    assert fit.report.joint_ece < 0.03
    gains = fit.report.boosted.gains
    assert max(gains, key=gains.__getitem__) == "draft_logp"


def test_the_network_says_what_the_trees_say(distilled: GbdtFit) -> None:
    assert isinstance(distilled.scorer, FfnScorer)
    found = distilled.report.fidelity
    assert found is not None
    assert found.correlation > 0.9
    gap = log_odds(distilled.scorer, distilled.sides.held_out) - log_odds(
        distilled.trees, distilled.sides.held_out
    )
    assert found.mean_gap == pytest.approx(float(np.abs(gap).mean()))
    assert set(distilled.report.quality) == {
        "trees",
        "network of labels",
        "network of trees",
        "drafter",
    }


def test_without_a_network_there_is_no_fidelity(fit: GbdtFit) -> None:
    assert fit.report.fidelity is None
    assert "network of trees" not in fit.report.quality


def test_sampled_negatives_leave_the_odds_alone(source: LoggedNodes, fit: GbdtFit) -> None:
    """Half of the rejected nodes: the trees must speak of all."""
    nodes = fit.config.nodes.model_copy(update={"negatives": 0.7})
    sampled = fit_gbdt(source, PROMPTS, config_of(nodes=nodes, distill=True))
    assert sampled.report.sides["train"].kept_frac < 0.7
    for scorer in (sampled.trees, sampled.scorer):
        shift = log_odds(scorer, fit.sides.held_out) - log_odds(fit.trees, fit.sides.held_out)
        assert float(np.median(shift)) == pytest.approx(0.0, abs=0.2)  # uncorrected: above 0.35


def test_same_seed_same_policy(source: LoggedNodes, fit: GbdtFit) -> None:
    again = fit_gbdt(source, PROMPTS, fit.config)
    assert again.policy == fit.policy
    assert report_json(again.report) == report_json(fit.report)


def test_refusals(source: LoggedNodes) -> None:
    nodes = config_of().nodes.model_copy(update={"depth": 9})
    with pytest.raises(UsageError, match="--depth: expected at most 4"):
        fit_gbdt(source, PROMPTS, config_of(nodes=nodes))
    with pytest.raises(UsageError, match="beta 1: expected a threshold"):
        fit_gbdt(source, PROMPTS, config_of(beta=1.0))
    with pytest.raises(TraceEmptyError, match="at least 2 prompts"):
        fit_gbdt(source, PROMPTS[:1], config_of())


@pytest.mark.parametrize("name", ["fit", "distilled"])
def test_artifact(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found: GbdtFit = request.getfixturevalue(name)
    save_fit(gbdt_publication(found, PAIR, sha("d")), tmp_path / "policy", PAIR)
    artifact = load_artifact(tmp_path / "policy", expect=PAIR)
    assert artifact.policy == found.policy
    assert artifact.manifest.features == FEATURES
    assert artifact.manifest.fit == {"kind": "gbdt", **found.config.model_dump(mode="json")}
    report = (tmp_path / "policy" / "report.json").read_bytes()
    assert GbdtReport.model_validate_json(report) == found.report
    assert json.loads(report)["boosted"]["gains"].keys() == set(FEATURES)
    card = (tmp_path / "policy" / "README.md").read_text()
    for words in ("boosted trees", "toy target", sha("d"), "| trees |", "gain by feature"):
        assert words in card
    assert ("taught by" in card) == found.config.distill
    assert len(quality_rows(found.report)) == len(found.report.quality)
    assert any("published" in line for line in summary(found.report)) == found.config.distill


def test_a_twin_of_other_trees_is_refused(fit: GbdtFit) -> None:
    from specctl.artifacts.onnx_twin import twin_bytes

    value = list(fit.trees.value)
    value[fit.trees.feature.index(-1)] += 0.25
    other = fit.trees.model_copy(update={"value": tuple(value)})
    model = twin_bytes(Policy(shape=ScoredTree(scorer=other, beta=0.1)))
    with pytest.raises(ArtifactError, match="rule's decision on everything held out"):
        check_scorer_twin(fit.trees, fit.sides.held_out.features, model)
    check_scorer_twin(other, fit.sides.held_out.features, model)
