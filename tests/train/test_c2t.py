"""`fit c2t`: beta by its rule, the report, the studies, the artifact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specctl.artifacts import load_artifact, twin_log_odds
from specctl.errors import ArtifactError, TraceEmptyError, UsageError
from specctl.logs.logged_nodes import LoggedNodes
from specctl.policy.records import FfnScorer, ScoredTree
from specctl.train.c2t import C2TFit, fit_c2t
from specctl.train.c2t_artifact import c2t_publication
from specctl.train.c2t_config import C2TConfig
from specctl.train.c2t_report import C2TReport, report_json
from specctl.train.c2t_study import HIDDEN, _subsets, check_study, run_study
from specctl.train.c2t_table import study_rows, table_rows
from specctl.train.publish import save_fit
from specctl.train.scored_fit import choose_beta
from tests.artifacts.examples import PAIR, sha
from tests.train.node_cases import c2t_config, node_source

PROMPTS = tuple(f"p{number:06d}" for number in range(16))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LoggedNodes:
    return node_source(tmp_path_factory.mktemp("log") / "log", num_prompts=16)


@pytest.fixture(scope="module")
def fit(source: LoggedNodes) -> C2TFit:
    return fit_c2t(source, PROMPTS, c2t_config(recall=0.7, held_out_frac=0.4))


@pytest.fixture(scope="module")
def studied(source: LoggedNodes, fit: C2TFit) -> C2TFit:
    ffn = fit.config.ffn.model_copy(update={"epochs": 1})
    quick = replace(fit, config=fit.config.model_copy(update={"ffn": ffn}))
    report = fit.report.model_copy(update={"study": run_study(source, quick)})
    return replace(fit, report=report)


def shape_of(fit: C2TFit) -> ScoredTree:
    shape = fit.policy.shape
    assert isinstance(shape, ScoredTree)
    return shape


def test_policy_is_what_was_asked_for(fit: C2TFit) -> None:
    shape = shape_of(fit)
    assert (shape.predicts, shape.depth, shape.first_top_k, shape.second_top_k) == (
        "conditional",
        4,
        3,
        3,
    )
    assert isinstance(shape.scorer, FfnScorer)
    assert shape.scorer.features == ("draft_logp", "parent_entropy", "depth")
    assert shape.beta == fit.report.beta


def test_sides_share_no_prompt(fit: C2TFit) -> None:
    assert set(fit.sides.train.prompt_ids) == set(fit.sides.split.train)
    assert set(fit.sides.held_out.prompt_ids) == set(fit.sides.split.held_out)
    assert not set(fit.sides.split.train) & set(fit.sides.split.held_out)
    assert sum(side.num_prompts for side in fit.report.sides.values()) == 16
    assert sum(side.num_positions for side in fit.report.sides.values()) == 16 * 128


def test_beta_is_the_highest_that_keeps_the_recall_on_training_prompts(fit: C2TFit) -> None:
    assert fit.report.train.recall >= 0.7
    assert fit.report.train.beta == fit.report.beta == fit.report.held_out.beta
    above = [point for point in fit.report.curve if point.beta > fit.report.beta]
    assert above
    assert fit.report.held_out.recall == pytest.approx(0.7, abs=0.06)


def test_it_finds_the_law_of_the_log(fit: C2TFit) -> None:
    """Children are taken with the drafter's probability, so the joint probability is the best
    score there is: the fit must come near it, and be calibrated. The area's standard error over
    these prompts is about 0.005."""
    assert fit.report.auc > fit.report.joint_auc - 0.02
    assert fit.report.calibration[0].ece < 0.03
    assert fit.report.label.auc > 0.75
    assert fit.report.label.log_loss < 0.48  # 0.59 of the base rate alone
    by_recall = {row.recall: row for row in fit.report.comparisons}
    assert by_recall[0.7].change == pytest.approx(0.0, abs=0.12)
    assert by_recall[0.7].change_interval is not None
    assert by_recall[0.7].change_interval.low < by_recall[0.7].change_interval.high


def test_beta_asked_for_is_kept_exactly(source: LoggedNodes) -> None:
    config = c2t_config({"predicts": "joint"}, beta=0.123)
    found = fit_c2t(source, PROMPTS, config)
    assert found.report.beta == shape_of(found).beta == 0.123
    assert found.report.held_out.beta == 0.123
    assert 0 < found.report.held_out.num_tokens < found.report.curve[0].num_tokens


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"beta": 1.0}, "beta 1: expected a threshold that some node reaches"),
        ({"recall": 0.999999}, "--recall 0.999999: expected a share of accepted tokens"),
    ],
)
def test_thresholds_that_cannot_be_are_refused(
    changes: dict[str, float], told: str, source: LoggedNodes
) -> None:
    narrow = {"second_top_k": 1} if "recall" in changes else {}
    with pytest.raises(UsageError, match=told):
        fit_c2t(source, PROMPTS, c2t_config(narrow, **changes))


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ({"depth": 9}, "--depth: expected at most 4, which the traces hold, found 9"),
        ({"first_top_k": 5}, "--first-top-k: expected at most 3"),
        ({"second_top_k": 5}, "--second-top-k: expected at most 3"),
    ],
)
def test_more_than_the_log_holds_is_refused(
    nodes: dict[str, int], told: str, source: LoggedNodes
) -> None:
    with pytest.raises(UsageError, match=told):
        fit_c2t(source, PROMPTS, c2t_config(nodes))


def test_one_prompt_is_refused(source: LoggedNodes) -> None:
    with pytest.raises(TraceEmptyError, match="at least 2 prompts"):
        fit_c2t(source, PROMPTS[:1], c2t_config())


def test_same_seed_same_policy(source: LoggedNodes, fit: C2TFit) -> None:
    again = fit_c2t(source, PROMPTS, fit.config)
    assert again.policy == fit.policy
    assert report_json(again.report) == report_json(fit.report)


def test_report_is_read_back(studied: C2TFit) -> None:
    data = report_json(studied.report)
    assert C2TReport.model_validate_json(data) == studied.report
    assert len(table_rows(studied.report)) == 6


def test_studies_cover_features_sizes_and_categories(studied: C2TFit) -> None:
    study = studied.report.study
    assert study is not None
    assert len(study.ablation) == 7  # every subset of three
    assert [row.name for row in study.hidden] == [f"hidden {size}" for size in HIDDEN]
    assert [(row.name, row.tested_on) for row in study.transfer[:4]] == [
        ("all", "arithmetic"),
        ("all", "code"),
        ("all", "prose"),
        ("arithmetic", "arithmetic"),
    ]
    assert len(study.transfer) == 12
    tuned = [row for row in study.fine_tuning if row.name == "others, then 10% of it"]
    assert {row.tested_on for row in tuned} == {"arithmetic", "code", "prose"}
    assert all(row.num_rows < studied.report.sides["train"].num_accepted for row in tuned)
    assert len(study_rows(study)) == 7 + 6 + 12 + 9
    alone = next(row for row in study.ablation if row.name == "depth")
    full = study.ablation[-1]
    assert full.auc is not None
    assert alone.auc is not None
    assert full.auc > alone.auc + 0.05  # depth alone says little: Table 1's H + d


def test_many_features_are_left_out_one_by_one() -> None:
    assert list(_subsets(4)) == [(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3), (0, 1, 2, 3)]
    assert len(list(_subsets(2))) == 3


def test_study_needs_a_recall() -> None:
    with pytest.raises(UsageError, match="--study with --beta"):
        check_study(C2TConfig(beta=0.1))


def test_artifact_loads_and_its_twin_says_the_same(studied: C2TFit, tmp_path: Path) -> None:
    publication = c2t_publication(studied, PAIR, sha("d"))
    save_fit(publication, tmp_path / "policy", PAIR)
    artifact = load_artifact(tmp_path / "policy", expect=PAIR)
    assert artifact.policy == studied.policy
    assert artifact.manifest.features == ("draft_logp", "parent_entropy", "depth")
    assert artifact.manifest.fit == {"kind": "c2t", **studied.config.model_dump(mode="json")}
    evidence = artifact.manifest.evidence
    assert evidence is not None
    assert (evidence.num_prompts, evidence.num_rounds) == (16, 2048)
    assert evidence.metrics["held_out_recall"].value == studied.report.held_out.recall
    odds = twin_log_odds(tmp_path / "policy" / "policy.onnx", studied.sides.held_out.features[:50])
    assert np.isfinite(odds).all()
    report = json.loads((tmp_path / "policy" / "report.json").read_bytes())
    assert report["beta"] == studied.report.beta
    assert (tmp_path / "policy" / "report.png").read_bytes().startswith(b"\x89PNG")
    card = (tmp_path / "policy" / "README.md").read_text()
    for words in ("toy target", sha("d"), "draft_logp", "| 0.70 |", "fine_tuning", "embedded"):
        assert words in card


def test_twin_of_another_network_stops_the_publication(fit: C2TFit, tmp_path: Path) -> None:
    publication = c2t_publication(fit, PAIR, sha("d"))
    scorer = shape_of(fit).scorer.model_copy(update={"b2": (3.0,)})
    shape = shape_of(fit).model_copy(update={"scorer": scorer})
    other = replace(publication, policy=fit.policy.model_copy(update={"shape": shape}))
    with pytest.raises(ArtifactError, match="E_TWIN"):
        save_fit(other, tmp_path / "policy", PAIR)
    assert not (tmp_path / "policy").exists()


def test_choice_reads_the_curve_alone(fit: C2TFit) -> None:
    config = c2t_config(recall=0.5)
    beta = choose_beta(fit.judged.curve, config)
    at = fit.judged.curve.index_of(beta)
    assert fit.judged.curve.point(at).recall >= 0.5 > fit.judged.curve.point(at + 1).recall
