"""Serving by hand: times, what a cost model is given, queueing, figures, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.policy import ElasticBudget, SurvivalBudget
from specctl.replay import batch_figures
from specctl.replay.batch_simulation import Load, simulate, simulate_runs, steps_of_batch
from specctl.replay.outcomes import Outcomes
from tests.replay.serving import TimedLoad, by_hand, linear

# (accepted, verified) at every position. A: two rounds, of 2 tokens and of 1. B: 2, 1 and 1.
A = (10, [(1, 3), (9, 9), (0, 3)])
B = (5, [(1, 2), (9, 9), (0, 2), (0, 2)])
TEXTS = [(10 + n, [(n % 3, 3)] * (5 + 2 * n)) for n in range(7)]
ONE_AFTER_THE_OTHER = 3
"""A seed whose shuffle of two keeps their order."""


@pytest.mark.parametrize(
    ("arrival_us", "first_token_us", "end_us"),
    [
        (100, 350, [500, 650, 770]),  # while A's prompt is read: joins the same round
        (300, 480, [330, 630, 750, 870]),  # during A's first round: waits for its end, 330
        (330, 480, [330, 630, 750, 870]),  # just as A's first round ends
        (1000, 1150, [330, 460, 1270, 1390, 1510]),  # after A has left, to an idle server
    ],
)
def test_arrivals_by_hand(arrival_us: float, first_token_us: float, end_us: list[float]) -> None:
    load = TimedLoad(2, arrivals_us=(0.0, arrival_us))
    run = simulate(by_hand(A, B), load, linear(), seed=ONE_AFTER_THE_OTHER)
    assert run.timeline.arrival_us.tolist() == [0, arrival_us]
    assert run.timeline.first_token_us.tolist() == [200, first_token_us]
    assert run.timeline.end_us.tolist() == end_us


def test_what_a_cost_model_needs_by_hand() -> None:
    """A drafts 3, then 2 levels of 4 nodes, B 1 level; A's text ends with the second round."""
    made = by_hand(A, B)
    levels, wanted = np.array([3, 9, 2, 1, 9, 1, 1]), np.array([9, 99, 5, 1, 99, 1, 1])
    seen = made.outcomes
    seen = Outcomes.of(seen.accepted, verified=seen.verified, levels=levels, wanted=wanted)
    made = replace(made, outcomes=seen)
    run = simulate(made, Load(2, num_requests=2), linear(), seed=ONE_AFTER_THE_OTHER)
    steps = steps_of_batch(made, run.rounds, "padded")
    assert steps.batch_size.tolist() == [2, 2, 1]
    assert steps.num_tokens.tolist() == [6, 6, 2]
    assert steps.context_tokens.tolist() == [(10 + 5) / 2, (12 + 7) / 2, 8]
    assert steps.levels.tolist() == [3, 2, 1]
    assert steps.level_width.tolist() == [4, 4, 0]
    assert steps.num_emitted.tolist() == [2, 1, 0]  # nothing is read where all texts ended


@pytest.mark.parametrize(
    ("packing", "processed", "read"), [("ragged", [6, 3], [2, 0]), ("padded", [8, 4], [3, 0])]
)
def test_packing_leaves_padding_out(packing: str, processed: list[int], read: list[int]) -> None:
    """A verifies 4 and accepts 2, B verifies 2 and accepts none; then both end."""
    made = by_hand((10, [(2, 4), (9, 9), (9, 9), (0, 1)]), (5, [(0, 2), (0, 2)]))
    run = simulate(made, Load(2, num_requests=2), linear(), seed=ONE_AFTER_THE_OTHER)
    steps = steps_of_batch(made, run.rounds, packing)
    assert steps.num_tokens.tolist() == processed
    assert steps.num_emitted.tolist() == read


def test_one_server_queues_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: the mean wait is ρ S / 2 (1 - ρ); the standard error of 8,000 requests is 4%."""
    service_us, load = 330.0, 0.5
    offered = Load(1, arrival_rate_per_s=1e6 * load / service_us, num_requests=8000)
    times = simulate(by_hand((10, [(0, 3)])), offered, linear()).timeline
    waits_us = times.finish_us - times.arrival_us - service_us
    assert waits_us.mean() == pytest.approx(service_us * load / (2 * (1 - load)), rel=0.15)


def test_default_numbers_of_requests() -> None:
    made = by_hand(A, B)
    assert len(simulate(made, Load(1), linear()).logged) == 8
    assert len(simulate(by_hand(*[A] * 30), Load(3), linear()).logged) == 30
    passes = simulate(made, Load(3), linear()).logged.reshape(-1, 2)
    assert len(passes) == 12
    assert (passes.sum(1) == 1).all()  # the log once, then again
    assert len({tuple(both) for both in passes.tolist()}) == 2  # in another order


@pytest.mark.parametrize("rate", [0.0, math.nan, math.inf])
def test_impossible_loads_are_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="--arrival-rate must be above 0"):
        Load(1, arrival_rate_per_s=rate)


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (SurvivalBudget(max_tokens=2), "below the batch size, 3"),
        (SurvivalBudget(), "specctl profile"),
        (ElasticBudget(max_tokens=2), "echo_budget.*below the batch size, 3"),
    ],
)
def test_budgets_that_cannot_be_simulated_are_refused(budget: object, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        simulate(by_hand(A, B), Load(3), linear(), budget=budget)


UNEVEN = [(10 + n, [(n % 3, 2 + n)] * (20 + 3 * n)) for n in range(7)]


def values(figures: batch_figures.BatchFigures) -> dict[str, float]:
    return {name: interval.value for name, interval in figures.whole.items()}


def test_figures_by_hand() -> None:
    """The same two requests; after their first token A takes 450 us and B 420."""
    run = simulate(by_hand(A, B), Load(2, num_requests=2), linear(), seed=3)
    found = batch_figures.figures_of("hand", [run], tpot_limit_us=120.0)
    assert values(found) == pytest.approx(
        {
            "tokens_per_s": 1e6 * 9 / 770,
            "mean_acceptance_length": 1 + 2 / 5,
            "verified_per_step": 12 / 3,
            "padding_share": 0.0,
            "requests_per_step": 5 / 3,
            "occupancy": (2 * 500 + 2 * 150 + 120) / (2 * 770),
            "tpot_us": (450 + 420) / (3 + 4),
            "ttft_us": (200 + 350) / 2,
            "tpot_p50_us": (150 + 105) / 2,
            "tpot_p90_us": 105 + 0.9 * 45,
            "tpot_p99_us": 105 + 0.99 * 45,
            "ttft_p50_us": 275,
            "ttft_p90_us": 200 + 0.9 * 150,
            "ttft_p99_us": 200 + 0.99 * 150,
            "goodput_share": 1 / 2,
            "goodput_tokens_per_s": 1e6 * 5 / 770,
        }
    )
    assert (found.steady, found.num_requests, found.num_runs) == (None, 2, 1)


def test_padding_and_idle_time_show() -> None:
    run = simulate(by_hand(A, B), Load(2, num_requests=2), linear(), seed=3, packing="padded")
    assert values(batch_figures.figures_of("hand", [run]))["padding_share"] == pytest.approx(2 / 14)
    late = simulate(by_hand(A, B), TimedLoad(2, arrivals_us=(0.0, 1000.0)), linear(), seed=3)
    found = values(batch_figures.figures_of("hand", [late]))  # A 0 to 460, B 1000 to 1510
    assert found["occupancy"] == pytest.approx((460 + 510) / (2 * 1510))
    assert found["tokens_per_s"] == pytest.approx(1e6 * 9 / 1510)


def test_the_steady_part_has_no_ramp_and_no_drain() -> None:
    made = by_hand(*UNEVEN)
    run = simulate(made, Load(4), linear(), seed=1)
    window = batch_figures.steady_window(run)
    assert window is not None
    sizes = run.rounds.batch_sizes
    assert (sizes[window.steps] == 4).all()
    ramp_end = sorted(run.timeline.finish_us)[3]  # as many have finished as there are slots
    assert run.timeline.start_us[window.steps.start] == ramp_end
    assert run.timeline.end_us[window.steps.stop - 1] == run.timeline.arrival_us[-1]
    assert sizes[-1] < 4
    assert run.rounds.num_joined[0] == 4  # the first prompts are not counted
    found = batch_figures.figures_of("hand", [run])
    assert found.steady is not None
    assert found.steady["occupancy"].value == pytest.approx(1.0)
    assert found.whole["occupancy"].value < 1
    assert found.steady["ttft_us"].value < found.whole["ttft_us"].value


@pytest.mark.parametrize("num_requests", [1, 5, 8])
def test_too_few_requests_have_no_steady_part(num_requests: int) -> None:
    run = simulate(by_hand(*UNEVEN), Load(4, num_requests=num_requests), linear())
    assert batch_figures.steady_window(run) is None
    assert batch_figures.figures_of("hand", [run]).to_json()["steady"] is None


def test_steady_rate_does_not_depend_on_how_long_the_run_is() -> None:
    """Eight times as many requests: the steady rate stays, the whole one still rises."""
    made = by_hand(*UNEVEN)

    def rates(num_requests: int) -> tuple[float, float]:
        runs = simulate_runs(made, Load(6, num_requests=num_requests), linear(), num_runs=6)
        found = batch_figures.figures_of("hand", runs)
        assert found.steady is not None
        return found.steady["tokens_per_s"].value, found.whole["tokens_per_s"].value

    short, long = rates(42), rates(336)
    assert short[0] == pytest.approx(long[0], rel=0.01)
    assert short[1] < 0.98 * long[1]


def test_intervals_resample_prompts_and_runs() -> None:
    """Prompts that differ widen the interval, which runs alone leave out: the rate of a run of one
    slot hardly depends on the order of its requests."""
    fast, slow = (10, [(2, 4)] * 30), (10, [(0, 4)] * 30)
    runs = simulate_runs(by_hand(*[fast, slow] * 6), Load(1), linear(), num_runs=8)
    rate = batch_figures.figures_of("hand", runs).whole["tokens_per_s"]
    assert rate.high / rate.low > 1.2


def test_intervals_come_from_independent_runs() -> None:
    load = Load(3, arrival_rate_per_s=900.0)
    runs = simulate_runs(by_hand(*UNEVEN * 2), load, linear(), num_runs=6, seed=2)
    assert [run.seed for run in runs] == [(2, number) for number in range(6)]
    found = batch_figures.figures_of("hand", runs, tpot_limit_us=150.0)
    assert found.steady is not None
    assert set(found.steady) == set(found.whole) == set(batch_figures.SHOWN)
    rate = found.steady["tokens_per_s"]
    assert rate.low < rate.value < rate.high
    assert found == batch_figures.figures_of("hand", runs, tpot_limit_us=150.0)
    assert not set(batch_figures.GOODPUT) & set(batch_figures.figures_of("hand", runs).whole)
    json.dumps(found.to_json(), allow_nan=False)


def test_runs_of_equal_seeds_are_compared_in_pairs() -> None:
    """The same load under a clock that is a tenth slower: the ratio is known without noise."""
    made, load = by_hand(*UNEVEN * 2), Load(3)
    plain = simulate_runs(made, load, linear(), num_runs=4)
    rates = {"verify_fixed_us": 55.0, "verify_token_us": 11.0, "step_us": 55.0}
    slower = simulate_runs(made, load, linear(**rates), num_runs=4)
    found = batch_figures.figures_of("slower", slower, baseline=plain).against
    assert found is not None
    assert found["tokens_per_s"].value == pytest.approx(1 / 1.1)
    assert found["tpot_p99_us"].value == pytest.approx(1.1)
    assert found["tpot_us"].low == pytest.approx(found["tpot_us"].high)


def test_a_log_that_is_too_small_marks_the_figures() -> None:
    made = by_hand(A, B)
    ones, seen = np.ones_like(made.outcomes.missing), made.outcomes
    lacking = replace(made, outcomes=replace(seen, missing=ones))
    closing = replace(made, outcomes=replace(seen, censored=ones))
    found = {
        name: batch_figures.figures_of(name, [simulate(log, Load(2), linear())])
        for name, log in {"whole": made, "lacking": lacking, "closing": closing}.items()
    }
    assert [f.is_marked for f in found.values()] == [False, True, True]
    assert found["lacking"].expansion_support == pytest.approx(6 / 7)
    assert found["closing"].censored_share == 1
    assert found["lacking"].to_json()["is_marked"] is True
