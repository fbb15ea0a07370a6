"""`fit mars` on the embedded pair: the sweep, the exactness of what it copies and foresees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specctl.artifacts import load_artifact
from specctl.collect.dense import collect_dense
from specctl.collect.prompts import load_prompts
from specctl.errors import EvidenceError, UsageError
from specctl.logs.fit_data import Openings
from specctl.logs.trace_set import TraceSet
from specctl.policy import Chain, FullTree, Policy
from specctl.policy.mars import bound
from specctl.replay.fit_inputs import logged_openings
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, load_pair
from specctl.train.configs import Contract, MarsConfig, PairedConfig
from specctl.train.mars import check_mode, fit_mars, hazards, opening_of, screened, sweep, unchanged
from specctl.train.paired import Plan, RunFolder, first_difference, run_prompts
from specctl.train.quality import Sweep
from specctl.train.report import save_fit

BASE = Policy(shape=Chain(num_draft_tokens=4))
NEW_TOKENS = 32
CONFIG = MarsConfig(
    form="prob_ratio", thetas=(0.6, 0.3, 0.1), contract=Contract(max_loss=0.4, confidence=0.8)
)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu")


@pytest.fixture(scope="module")
def plan() -> Plan:
    prompts = load_prompts("embedded")
    return Plan([*prompts[:4], *prompts[70:74], *prompts[-4:]], DecodeSettings(NEW_TOKENS), 1, 12)


@pytest.fixture(scope="module")
def found(pair: Pair, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    folder = tmp_path_factory.mktemp("mars") / "runs"
    runs = RunFolder.open(folder, plan.header(pair.fingerprint), resume=False)
    return sweep(pair, BASE, plan, CONFIG, runs)


def test_copied_answers_are_those_that_decoding_would_give(
    pair: Pair, plan: Plan, found: Sweep, tmp_path: Path
) -> None:
    runs = RunFolder.open(tmp_path / "runs", plan.header(pair.fingerprint), resume=False)
    fresh = run_prompts(pair, found.policies[1], plan, runs)
    swept = found.relaxed[1]
    copied = [key for key, answer in swept.items() if answer.is_copied]
    decoded = [key for key, answer in swept.items() if not answer.is_copied]
    assert copied, "nothing was copied: equality would prove nothing"
    assert decoded, "nothing was relaxed: equality would prove nothing"
    for key in swept:
        assert fresh[key].token_ids == swept[key].token_ids
        assert fresh[key].calls == swept[key].calls
        assert fresh[key].num_relaxed == swept[key].num_relaxed


def test_closeness_in_another_form_says_nothing(pair: Pair, found: Sweep) -> None:
    acceptance = CONFIG.acceptance(0.6)
    here = opening_of(CONFIG, pair)
    margin = opening_of(MarsConfig(form="margin", thetas=(0.1,)), pair)
    denying = opening_of(CONFIG.model_copy(update={"deny_token_ids": (7,)}), pair)
    assert unchanged(found.strict, acceptance, here)
    assert unchanged(found.strict, acceptance, margin) == {}
    assert unchanged(found.strict, acceptance, denying) == {}


def test_texts_leave_the_strict_one_where_they_are_first_relaxed(found: Sweep) -> None:
    for answers in found.relaxed:
        for key, answer in answers.items():
            differs = first_difference(found.strict[key], answer) is not None
            assert differs == (answer.num_relaxed > 0)


def test_dense_traces_foretell_who_leaves_the_strict_text_and_where(
    pair: Pair, plan: Plan, found: Sweep, tmp_path: Path
) -> None:
    shape = FullTree(depth=4, top_k=1)
    collect_dense(pair, plan.prompts, plan.settings, tmp_path / "traces", shape, batch_size=12)
    traces = TraceSet.open(tmp_path / "traces")
    config = CONFIG.model_copy(update={"deny_token_ids": tuple(sorted(pair.target.eos_ids))})
    told = logged_openings(traces, pair.fingerprint, BASE, config.acceptance(0.5))
    bounds = [bound(config.acceptance(theta)) for theta in config.thetas]
    for hazard, least, answers in zip(hazards(told, bounds), bounds, found.relaxed, strict=True):
        places = [first_difference(found.strict[key], answers[key]) for key in answers]
        lived = sorted(place for place in places if place is not None)
        assert lived
        assert hazard.diverged.value == len(lived) / len(answers)
        opening = told.closeness > least
        _, first = np.unique(told.text[opening], return_index=True)
        assert sorted(told.place[opening][first].tolist()) == lived


def test_traces_cut_the_lax_end_of_the_sweep(pair: Pair) -> None:
    found = Openings(
        num_tokens=np.array([10, 10]),
        text=np.array([0, 0, 1]),
        place=np.array([2, 5, 4]),
        closeness=np.array([-np.inf, 0.4, 0.2], np.float32),
    )
    config, hazard = screened(CONFIG, found, 0.5)
    assert config.thetas == (0.6, 0.3)
    assert [h.diverged.value for h in hazard] == [0.0, 0.5]
    assert hazard[1].median_place == 5
    assert hazard[1].per_token.value == 1 / (6 + 10)
    with pytest.raises(UsageError, match="at least 1"):
        screened(CONFIG.model_copy(update={"thetas": (0.1,)}), found, 0.5)
    with pytest.raises(UsageError, match="0 to 1"):
        screened(CONFIG, found, 1.5)


def folder_of(path: Path) -> RunFolder:
    return RunFolder.open(path, {}, resume=False)


def test_a_certified_theta_becomes_an_artifact_that_loads(
    pair: Pair, plan: Plan, found: Sweep, tmp_path: Path
) -> None:
    fit = fit_mars(found, CONFIG, plan.setup(pair), folder_of(tmp_path / "runs"))
    assert fit.data.chosen is not None
    save_fit(fit, tmp_path / "policy", pair.fingerprint, found.digest)
    artifact = load_artifact(tmp_path / "policy", expect=pair.fingerprint)
    assert artifact.policy == fit.policy == found.policies[fit.data.chosen]
    assert not artifact.policy.lossless
    evidence = artifact.manifest.evidence
    assert evidence is not None
    assert evidence.num_prompts == 12
    assert evidence.metrics["p_value"].value == fit.data.rows[fit.data.chosen].trial.p_value
    card = (tmp_path / "policy" / "README.md").read_text()
    for words in ("Lossy", "Certified: at theta", "8 with checkable", "--allow-lossy"):
        assert words in card
    for place in ("policy", "runs"):
        report = json.loads((tmp_path / place / "report.json").read_text())
        assert report["num_checked"] == 8
        assert (tmp_path / place / "report.png").read_bytes().startswith(b"\x89PNG")
    [table] = fit.report.tables
    assert len(table.rows) == 1 + len(CONFIG.thetas)


def test_a_refused_contract_publishes_nothing(found: Sweep, tmp_path: Path) -> None:
    strict = Contract(max_loss=0.02, confidence=0.9)
    config = CONFIG.model_copy(update={"contract": strict})
    refused = Sweep(found.base, found.policies, found.strict, found.relaxed, strict)
    folder = folder_of(tmp_path / "runs")
    with pytest.raises(EvidenceError, match=r"theta 0.6.*over 8 prompts"):
        fit_mars(refused, config, {}, folder)
    assert json.loads((folder.path / "report.json").read_text())["chosen"] is None


def test_modes_that_the_sampling_contradicts_are_refused() -> None:
    with pytest.raises(UsageError, match="alg1"):
        check_mode("alg1", greedy=False)
    with pytest.raises(UsageError, match="temperature"):
        check_mode("code_v1", greedy=True)
    with pytest.raises(UsageError, match="greedy answers repeat"):
        PairedConfig(num_seeds=3)
    assert PairedConfig().loss_kind == "binary"
    assert PairedConfig(num_seeds=3, temperature=1.0).loss_kind == "bounded"
    assert PairedConfig(loss="net").loss_kind == "net"
