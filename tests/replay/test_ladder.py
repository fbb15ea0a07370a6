"""The whole ladder: orders that must hold, tuning that must not look, figures by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, ChainSchedule, Policy, StaticTree, SurvivalBudget
from specctl.replay.config import LadderConfig
from specctl.replay.ladder import build
from specctl.replay.ladder.result import Ladder, LadderResult, LossSplit, Rung
from specctl.replay.metrics import LoadClock, Sums
from specctl.replay.rounds import replay
from specctl.replay.tune.candidates import PolicyCandidate, static_settings
from specctl.stats import Interval, Split, split_prompts
from tests.cli.command import passes, refuses
from tests.replay.costs import DRAFT, grid, linear_clock, table_model
from tests.replay.logs import log_fixtures, random_traces, target_log

CONFIG = LadderConfig(held_out_frac=0.5, num_folds=2)
POLICIES = [
    ("wide", Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=12))),
    ("short", Policy(shape=Chain(num_draft_tokens=1))),
]
LINEAR = (
    "verify_fixed_us=100,verify_token_us=4,verify_cached_token_us=0,"
    "draft_fixed_us=10,draft_token_us=1,step_us=1"
)
CLOCK = linear_clock(verify_token_us=4.0, draft_fixed_us=10.0, draft_token_us=1.0)
SELECT = grid([[[0.5, 2.5]], [[1.5, 6.5]]], batch=(1, 3), sizes=(1, 5))
MEASURED = LoadClock(table_model(draft=DRAFT.model_copy(update={"select": SELECT})))
"""Choosing what to submit takes longer from a wide level, as on a machine."""


traces, log = log_fixtures(num_prompts=8, depth=4, top_k=3, seed=6)


def prompt_ids(log: DenseLog) -> tuple[str, ...]:
    return tuple(name for chunk in log.chunks() for name in chunk.positions.prompt_ids)


def sides_of(log: DenseLog) -> Split:
    return split_prompts(prompt_ids(log), held_out_frac=CONFIG.held_out_frac, seed=CONFIG.seed)


def built(
    log: DenseLog, *policies: tuple[str, Policy], clock: Any = CLOCK, **options: Any
) -> Ladder:
    config = options.pop("config", CONFIG)
    sides = split_prompts(prompt_ids(log), held_out_frac=config.held_out_frac, seed=config.seed)
    return build.build_ladder(log, sides, clock, policies, config=config, **options)


@pytest.fixture(scope="module")
def ladder(log: DenseLog) -> Ladder:
    return built(log, *POLICIES)


def test_the_rungs_stand_in_order(ladder: Ladder) -> None:
    assert [rung.kind for rung in ladder.rungs] == [
        *("plain", "chain", "tree", "policy", "policy"),
        *("features", "oracle", "clairvoyant", "ceiling"),
    ]
    rate = {rung.label: rung.tokens_per_s.value for rung in ladder.rungs}
    assert len({rung.num_tokens for rung in ladder.rungs}) == 1
    for label in rate.keys() - {"R_clair", "R_ceil"}:
        assert rate[label] <= rate["R_clair"] <= rate["R_ceil"]
    assert ladder.rung("ar").calls == ladder.rung("ar").num_tokens


def test_on_every_request_the_bounds_hold(log: DenseLog, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, time_us = build.measure, {}

    def keep(rungs: Any, *others: Any, **options: Any) -> Any:
        time_us.update({rung.label: rung.sums.columns["time_us"] for rung in rungs})
        return measure(rungs, *others, **options)

    monkeypatch.setattr(build, "measure", keep)
    built(log, *POLICIES, clock=MEASURED)
    for label in time_us.keys() - {"R_clair", "R_ceil"}:
        assert (time_us[label] >= time_us["R_clair"] - 1e-6).all(), label
    assert (time_us["R_clair"] >= time_us["R_ceil"] - 1e-6).all()


@pytest.mark.parametrize("clock", [CLOCK, MEASURED], ids=["linear", "table"])
@pytest.mark.parametrize(("kind", "word"), [("chain", "chain"), ("tree", "eagle2")])
def test_the_static_rung_is_the_best_of_its_grid_charged_as_replayed(
    log: DenseLog, kind: Any, word: str, clock: LoadClock
) -> None:
    """Against replaying every setting on its own, trees of one level among them."""
    settings = static_settings(word, log.support)
    runs = replay(log, [one.policy for one in settings], with_bounds=False)
    rates = [1e6 * run.emitted.sum() / clock(run).sum() for run in runs]
    rate, rung = build._static_rung(kind, word, log, log, clock)
    assert rung.label == settings[int(np.argmax(rates))].label
    assert rung.setting == f"fastest of {len(settings)} on training prompts"
    assert rate == pytest.approx(max(rates), rel=1e-12)


def test_at_a_larger_batch_verification_is_dearer(log: DenseLog, ladder: Ladder) -> None:
    """Fixed costs are shared, so a token's price in rounds rises: smaller trees win."""
    many = linear_clock(64, verify_token_us=4.0, draft_fixed_us=10.0, draft_token_us=1.0)
    found = built(log, clock=many)
    assert found.batch_size == 64
    assert found.rung("R_feat").verified_tokens < ladder.rung("R_feat").verified_tokens
    assert found.rung("R_feat").tokens_per_s.value > ladder.rung("R_feat").tokens_per_s.value


def test_a_schedule_is_the_chain_of_the_load(log: DenseLog) -> None:
    """Two draft tokens for the batch at hand."""
    schedule = ChainSchedule(from_batch=(1, 2), num_draft_tokens=(4, 2))
    named = [
        ("schedule", Policy(shape=schedule)),
        ("chain", Policy(shape=Chain(num_draft_tokens=2))),
    ]
    found = built(log, *named, clock=linear_clock(8))
    one, other = (found.rung(label) for label in ("schedule", "chain"))
    assert (one.calls, one.verified_tokens) == (other.calls, other.verified_tokens)
    assert one.tokens_per_s == other.tokens_per_s


@pytest.mark.usefixtures("two_prompts_are_enough")
def test_an_estimate_that_is_right_is_worth_what_it_should_be(log: DenseLog) -> None:
    """The target draws by the drafter, so trees at the settled price are the best there are."""
    assert built(log).rung("R_feat").against_static.value > 1.0


def test_tuning_never_sees_held_out_prompts(log: DenseLog) -> None:
    """The texts of held-out prompts leave every tree at once: what was tuned does not move."""
    sides = sides_of(log)

    def without(*names: str) -> Ladder:
        return built(target_log(log, without_path=frozenset(names)))

    first, second, third = without(), without(*sides.held_out[:-1]), without(*sides.train[:-1])
    assert first.best_static == second.best_static
    for kind in ("chain", "tree", "features"):
        one, two = (next(r for r in each.rungs if r.kind == kind) for each in (first, second))
        assert (one.label, one.setting) == (two.label, two.setting)
        assert one.calls < two.calls
    assert third.rung("R_feat").setting != first.rung("R_feat").setting


SLOW = (500.0, 500.0)
TIMES: dict[str, tuple[Any, tuple[float, float]]] = {
    "ar": ("plain", (1000.0, 1000.0)),
    "static": ("tree", SLOW),
    "mine": ("policy", (400.0, 400.0)),
    "R_feat": ("features", (320.0, 320.0)),
    "R_prob": ("oracle", (250.0, 250.0)),
    "R_clair": ("clairvoyant", (200.0, 200.0)),
}


COUNTS = {
    "calls": 10,
    "tokens": 100,
    "accepted": 90,
    "verified": 50,
    "levels": 40,
    "wanted": 1,
    "missing": 0,
    "censored": 0,
}


def measured(**others: tuple[float, float]) -> tuple[dict[str, Rung], LossSplit]:
    """Two prompts of 100 tokens, in so many us each."""
    rungs = []
    for label, (kind, usual) in TIMES.items():
        columns = {name: np.full(2, float(count)) for name, count in COUNTS.items()}
        columns["time_us"] = np.array(others.get(label, usual))
        rungs.append(build.SummedRung(kind, label, "", Sums.of(("a", "b"), ("", ""), columns)))
    found, split = build.measure(rungs, "static", seed=0)
    return {rung.label: rung for rung in found}, split


@pytest.mark.usefixtures("two_prompts_are_enough")
def test_distances_by_hand() -> None:
    """static 200k tokens/s, mine 250k, R_feat 312.5k, R_prob 400k, R_clair 500k."""
    rungs, split = measured()
    found = rungs["mine"]
    assert found.tokens_per_s.value == 250_000
    assert found.mean_acceptance_length.value == 10
    assert found.against_static.value == 1.25
    assert found.against_plain == Interval(2.5, 2.5, 2.5)
    assert found.gap_closed == Interval(0.25, 0.25, 0.25)
    assert found.policy_regret is not None
    assert found.policy_regret.value == pytest.approx(62_500)
    assert split.drafter.value == pytest.approx(87_500)
    assert split.irreducible.value == pytest.approx(100_000)
    assert split.headroom.value == pytest.approx(1.0)
    assert rungs["R_prob"].policy_regret is None


@pytest.mark.usefixtures("two_prompts_are_enough")
@pytest.mark.parametrize("prob", [SLOW, (100.0, 800.0)])
def test_no_share_of_a_gap_that_may_not_be_there(prob: tuple[float, float]) -> None:
    """No gain, or one that the other prompt loses: some resamples lead nowhere."""
    assert measured(R_prob=prob)[0]["mine"].gap_closed is None


@pytest.mark.usefixtures("two_prompts_are_enough")
def test_intervals_are_paired_by_prompt() -> None:
    """Prompts differ tenfold, the policy is 1.25 times as fast on each: the ratio has no spread."""
    mine = measured(static=(500.0, 5000.0), mine=(400.0, 4000.0))[0]["mine"]
    ratio, rate = mine.against_static, mine.tokens_per_s
    assert (ratio.low, ratio.high) == pytest.approx((1.25, 1.25))
    assert rate.low < rate.value < rate.high


SHARED = Policy(shape=Chain(), budget=SurvivalBudget(max_tokens=8))


def test_policies_are_refused(log: DenseLog) -> None:
    with pytest.raises(UsageError, match="which simulates the batch"):
        built(log, ("shared", SHARED))
    for taken in ("ar", "R_prob"):
        with pytest.raises(UsageError, match="leave it out"):
            built(log, (taken, Policy(shape=Chain())))


def test_a_log_without_static_trees_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the 5 best of a level grow need not contain what the 2 best of a narrow one grow."""
    narrow = random_traces(tmp_path / "t", num_prompts=4, depth=5, top_k=5, nested=False)
    log = DenseLog.open(narrow)
    monkeypatch.setattr(
        build,
        "static_settings",
        lambda word, support: [
            PolicyCandidate(word, word, Policy(shape=StaticTree(depth=5, top_k=2)))
        ],
    )
    with pytest.raises(UsageError, match="--nested"):
        build._static_rung("tree", "eagle2", log, log, CLOCK)


def test_the_command_writes_table_json_and_picture(folder: Path, tmp_path: Path) -> None:
    options = ("--linear", LINEAR, "-p", "chain:2", "-o", tmp_path / "out")
    shown = passes("ladder", folder, *options, "--wide").out
    for word in ("R_feat", "R_clair", "tokens/s", "× static", "Headroom", "irreducible"):
        assert word in shown
    stored = json.loads((tmp_path / "out" / "ladder.json").read_text())
    assert stored["kind"] == "ladder"
    assert LadderResult.model_validate_json(json.dumps(stored)).to_json() == stored
    assert [rung["label"] for rung in stored["rungs"]][-4:] == list(build.LIMITS.values())
    assert "intervals n/a: they need 8 prompts" in shown
    assert stored["rungs"][0]["tokens_per_s"]["low"] is None
    assert (tmp_path / "out" / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(passes("ladder", folder, *options, "--json").out) == stored


FLAT = LINEAR.replace("verify_token_us=4", "verify_token_us=0")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "specctl profile"),
        (("--linear", LINEAR, "--cost-model", "c.json"), "give either"),
        (("--linear", "step_us=1"), "it is missing"),
        (("--linear", "step_us=1,step_us=2"), "--linear"),
        (("--linear", f"{LINEAR},other_us=1"), "--linear"),
        (("--linear", FLAT), "flat"),
        (("--linear", LINEAR, "--held-out", "0"), "--held-out"),
        (("--linear", LINEAR, "--held-out", "nan"), "--held-out"),
    ],
)
def test_time_is_never_guessed_and_both_sides_hold_prompts(
    folder: Path, tmp_path: Path, options: tuple[str, ...], named: str
) -> None:
    assert named in refuses(2, "ladder", folder, "-o", tmp_path / "out", *options)
