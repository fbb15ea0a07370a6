"""`fit adasd`: what is measured, on which prompts it is chosen, and what may be certified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specctl.artifacts import load_artifact
from specctl.collect.prompts import Prompt
from specctl.errors import EvidenceError, TraceMismatchError
from specctl.policy import JensenShannon, Policy
from specctl.train import adasd
from specctl.train.paired import Plan
from specctl.train.quality import Sweep
from specctl.train.report import save_fit
from tests.artifacts.examples import PAIR, sha
from tests.train.cases import ADASD, CLIPS, likes, measure, stop_fit, swept, tokens


@pytest.fixture(scope="module")
def fit() -> adasd.StopFit:
    return stop_fit()


def test_signals_are_those_of_the_two_classes() -> None:
    values = np.array([0.0, 1.0, 2.0, 2.0, 3.0, np.nan] * 20)
    accepted = np.array([True, True, True, False, False, False] * 20)
    signal = adasd.signal_of(values, accepted)
    assert (signal.accepted_mean, signal.rejected_mean) == (1.0, 2.5)
    good, bad = [0.0, 1.0, 2.0], [2.0, 3.0]
    wins = sum((b > g) + (b == g) / 2 for g in good for b in bad)
    assert signal.auc == pytest.approx(wins / 6)
    assert (sum(signal.accepted), sum(signal.rejected)) == (60, 40), "NaN is no token"
    with pytest.raises(EvidenceError, match="collect dense traces of more prompts"):
        adasd.signal_of(np.ones(40), np.arange(40) < 20)


def test_the_cheapest_setting_of_each_family_is_kept(fit: adasd.StopFit) -> None:
    shape = fit.shape
    assert (shape.between, shape.prior_weight, shape.window) == ("rejected", 8.0, 6)
    assert shape.prior_accepted == pytest.approx(fit.entropy.accepted_mean)
    assert shape.prior_rejected == pytest.approx(3.0, rel=0.1)
    assert 0.2 < fit.distance.accepted_mean < 0.4 < fit.distance.rejected_mean
    names = [row.name for row in fit.rows]
    assert names[:3] == ["chain: 5", "chain: 4", "confidence: 0.3"]
    assert names[-1] == "AdaSD: rejected, warm 8"
    assert len(names) == len(set(names)) == 3 + 4
    assert fit.rows[-1].against.value == pytest.approx(0.9)
    assert fit.rows[0].against.value == pytest.approx(2.0)


def test_a_cold_start_has_no_prior() -> None:
    def cold(policy: Policy, name: str) -> float:
        return likes(policy, name) + 5 * getattr(policy.shape, "prior_weight", 0)

    shape = adasd.fit_stop(tokens(), measure(cold), ADASD).shape
    assert (shape.prior_weight, shape.prior_accepted) == (0.0, None)


def test_a_log_without_distances_fits_the_stop_and_no_clip() -> None:
    """Serving engines keep no distribution of their drafter."""
    given = tokens()
    lacking = replace(given, distance=np.full_like(given.distance, np.nan))
    fit = adasd.fit_stop(lacking, measure(likes), ADASD)
    assert fit.shape == adasd.fit_stop(given, measure(likes), ADASD).shape
    report = adasd.adasd_fit(fit).report
    assert report.metrics["distance_auc"] is None
    assert any("no js_distance" in line for line in report.summary)
    with pytest.raises(EvidenceError, match="js_distance"):
        fit.known_distance()


def sweep(fit: adasd.StopFit, *lost: int) -> Sweep:
    policies = [adasd.clipped(fit.shape, fit.distance, CLIPS, clip) for clip in CLIPS.clips]
    return swept(policies, CLIPS.contract, *lost)


def test_the_acceptance_starts_as_warm_as_the_stop(fit: adasd.StopFit) -> None:
    acceptance = adasd.clipped(fit.shape, fit.distance, CLIPS, 0.2).acceptance
    assert isinstance(acceptance, JensenShannon)
    assert (acceptance.max_threshold, acceptance.prior_weight) == (0.2, 8.0)
    assert acceptance.prior_rejected == pytest.approx(fit.distance.rejected_mean)
    none = {"prior_accepted": None, "prior_rejected": None, "prior_weight": 0.0}
    cold = fit.shape.model_copy(update=none)
    assert adasd.clipped(cold, fit.distance, CLIPS, 0.2).acceptance.prior_accepted is None


def test_runs_that_could_certify_nothing_are_refused() -> None:
    checkable = Plan([Prompt("a", "", ("1 + 1?",), "2"), Prompt("b", "", ("Hello",))])
    adasd.check_runs(checkable, PAIR, PAIR)
    other = PAIR.model_copy(update={"drafter_digest": sha("e")})
    with pytest.raises(TraceMismatchError, match="name that pair"):
        adasd.check_runs(checkable, other, PAIR)
    with pytest.raises(EvidenceError, match="checkable"):
        adasd.check_runs(Plan([Prompt("b", "", ("Hello",))]), PAIR, PAIR)


def test_a_certified_acceptance_is_lossy_and_states_its_promise(
    fit: adasd.StopFit, tmp_path: Path
) -> None:
    clip = adasd.judge_clips(sweep(fit, 0, 1, 20), CLIPS, {"device": "a CPU"}, tmp_path)
    assert (clip.chosen, clip.num_prompts, clip.num_checked) == (0, 200, 200)
    clip = clip.model_copy(update={"chosen": 1})
    save_fit(adasd.adasd_fit(fit, clip), tmp_path / "policy", PAIR, sha("d"))
    artifact = load_artifact(tmp_path / "policy", expect=PAIR)
    assert not artifact.manifest.lossless
    assert isinstance(artifact.policy.acceptance, JensenShannon)
    assert artifact.policy.acceptance.max_threshold == 0.2
    plain = adasd.adasd_fit(fit).report
    assert "stays strict" in plain.promise
    assert "the artifact is lossless" in plain.summary[-1]
    card = (tmp_path / "policy" / "README.md").read_text()
    for text in ("**Lossy**", "clipped at 0.2", "confidence 0.9", "--allow-lossy", "refused"):
        assert text in card
    evidence = artifact.manifest.evidence
    assert evidence is not None
    assert evidence.metrics["mean_loss"].value == pytest.approx(1 / 200)


def test_a_refused_contract_keeps_its_report(fit: adasd.StopFit, tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"clip 0\.1"):
        adasd.judge_clips(sweep(fit, 9, 0, 0), CLIPS, {}, tmp_path)
    assert (tmp_path / "report.json").is_file()
