"""What settings did on prompts: against replay, against simulation, against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import synthetic_trace
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, RootOnly, SignalStop, StaticTree, SurvivalBudget
from specctl.replay.batch_simulation import Load, simulate
from specctl.replay.config import Engine, TuneConfig
from specctl.replay.metrics import LoadClock, Sums, by_prompt, ratio
from specctl.replay.rounds import replay
from specctl.replay.score import score, sums_to_score
from specctl.replay.submissions import submissions_of
from specctl.replay.tune import evaluators
from specctl.replay.tune.tuning import prepare
from tests.replay.logs import log_fixtures, random_traces
from tests.replay.tune_cases import linear, linear_file, path_of_two

CHAINS = (Chain(num_draft_tokens=1), Chain(num_draft_tokens=4))
TREES = (StaticTree(depth=3, top_k=2, num_tokens=6), StaticTree(depth=4, top_k=3, num_tokens=12))
STATICS = [Policy(shape=shape) for shape in (*CHAINS, *TREES)]
STOP = Policy(shape=SignalStop(signal="confidence", threshold=0.3, window=4))
OTHERS = [Policy(shape=RootOnly()), STOP]

traces, log = log_fixtures(num_prompts=24, depth=4, top_k=3)


def sequential(log: DenseLog, **changes: float) -> evaluators.LogEvaluator:
    return evaluators.LogEvaluator(log, linear(**changes), evaluators.make_objective())


def batched(log: DenseLog, load: Load, **options: Any) -> evaluators.LogEvaluator:
    return evaluators.LogEvaluator(log, linear(), evaluators.make_objective(), load, **options)


def test_sums_are_those_of_replay(log: DenseLog, traces: TraceSet) -> None:
    """The sweep of static settings included: every figure is the one that `replay` prints."""
    policies = [*STATICS, *OTHERS]
    found = sequential(log)(policies, traces.prompt_ids)
    clock = LoadClock(linear())
    sums = [sums_to_score(run, clock) for run in replay(log, policies)]
    scored = score([str(i) for i in range(len(sums))], policies, sums)
    for ours, theirs in zip(found, scored, strict=True):
        pooled, total = theirs.pooled, ours.totals
        counts = pooled.calls, pooled.num_tokens, pooled.num_accepted, pooled.verified_tokens
        assert tuple(total[name] for name in COUNTS) == counts
        assert total["time_us"] == pytest.approx(pooled.time_us)
        rate = pooled.ratios["tokens_per_s"].value
        assert evaluators.make_objective().rate(total) == pytest.approx(rate)
        assert ratio("tokens_per_s", total) == pytest.approx(rate)
        assert ours.support == 1.0


def test_prompts_come_in_the_order_asked(log: DenseLog) -> None:
    one, other = (sequential(log)([STOP], [p])[0] for p in ("p000002", "p000009"))
    [both] = sequential(log)([STOP], ["p000009", "p000002"])
    for name, column in both.columns.items():
        assert column.tolist() == [other.columns[name][0], one.columns[name][0]]


def test_good_tokens_are_of_whole_requests(log: DenseLog, traces: TraceSet) -> None:
    evaluate = replace(sequential(log), objective=evaluators.make_objective("goodput", 0.7))
    columns = evaluate(STATICS[1:2], traces.prompt_ids)[0].columns
    tokens, good = columns["tokens"], columns["good_tokens"]
    tpot = columns["request_us"] / tokens
    assert 0 < (tpot <= 700).sum() < 24, "the case needs both kinds"
    np.testing.assert_array_equal(good, np.where(tpot <= 700, tokens, 0))


def test_a_log_that_lacks_expansions_says_so(tmp_path: Path) -> None:
    narrow = DenseLog.open(random_traces(tmp_path / "t", depth=4, top_k=3, nested=False))
    found = sequential(narrow)([*STATICS, STOP], ["p000000", "p000001"])
    lacking = [1 - evaluation.support for evaluation in found]
    runs = replay(narrow.only(["p000000", "p000001"]), [*STATICS, STOP])
    wanted = [float((run.outcomes.missing > 0).mean()) for run in runs]
    assert lacking[:4] == pytest.approx(wanted[:4]), "a static round that lacks anything is short"
    assert wanted[0] == wanted[3] == 0, "the log is of that tree"
    assert not found[1].is_supported, "the likeliest chain leaves the best three of a level"
    assert 0 < lacking[4] < wanted[4], "of a round that stops, expansions are counted"


def test_the_planted_optimum_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text follows the likeliest child twice at every position, and then leaves the draft.

    A chain of K takes 100 + 200 + 5 K + 1000 + 10 (K + 1) us and emits min(K, 2) + 1 tokens, so
    tokens per us are 1 / 1110, 2 / 1325, 3 / 1340, 3 / 1355 for K of 0 (undrafted) to 3: two is
    best, and every tree pays for nodes that are never accepted. Of 128 tokens, 126 take 42 rounds
    of three and the last two one more: 43 rounds of 1340 us.
    """
    monkeypatch.setattr(synthetic_trace, "random_path", path_of_two)
    traces = random_traces(tmp_path / "traces", num_prompts=20, depth=4, top_k=3)
    config = TuneConfig(families=("svip",), held_out_frac=0.5)
    result = prepare(traces, config, linear_file(tmp_path / "cost.json")).run().result
    chosen = result.standing(result.chosen)
    assert chosen.policy == "chain:2"
    rate = 128e6 / (43 * 1340)
    assert chosen.train.rate == pytest.approx(rate)
    assert (chosen.held_out.rate.low, chosen.held_out.rate.high) == pytest.approx((rate, rate))
    assert chosen.held_out.mean_acceptance_length.value == pytest.approx(1 + 86 / 43)


def by_name(found: Sums, names: tuple[str, ...]) -> list[list[float]]:
    return [found.columns[name].tolist() for name in names]


COUNTS = ("calls", "tokens", "accepted", "verified")


def test_static_settings_are_simulated_as_any_other(log: DenseLog, traces: TraceSet) -> None:
    prompts, load = traces.prompt_ids[:6], Load(3)
    found = batched(log, load)(STATICS, prompts)
    submitted = submissions_of(log.only(prompts), STATICS)
    for ours, of in zip(found, submitted, strict=True):
        run = simulate(of, load, linear())
        sums = evaluators.simulated_sums(run, evaluators.make_objective())
        theirs = by_prompt(of.positions, sums, run.logged).select(prompts)
        for name, column in ours.columns.items():
            if name not in ("wanted", "missing"):  # a summary counts what any setting would want
                np.testing.assert_allclose(column, theirs.columns[name], err_msg=name)


@pytest.mark.parametrize("engine", ["specctl", "vllm", "sglang"])
@pytest.mark.parametrize("load", [Load(3), Load(3, arrival_rate_per_s=20.0)])
def test_shares_add_up_to_the_run(log: DenseLog, load: Load, engine: Engine) -> None:
    load = replace(load, engine=engine)
    part = log.only(["p000001", "p000002", "p000003", "p000004", "p000005"])
    [of] = submissions_of(part, [STOP])
    run = simulate(of, load, linear())
    times, goodput = run.timeline, evaluators.make_objective("goodput", 0.9)
    sums = {name: of.sum() for name, of in evaluators.simulated_sums(run, goodput).items()}
    busy_us = float((times.end_us - times.start_us).sum())
    assert sums["time_us"] == pytest.approx(busy_us)
    duration_us = times.end_us[-1] - times.start_us[0]
    assert sums["wall_us"] == pytest.approx(duration_us)
    assert (duration_us > 1.01 * busy_us) == (load.arrival_rate_per_s is not None)
    assert sums["tokens"] == 128 * len(run.logged)
    waited = times.finish_us - times.first_token_us
    assert sums["request_us"] == pytest.approx(waited.sum())
    assert sums["good_tokens"] == 128 * (waited / 128 <= 900).sum()


def test_all_settings_meet_the_same_requests(log: DenseLog, traces: TraceSet) -> None:
    policies = [*STATICS[:2], STOP]
    found = batched(log, Load(4), seed=5)(policies, traces.prompt_ids[:9])
    tokens = [by_name(evaluation, ("tokens",)) for evaluation in found]
    assert tokens[0] == tokens[1] == tokens[2]
    assert sum(tokens[0][0]) == 128 * 4 * 8, "turns per slot"
    again = batched(log, Load(4), seed=5)(policies, traces.prompt_ids[:9])
    for one, other in zip(found, again, strict=True):
        np.testing.assert_equal(one.columns, other.columns)


def test_budgets_over_one_shape_share_its_draft(log: DenseLog, traces: TraceSet) -> None:
    shape = StaticTree(depth=3, top_k=3, num_tokens=10)
    budgets = [SurvivalBudget(max_tokens=n) for n in (3, 12, 30)]
    policies = [Policy(shape=shape, budget=budget) for budget in budgets]
    evaluate = batched(log, Load(3))
    small, middle, whole = evaluate(policies, traces.prompt_ids[:4])
    [free] = evaluate([Policy(shape=shape)], traces.prompt_ids[:4])
    assert by_name(whole, COUNTS) == by_name(free, COUNTS)
    assert small.columns["accepted"].sum() == 0, "three roots and nothing else"
    assert small.columns["calls"].sum() > middle.columns["calls"].sum()


def test_runs_are_orders_of_their_own(log: DenseLog, traces: TraceSet) -> None:
    prompts = traces.prompt_ids[:9]
    [one] = batched(log, Load(4))([STOP], prompts)
    [three] = batched(log, Load(4))([STOP], prompts, 3)
    times, tokens = (three.columns[n].reshape(3, len(prompts)) for n in ("request_us", "tokens"))
    np.testing.assert_array_equal(times[0], one.columns["request_us"])
    assert (times[0] != times[1]).any()
    assert (times[1] != times[2]).any()
    assert len(set(tokens.sum(1))) == 1
