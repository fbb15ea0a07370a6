"""Objectives, search, choice and verdict, on evaluators that state their times."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.errors import UsageError
from specctl.policy import Policy, RootOnly
from specctl.replay.tune.evaluators import Evaluator, make_objective
from specctl.replay.tune.search import rung_sizes
from specctl.replay.tune.verdict import TuneVerdict
from specctl.stats import resample
from tests.replay.tune_cases import Recording, Stated, is_stop, search, statics


def verdict_of(*families: str, by: Evaluator, **changes: Any) -> TuneVerdict:
    return search(*families, **changes).run(by)[0]


def shape_of(verdict: TuneVerdict, index: int = 1) -> dict[str, Any]:
    """The shape of a finalist; of the first family that is not static."""
    shape: dict[str, Any] = verdict.policies[index].record["shape"]
    return shape


@cache
def words_of(policy: Policy) -> str:
    """Its shape in words, which cost more than all else of `noise`."""
    return repr(policy.shape)


def noise(prompt: str, policy: Policy, size: float) -> float:
    """Uniform of that standard deviation; the same for the same prompt and policy."""
    digest = hashlib.blake2b(f"{prompt}{words_of(policy)}".encode(), digest_size=8).digest()
    return size * 12**0.5 * (int.from_bytes(digest) / 2**64 - 0.5)


def flat(policy: Policy, prompt: str) -> float:
    """Every stop is as fast as the best static setting."""
    return 1000.0 if is_stop(policy) else statics(policy, prompt)


def test_rates_by_hand() -> None:
    sums = {"tokens": 300, "decoded": 300, "time_us": 1e6, "request_us": 4e6, "wall_us": 2e6}
    sums |= {"good_tokens": 100}
    goodput = make_objective("goodput", 5.0)
    objectives = (make_objective("throughput", None), make_objective("latency", None), goodput)
    assert [objective.rate(sums) for objective in objectives] == [300, 75, 50]
    columns = {"tokens": np.array([10.0, 10.0]), "time_us": np.array([50_000.0, 50_001.0])}
    assert goodput.complete(columns)["good_tokens"].tolist() == [10, 0]


@pytest.mark.parametrize(
    ("kind", "limit", "named"),
    [
        ("goodput", None, "tpot_limit_ms"),
        ("latency", 5.0, "goodput alone"),
        ("goodput", 0.0, "above 0"),
        ("goodput", float("nan"), "above 0"),
    ],
)
def test_objectives_are_refused_by_argument(kind: str, limit: float | None, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make_objective(kind, limit)


def test_a_limit_that_no_setting_meets_is_refused_with_what_is_possible() -> None:
    never = Stated(statics, is_good=lambda policy: False)
    with pytest.raises(UsageError, match=r"ms 0.001; the fastest setting's mean is 0.01"):
        verdict_of(by=never, objective=make_objective("goodput", 0.001))


def test_a_static_setting_without_good_tokens_can_be_beaten() -> None:
    """A ratio to nothing is not defined; the lead is."""
    by = Stated(statics, is_good=is_stop)
    verdict = verdict_of("svip", by=by, objective=make_objective("goodput", 0.001))
    assert verdict.beats_static
    assert verdict.policies[0].held_out.rate.value == 0
    assert np.isnan(verdict.standing(verdict.chosen).train.against)


@given(st.integers(8, 2000), st.integers(2, 5))
def test_rungs_never_outgrow_the_factor(num_prompts: int, factor: int) -> None:
    sizes = rung_sizes(num_prompts, factor)
    assert sizes[-1] == num_prompts
    assert sizes[0] >= 8
    assert all(a < b <= factor * a for a, b in pairwise(sizes))


def test_rungs_are_heads_of_one_order_and_keep_the_best_share() -> None:
    this, evaluate = search("svip", train=100), Recording(Stated(statics))
    verdict, _ = this.run(evaluate)
    _, *rungs, _plain, _held_out = evaluate.calls
    assert [(number, len(prompts)) for number, prompts in rungs] == [(24, 12), (8, 34), (3, 100)]
    assert [(r.num_settings, r.num_prompts) for r in verdict.rungs] == [(24, 12), (8, 34), (3, 100)]
    everyone = rungs[-1][1]
    assert all(prompts == everyone[: len(prompts)] for _, prompts in rungs)
    assert sum(number for number, _ in evaluate.calls) == this.num_scorings


def test_held_out_prompts_are_looked_at_once_and_last() -> None:
    this = search("svip", "adaedl", "chain+survival", train=100)
    evaluate = Recording(Stated(statics))
    verdict, _ = this.run(evaluate)
    *before, last = evaluate.calls
    for _, prompts in before:
        assert set(prompts) <= set(this.split.train)
    assert last == (len(verdict.policies), this.split.held_out)
    assert len(verdict.policies) == 5, "the baseline, one setting a family, plain decoding"


def test_a_setting_that_is_faster_everywhere_wins() -> None:
    def time_us(policy: Policy, prompt: str) -> float:
        if not is_stop(policy):
            return statics(policy, prompt) + noise(prompt, policy, 20)
        best = policy.shape.threshold == 0.7 and policy.shape.window == 4
        return (900.0 if best else 1100.0) + noise(prompt, policy, 20)

    verdict, chosen = search("svip").run(Stated(time_us))
    assert verdict.beats_static
    assert verdict.chosen == chosen.label == "svip:threshold=0.7:window=4"
    assert verdict.baseline == "chain:3"
    against = verdict.standing(verdict.chosen).held_out.against
    assert against.low < 1000 / 900 < against.high
    assert against.high - against.low < 0.05
    held_out = verdict.to_json()["policies"][0]["held_out"]
    assert "good_share" not in held_out, "there is no limit to be good within"
    assert "of the best static, ×" in verdict.sentence()


def test_false_wins_are_as_rare_as_the_interval_says() -> None:
    """At 3.5% each, 8 or more of 60 would come by 1 in 900 chances."""
    wins, lucky, this = 0, 0, search("svip", grids=["window=2"])
    for seed in range(60):

        def time_us(policy: Policy, prompt: str, seed: int = seed) -> float:
            return flat(policy, prompt) + noise(f"{seed}{prompt}", policy, 60)

        verdict, chosen = this.run(Stated(time_us))
        wins += verdict.beats_static
        assert ("of the best static" in verdict.sentence()) == verdict.beats_static
        if verdict.winner_on_train != verdict.baseline and not verdict.beats_static:
            assert "no gain beyond the interval" in verdict.why_static(all_can_win=True)
        assert chosen.label == verdict.chosen
        assert verdict.beats_static == (verdict.chosen != verdict.baseline)
        lucky += verdict.standing(verdict.winner_on_train).train.against > 1
    assert lucky >= 50
    assert wins < 8


def wins_by_luck_of_runs(num_runs: int, seeds: int) -> int:
    """Verdicts for stops that are no faster, where each run of a policy has luck of its own."""
    wins = 0
    sides = {"train": 10, "held_out": 10}
    this = search("svip:window=2", grids=["threshold=0.3,0.5,0.7"], num_runs=num_runs, **sides)
    for seed in range(seeds):

        def luck_us(policy: Policy, run: int, prompt: str, seed: int = seed) -> float:
            return noise(f"{seed}/{run}/{prompt[:5]}", policy, 10)  # by side, not by prompt

        wins += this.run(Stated(flat, luck_us=luck_us))[0].beats_static
    return wins


def test_the_luck_of_a_run_is_in_the_interval() -> None:
    """One run: 39 of 100 seeds win by luck. Twelve: 8 of 300."""
    assert wins_by_luck_of_runs(1, 20) >= 5
    assert wins_by_luck_of_runs(12, 40) < 8


@pytest.mark.parametrize(("num_runs", "chosen"), [(1, 0.5), (12, 0.7)])
def test_the_best_few_meet_again_where_a_run_has_luck(num_runs: int, chosen: float) -> None:
    """One run favours the wrong setting; twelve do not."""

    def time_us(policy: Policy, prompt: str) -> float:
        if not is_stop(policy):
            return statics(policy, prompt)
        return 900.0 if policy.shape.threshold == 0.7 else 920.0

    def luck_us(policy: Policy, run: int, prompt: str) -> float:
        del prompt
        return -60.0 if run == 0 and is_stop(policy) and policy.shape.threshold == 0.5 else 0.0

    this = search("svip:window=2", num_runs=num_runs)
    evaluate = Recording(Stated(time_us, luck_us=luck_us))
    assert shape_of(this.run(evaluate)[0])["threshold"] == chosen
    scorings = [number for number, _ in evaluate.calls]
    # Static settings, their best few; two rungs, their best few; plain decoding; finalists.
    again = [scorings[i] for i in (1, 4, 5, 6)] if num_runs > 1 else []
    assert sum(scorings) + (num_runs - 1) * sum(again) == this.num_scorings


def test_resamples_of_runs_and_prompts_are_independent() -> None:
    """The variance of a mean is that of prompts plus that of runs."""
    rng = np.random.default_rng(0)
    prompts, runs = rng.normal(10, 1, 200), rng.normal(0, 0.4, 20)
    values = (runs[:, None] + prompts).reshape(-1, 1)
    table = np.concatenate([values, np.ones_like(values)], 1)
    found = resample(200, 20, seed=0).interval(table, lambda s: s[..., 0] / s[..., 1])
    error = (prompts.var() / 200 + runs.var() / 20) ** 0.5
    assert found.value == pytest.approx(values.mean())
    assert (found.high - found.low) / 3.92 == pytest.approx(error, rel=0.1)


def test_a_family_that_never_leads_leaves_the_static_setting() -> None:
    slow = Stated(lambda policy, prompt: 2000.0 if is_stop(policy) else statics(policy, prompt))
    verdict = verdict_of("svip", "confidence", by=slow)
    assert verdict.winner_on_train == verdict.baseline
    assert not verdict.beats_static
    assert "even on training prompts" in verdict.why_static(all_can_win=True)
    assert [s.family for s in verdict.policies] == ["chain", "svip", "confidence", "ar"]


def test_plain_decoding_can_be_the_best_static_setting() -> None:
    plain = Stated(lambda policy, _: 1.0 if isinstance(policy.shape, RootOnly) else 2.0)
    verdict = verdict_of(by=plain)
    assert verdict.chosen == "ar"
    assert len(verdict.policies) == 1
    assert verdict.sentence().endswith(" is kept. No setting is faster, even on training prompts.")


@pytest.mark.parametrize(
    ("plain_us", "words"),
    [(2000, "3, × 2.00 [2.00, 2.00] of plain decoding"), (500, "does not pay here")],
)
def test_plain_decoding_stands_beside_what_an_engine_runs(plain_us: float, words: str) -> None:
    """Which has no setting for it. The gain is paired by prompt, and may be a loss."""

    def is_plain(policy: Policy) -> bool:
        return isinstance(policy.shape, RootOnly)

    def time_us(policy: Policy, prompt: str) -> float:
        length = 1 + noise(prompt, Policy(shape=RootOnly()), 0.1)
        return length * (plain_us if is_plain(policy) else statics(policy, prompt))

    this = search()
    conditions = replace(this.conditions, runs=lambda policy: not is_plain(policy))
    verdict, _ = replace(this, conditions=conditions).run(Stated(time_us))
    assert [one.family for one in verdict.policies] == ["chain", "ar"]
    chain, plain = (one.held_out.against_plain for one in verdict.policies)
    assert (plain.value, chain.value) == (1, pytest.approx(plain_us / 1000))
    assert words in verdict.sentence()
    assert verdict.chosen == ("ar" if plain_us < 1000 else verdict.baseline)


def test_a_gain_over_plain_decoding_within_chance_is_written_as_plain_decoding() -> None:
    """Drafting is a hundredth faster, and prompts differ by a tenth."""

    def time_us(policy: Policy, prompt: str) -> float:
        us = 1010.0 if isinstance(policy.shape, RootOnly) else statics(policy, prompt)
        return us * (1 + noise(prompt, policy, 0.1))

    this = search("svip")
    drafts = replace(this.conditions, runs=lambda policy: not isinstance(policy.shape, RootOnly))
    verdict, chosen = replace(this, conditions=drafts).run(Stated(time_us))
    assert verdict.chosen == chosen.label == "ar"
    assert isinstance(chosen.policy.shape, RootOnly)
    assert verdict.why_plain().startswith("No setting is shown to be faster: chain:3 is × 0.99 ")
    assert verdict.why_plain().endswith("; more prompts may show one.")


@pytest.mark.parametrize(
    ("families", "grids"),
    [(("chain", "eagle2:top_k=2"), ()), (("chain",), ("num_draft_tokens=1,2",))],
)
def test_named_static_families_are_not_scored_twice(
    families: tuple[str, ...], grids: tuple[str, ...]
) -> None:
    """And the static search stays whole."""
    alone, named = (
        verdict_of(*f, grids=g, by=Stated(statics)) for f, g in (((), ()), (families, grids))
    )
    assert alone.num_settings == named.num_settings


def test_what_the_log_lacks_is_left_out_and_counted() -> None:
    def support(policy: Policy) -> float:
        return 0.98 if is_stop(policy) and policy.shape.window > 2 else 1.0

    verdict = verdict_of("svip", by=Stated(statics, support))
    assert shape_of(verdict)["window"] == 2
    assert verdict.families[-1].num_unsupported == 16
    with pytest.raises(UsageError, match="less than 99% of the expansions of all its 24 settings"):
        verdict_of("svip", by=Stated(statics, lambda policy: 0.5 if is_stop(policy) else 1.0))


def test_a_family_that_the_log_does_not_support_may_be_left_out() -> None:
    lacking = Stated(statics, lambda policy: 0.5 if is_stop(policy) else 1.0)
    deep, wide = "opt_tree:top_k=8", "threshold:top_k=3"  # the one is wholly beyond this log
    verdict = verdict_of("svip", deep, wide, by=lacking, drops_unsupported=True)
    assert verdict.left_out == ("svip", deep)
    assert [one.family for one in verdict.policies[1:-1]] == [wide]
    alone = verdict_of("svip", by=lacking, drops_unsupported=True)
    assert (alone.left_out, len(alone.policies)) == (("svip",), 2)


@pytest.mark.parametrize(("grids", "rate"), [(["tokens_per_s=7"], 7), ((), 0.5 * 100e6 / 1000)])
def test_budget_families_get_the_static_rate(grids: Sequence[str], rate: float) -> None:
    verdict = verdict_of("chain:2+marginal", grids=grids, by=Stated(statics))
    assert verdict.policies[1].record["budget"]["tokens_per_s"] == pytest.approx(rate)


def test_a_row_that_was_looked_at_afterwards_is_told_with_its_test() -> None:
    """The winner on training prompts alone is tested; a table may show another one ahead."""
    verdict = verdict_of("svip", "confidence", by=Stated(statics))
    ahead = {"svip": True, "confidence": True}
    policies = tuple(
        one.model_copy(update={"is_ahead": ahead.get(one.family, False)})
        for one in verdict.policies
    )
    label = {one.family: one.policy for one in policies}
    of = {"policies": policies, "winner_on_train": label["svip"]}
    told = verdict.model_copy(update=of).untested(lambda _: True)
    assert told.startswith(verdict.names[label["confidence"]])
    assert " tune FRESH_TRACES --family confidence --cost-model " in told
    assert "svip" not in told
    assert not verdict.model_copy(update=of).untested(lambda one: one != label["confidence"])
    few = tuple(one for one in policies if one.family != "confidence")
    assert not verdict.model_copy(update={**of, "policies": few}).untested(lambda _: True)
