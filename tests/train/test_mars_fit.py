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
from specctl.logs.trace_set import TraceSet
from specctl.policy import Chain, FullTree, Policy
from specctl.policy.mars import bound
from specctl.replay.fit_inputs import logged_openings, open_dense
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.observe import Sampling
from specctl.train.hazard import hazards
from specctl.train.mars import MarsConfig, MarsSweep, judge_sweep, opening_of, sweep, unchanged
from specctl.train.mars_artifact import mars_publication
from specctl.train.mars_options import mars_config, plan_of, screened
from specctl.train.mars_report import build_report, render_report, report_png
from specctl.train.paired import Plan, first_difference, run_prompts
from specctl.train.publish import save_fit
from specctl.train.quality import Contract
from specctl.train.runs import RunFolder

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
def found(pair: Pair, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> MarsSweep:
    folder = tmp_path_factory.mktemp("mars") / "runs"
    runs = RunFolder.open(folder, plan.header(pair.fingerprint), resume=False)
    return sweep(pair, BASE, plan, CONFIG, runs)


def test_copied_answers_are_those_that_decoding_would_give(
    pair: Pair, plan: Plan, found: MarsSweep, tmp_path: Path
) -> None:
    runs = RunFolder.open(tmp_path / "runs", plan.header(pair.fingerprint), resume=False)
    fresh = run_prompts(pair, found.policy(1), plan, runs)
    swept = found.relaxed[1]
    copied = [key for key, answer in swept.items() if answer.is_copied]
    decoded = [key for key, answer in swept.items() if not answer.is_copied]
    assert copied, "nothing was copied: equality would prove nothing"
    assert decoded, "nothing was relaxed: equality would prove nothing"
    for key in swept:
        assert fresh[key].token_ids == swept[key].token_ids
        assert fresh[key].calls == swept[key].calls
        assert fresh[key].num_relaxed == swept[key].num_relaxed


def test_closeness_in_another_form_says_nothing(pair: Pair, found: MarsSweep) -> None:
    acceptance = found.config.acceptance(0.6)
    here = opening_of(found.config, pair)
    margin = opening_of(MarsConfig(form="margin", thetas=(0.1,)), pair)
    denying = opening_of(found.config.model_copy(update={"deny_token_ids": (7,)}), pair)
    assert unchanged(found.strict, acceptance, here)
    assert unchanged(found.strict, acceptance, margin) == {}
    assert unchanged(found.strict, acceptance, denying) == {}


def test_texts_leave_the_strict_one_where_they_are_first_relaxed(found: MarsSweep) -> None:
    for answers in found.relaxed:
        for key, answer in answers.items():
            differs = first_difference(found.strict[key], answer) is not None
            assert differs == (answer.num_relaxed > 0)


def test_dense_traces_foretell_who_leaves_the_strict_text_and_where(
    pair: Pair, plan: Plan, found: MarsSweep, tmp_path: Path
) -> None:
    shape = FullTree(depth=4, top_k=1)
    collect_dense(pair, plan.prompts, plan.settings, tmp_path / "traces", shape, batch_size=12)
    opened = open_dense(TraceSet.open(tmp_path / "traces"), pair.fingerprint)
    config = CONFIG.model_copy(update={"deny_token_ids": tuple(sorted(pair.target.eos_ids))})
    told = logged_openings(opened, BASE, config.acceptance(0.5))
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
    class Told:
        num_tokens = np.array([10, 10])
        text, place = np.array([0, 0, 1]), np.array([2, 5, 4])
        closeness = np.array([-np.inf, 0.4, 0.2], np.float32)

    config, hazard = screened(CONFIG, Told(), 0.5)
    assert config.thetas == (0.6, 0.3)
    assert [h.diverged.value for h in hazard] == [0.0, 0.5]
    assert hazard[1].median_place == 5
    assert hazard[1].per_token.value == 1 / (6 + 10)
    with pytest.raises(UsageError, match="at least 1"):
        screened(CONFIG.model_copy(update={"thetas": (0.1,)}), Told(), 0.5)
    with pytest.raises(UsageError, match="0 to 1"):
        screened(CONFIG, Told(), 1.5)


def test_a_certified_theta_becomes_an_artifact_that_loads(
    pair: Pair, plan: Plan, found: MarsSweep, tmp_path: Path
) -> None:
    report = build_report(found, pair, plan)
    assert report.chosen is not None
    publication = mars_publication(found, report, pair.fingerprint)
    save_fit(publication, tmp_path / "policy", pair.fingerprint)
    artifact = load_artifact(tmp_path / "policy", expect=pair.fingerprint)
    assert artifact.policy == found.policy(report.chosen)
    assert not artifact.policy.lossless
    evidence = artifact.manifest.evidence
    assert evidence is not None
    assert evidence.num_prompts == 12
    assert evidence.metrics["p_value"].value == report.rows[report.chosen].trial.p_value
    card = (tmp_path / "policy" / "README.md").read_text()
    for words in ("Lossy", "Certified: at confidence 0.8", "8 with checkable", "--allow-lossy"):
        assert words in card
    assert json.loads((tmp_path / "policy" / "report.json").read_text())["num_checked"] == 8
    assert report_png(report).startswith(b"\x89PNG")
    assert len(render_report(report).rows) == 1 + len(CONFIG.thetas)


def test_a_refused_contract_publishes_nothing(found: MarsSweep) -> None:
    strict = Contract(max_loss=0.02, confidence=0.9)
    asked = found.config.model_copy(update={"contract": strict})
    refused = judge_sweep(MarsSweep(found.base, asked, found.strict, found.relaxed))
    with pytest.raises(EvidenceError, match=r"theta 0.6.*over 8 prompts"):
        refused.require_any([f"theta {theta:g}" for theta in asked.thetas])


# --------------------------------------------------------------------------- options


def options(plan: Plan, **changes: object) -> MarsConfig:
    given = {
        "mode": "sound",
        "form": "ratio",
        "thetas": None,
        "deny": "",
        "special_ids": (0, 2),
        "max_loss": 0.02,
        "confidence": 0.9,
        "loss": "one-sided",
    }
    return mars_config(plan, **{**given, **changes})  # type: ignore[arg-type]


GREEDY = Plan([], DecodeSettings(8))
SAMPLED = plan_of([], DecodeSettings(8, Sampling(temperature=1.0)), 3, 1)


def test_options_become_a_configuration() -> None:
    config = options(GREEDY, deny="7,5")
    assert config.thetas == (0.96, 0.94, 0.92, 0.90, 0.88, 0.86, 0.84)
    assert config.deny_token_ids == (0, 2, 5, 7)
    assert config.contract.kind == "binary"
    assert options(SAMPLED).contract.kind == "bounded"
    assert options(SAMPLED, loss="net").contract.kind == "net"
    assert options(GREEDY, form="margin", thetas="0.5,1,2").thetas == (0.5, 1.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"thetas": "0.9,0.95"}, "strictest on"),
        ({"thetas": "0.9,0.9"}, "strictest on"),
        ({"form": "margin", "thetas": "2,1"}, "strictest on"),
        ({"thetas": "0.9,nan"}, "comma-separated"),
        ({"thetas": "1.2"}, "at most 1"),
        ({"thetas": "high"}, "comma-separated"),
        ({"deny": "a"}, "comma-separated"),
        ({"deny": "-1"}, "deny_token_ids"),
        ({"form": "entropy"}, "form"),
        ({"mode": "alg2"}, "mode"),
        ({"mode": "code_v1"}, "temperature"),
        ({"max_loss": 0.0}, "max_loss"),
        ({"max_loss": 1.0}, "max_loss"),
        ({"confidence": 1.5}, "confidence"),
        ({"loss": "log"}, "one-sided or net"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options(GREEDY, **changes)


def test_modes_that_a_temperature_contradicts_are_refused() -> None:
    with pytest.raises(UsageError, match="alg1"):
        options(SAMPLED, mode="alg1")
    with pytest.raises(UsageError, match="greedy answers repeat"):
        plan_of([], DecodeSettings(8), 3, 1)
