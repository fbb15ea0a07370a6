"""`fit adasd`: what is measured, on which prompts it is chosen, and what may be certified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from specctl.artifacts import describe_artifact, load_artifact
from specctl.collect.formats import Prompt
from specctl.errors import EvidenceError, TraceMismatchError, UsageError
from specctl.policy import Policy
from specctl.policy.records import Chain, EntropyStop, JensenShannon
from specctl.train.adasd import AdasdConfig, StopFit, fit_stop, signal_of
from specctl.train.adasd_artifact import adasd_publication
from specctl.train.adasd_clip import (
    ClipConfig,
    ClipReport,
    ClipRow,
    ClipSweep,
    check_runs,
    clipped,
    judge_clips,
)
from specctl.train.adasd_options import clip_config, stop_config
from specctl.train.adasd_report import AdasdReport, render_report
from specctl.train.paired import Plan, compare_answers
from specctl.train.publish import save_fit
from specctl.train.quality import Contract
from specctl.train.runs import Answer
from tests.artifacts.examples import PAIR, sha

PROMPTS = tuple(f"prompt-{i}" for i in range(40))
CONFIG = AdasdConfig(window=6, weights=(0.0, 8.0), seed=3)


@dataclass(frozen=True)
class Tokens:
    prompt_id: np.ndarray
    accepted: np.ndarray
    entropy: np.ndarray
    distance: np.ndarray


def tokens(num_tokens: int = 4000) -> Tokens:
    """Accepted tokens of entropy around 1 and distance .3, rejected around 3 and .6."""
    rng = np.random.default_rng(0)
    accepted = rng.random(num_tokens) < 0.7
    entropy = rng.gamma(4.0, np.where(accepted, 0.25, 0.75))
    distance = np.clip(rng.normal(np.where(accepted, 0.3, 0.6), 0.1), 0, 1)
    names = np.array(PROMPTS, object)[rng.integers(0, len(PROMPTS), num_tokens)]
    return Tokens(names, accepted, entropy, distance)


@dataclass(frozen=True)
class Spent:
    prompt_ids: tuple[str, ...]
    calls: np.ndarray
    tokens: np.ndarray
    levels: np.ndarray
    verified: np.ndarray
    time: np.ndarray
    support: float = 1.0


Price = Callable[[Policy, str], float]


def measure(price: Price) -> Callable[[Sequence[Policy]], list[Spent]]:
    """Every prompt emits 100 tokens in 25 calls; what they cost is made up."""

    def spent(policy: Policy) -> Spent:
        ones = np.ones(len(PROMPTS))
        cost = np.array([price(policy, name) for name in PROMPTS])
        return Spent(PROMPTS, 25 * ones, 100 * ones, 75 * ones, 100 * ones, 100 * cost)

    return lambda policies: [spent(policy) for policy in policies]


def likes(policy: Policy, name: str) -> float:
    """Cheapest: chains of 4, confidence .3, the warm `rejected` threshold."""
    del name
    shape = policy.shape
    if isinstance(shape, Chain):
        return 1.0 + abs(shape.num_draft_tokens - 4)
    if isinstance(shape, EntropyStop):
        return 0.9 + (shape.between == "midpoint") + (shape.prior_weight == 0)
    return 1.0 + abs(shape.threshold - 0.3)


@pytest.fixture(scope="module")
def fit() -> StopFit:
    return fit_stop(tokens(), measure(likes), CONFIG)


def test_signals_are_those_of_the_two_classes() -> None:
    values = np.array([0.0, 1.0, 2.0, 2.0, 3.0, np.nan] * 20)
    accepted = np.array([True, True, True, False, False, False] * 20)
    signal = signal_of(values, accepted)
    assert (signal.accepted_mean, signal.rejected_mean, signal.midpoint) == (1.0, 2.5, 1.75)
    good, bad = [0.0, 1.0, 2.0], [2.0, 3.0]
    wins = sum((b > g) + (b == g) / 2 for g in good for b in bad)
    assert signal.auc == pytest.approx(wins / 6)
    assert (sum(signal.accepted), sum(signal.rejected)) == (60, 40), "NaN is no token"


def test_too_few_tokens_are_no_start() -> None:
    with pytest.raises(EvidenceError, match="collect dense traces of more prompts"):
        signal_of(np.ones(40), np.arange(40) < 20)


def test_the_cheapest_setting_of_each_family_is_kept(fit: StopFit) -> None:
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


def test_held_out_prompts_choose_nothing_and_measure_no_mean(fit: StopFit) -> None:
    """What is rigged there changes the report and nothing else."""
    from specctl.stats import split_prompts

    split = split_prompts(PROMPTS, held_out_frac=CONFIG.held_out_frac, seed=CONFIG.seed)
    assert split.held_out

    def rigged(policy: Policy, name: str) -> float:
        return likes(policy, name) if name in split.train else 9 - likes(policy, name)

    given = tokens()
    held = np.isin(given.prompt_id, split.held_out)
    moved = replace(given, entropy=np.where(held, 50.0, given.entropy))
    other = fit_stop(moved, measure(rigged), CONFIG)
    assert other.shape == fit.shape
    assert other.rows[-1].train_cost == fit.rows[-1].train_cost
    assert other.rows[-1].held_out_cost.value == pytest.approx(9 - 0.9)


def test_a_cold_start_has_no_prior() -> None:
    def cold(policy: Policy, name: str) -> float:
        return likes(policy, name) + 5 * getattr(policy.shape, "prior_weight", 0)

    shape = fit_stop(tokens(), measure(cold), CONFIG).shape
    assert (shape.prior_weight, shape.prior_accepted) == (0.0, None)


# --------------------------------------------------------------------------- the clip


def answers(lost: int, calls: int, num_prompts: int = 200) -> dict[tuple[str, int], Answer]:
    """All right but the first `lost`."""
    return {
        (f"q{i:03}", 0): Answer(
            prompt_id=f"q{i:03}",
            category="arithmetic",
            seed=0,
            is_right=i >= lost,
            token_ids=(1, 2, 3, 4 + (i < lost)),
            calls=calls,
            verified_tokens=9,
            drafted_levels=8,
            num_relaxed=int(i < lost),
            opening=None,
            is_copied=False,
            wall_us=1.0,
        )
        for i in range(num_prompts)
    }


CLIPS = ClipConfig(clips=(0.1, 0.2, 0.3), contract=Contract(max_loss=0.02))


def swept(fit: StopFit, *lost: int) -> ClipSweep:
    relaxed = tuple(answers(n, 2) for n in lost)
    return ClipSweep(fit.shape, fit.distance, CLIPS, answers(0, 3), relaxed)


@pytest.mark.parametrize(
    ("lost", "num_certified"), [((0, 0, 0), 3), ((0, 9, 0), 1), ((1, 1, 20), 2), ((9, 0, 0), 0)]
)
def test_clips_are_certified_from_the_smallest_on(
    fit: StopFit, lost: tuple[int, ...], num_certified: int
) -> None:
    """200 prompts: at most one loss is within 2 % at confidence .9."""
    certificate = judge_clips(swept(fit, *lost))
    assert certificate.num_certified == num_certified
    if not num_certified:
        with pytest.raises(EvidenceError, match=r"fresh prompts|no number of prompts"):
            certificate.require_any(["clip 0.1"])


def test_the_acceptance_starts_as_warm_as_the_stop(fit: StopFit) -> None:
    acceptance = clipped(fit.shape, fit.distance, CLIPS, 0.2).acceptance
    assert isinstance(acceptance, JensenShannon)
    assert (acceptance.max_threshold, acceptance.prior_weight) == (0.2, 8.0)
    assert acceptance.prior_rejected == pytest.approx(fit.distance.rejected_mean)
    cold = fit.shape.model_copy(
        update={"prior_accepted": None, "prior_rejected": None, "prior_weight": 0.0}
    )
    assert clipped(cold, fit.distance, CLIPS, 0.2).acceptance.prior_accepted is None


@pytest.mark.parametrize("clips", [(), (0.2, 0.1), (0.0, 0.1), (0.1, 0.1), (0.5, 1.2)])
def test_clips_in_another_order_are_refused(clips: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        ClipConfig(clips=clips)


def test_runs_that_could_certify_nothing_are_refused() -> None:
    checkable = Plan([Prompt("a", "", ("1 + 1?",), "2"), Prompt("b", "", ("Hello",))])
    check_runs(checkable, PAIR, PAIR)
    other = PAIR.model_copy(update={"drafter_digest": sha("e")})
    with pytest.raises(TraceMismatchError, match="name that pair"):
        check_runs(checkable, other, PAIR)
    with pytest.raises(EvidenceError, match="checkable"):
        check_runs(Plan([Prompt("b", "", ("Hello",))]), PAIR, PAIR)


# --------------------------------------------------------------------------- options, artifact


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"window": 12}, "at most 11"),
        ({"between": "middle"}, "between"),
        ({"weights": "4,-1"}, "weights"),
        ({"weights": "four"}, "comma-separated"),
        ({"held_out_frac": 1.0}, "held_out_frac"),
        ({"half_life": 0.0}, "half_life"),
    ],
)
def test_bad_options_of_the_stop_are_refused(change: dict[str, object], says: str) -> None:
    fields = {"window": None, "between": "midpoint", "weights": "0,8"}
    assert stop_config(11, **fields).window == 11
    with pytest.raises(UsageError, match=says):
        stop_config(11, **{**fields, **change})


def test_options_of_the_acceptance() -> None:
    fields = {
        "clips": None, "deny": "7", "special_ids": [0, 2], "max_loss": 0.02, "confidence": 0.9,
        "loss": "one-sided", "num_seeds": 1,
    }  # fmt: skip
    config = clip_config(**fields)
    assert config.deny_token_ids == (0, 2, 7)
    assert config.contract.kind == "binary"
    for change, says in (
        ({"clips": "0.2,0.1"}, "rise"),
        ({"max_loss": 0.0}, "max_loss"),
        ({"deny": "x"}, "--deny"),
        ({"loss": "gross"}, "--loss"),
    ):
        with pytest.raises(UsageError, match=says):
            clip_config(**{**fields, **change})
    with pytest.raises(UsageError, match="variant"):
        clip_config(**fields, variant="Z")


def test_without_runs_the_artifact_is_lossless_and_says_so(fit: StopFit, tmp_path: Path) -> None:
    report = AdasdReport(stop=fit, clip=None)
    publication = adasd_publication(Policy(shape=fit.shape), report, PAIR, sha("d"))
    save_fit(publication, tmp_path / "policy", PAIR)
    artifact = load_artifact(tmp_path / "policy", expect=PAIR)
    assert artifact.policy.shape == fit.shape
    assert artifact.manifest.lossless
    assert artifact.manifest.fit is not None
    split = {name: artifact.manifest.fit[name] for name in ("seed", "held_out_frac")}
    assert split == {"seed": fit.config.seed, "held_out_frac": fit.config.held_out_frac}
    card = (tmp_path / "policy" / "README.md").read_text()
    assert "Gen-only" in card
    assert "Lossless" in card
    assert max(map(len, card.splitlines())) < 400
    assert (tmp_path / "policy" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert describe_artifact(artifact)
    assert render_report(report)


def test_a_certified_acceptance_is_lossy_and_says_what_is_promised(
    fit: StopFit, tmp_path: Path
) -> None:
    found = swept(fit, 0, 1, 20)
    trials = judge_clips(found).trials
    rows = tuple(
        ClipRow(clip=clip, comparison=compare_answers(found.strict, relaxed), trial=trial)
        for clip, relaxed, trial in zip(CLIPS.clips, found.relaxed, trials, strict=True)
    )
    clip = ClipReport(
        config=CLIPS, setup={"device": "a CPU"}, num_prompts=200, num_checked=200,
        strict_accuracy=1.0, rows=rows, chosen=1,
    )  # fmt: skip
    report = AdasdReport(stop=fit, clip=clip)
    publication = adasd_publication(found.policy(1), report, PAIR, sha("d"))
    save_fit(publication, tmp_path / "policy", PAIR)
    artifact = load_artifact(tmp_path / "policy", expect=PAIR)
    assert not artifact.manifest.lossless
    assert artifact.policy.acceptance.max_threshold == 0.2
    card = (tmp_path / "policy" / "README.md").read_text()
    for text in ("**Lossy**", "clipped at 0.2", "confidence 0.9", "--allow-lossy", "refused"):
        assert text in card
    assert artifact.manifest.evidence.metrics["mean_loss"].value == pytest.approx(1 / 200)
    assert render_report(report)
