"""Figures of simulated serving by hand: what is counted, over which part, how surely."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.replay.batch_figures import (
    GOODPUT_RATIOS,
    RATIOS,
    BatchFigures,
    compare_runs,
    figures_of,
    steady_window,
)
from specctl.replay.batch_simulation import Load, simulate, simulate_runs
from tests.replay.serving import by_hand, linear

A = (10, [(1, 3), (9, 9), (0, 3)])
B = (5, [(1, 2), (9, 9), (0, 2), (0, 2)])
TEXTS = [(10 + n, [(n % 3, 2 + n)] * (20 + 3 * n)) for n in range(7)]


def values(figures: BatchFigures) -> dict[str, float]:
    return {name: interval.value for name, interval in figures.whole.items()}


def test_figures_by_hand() -> None:
    """0 A read 200 B read 350 [A 3, B 2] 500 [A 3, B 2] 650 [B 2] 770; see `test_batch_serving`.

    Texts of 4 and 5 tokens; after their first token A takes 450 us and B 420.
    """
    run = simulate(by_hand(A, B), Load(2, num_requests=2), linear(), seed=3)
    found = figures_of("hand", [run], tpot_limit_us=120.0)
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
    assert values(figures_of("hand", [run]))["padding_share"] == pytest.approx(2 / 14)
    late = simulate(by_hand(A, B), Load(2, arrivals_us=(0.0, 1000.0)), linear(), seed=3)
    found = values(figures_of("hand", [late]))  # A 0 to 460, B 1000 to 1510
    assert found["occupancy"] == pytest.approx((460 + 510) / (2 * 1510))
    assert found["tokens_per_s"] == pytest.approx(1e6 * 9 / 1510)


def test_the_steady_part_by_hand() -> None:
    """One slot, five times A of 460 us: the first and the last are left out."""
    made = by_hand(*[A] * 5)
    run = simulate(made, Load(1, num_requests=5), linear())
    window = steady_window(run)
    assert window is not None
    assert (window.steps, window.requests) == (slice(2, 8), slice(1, 4))
    found = figures_of("hand", [run])
    assert found.steady is not None
    assert found.steady["tokens_per_s"].value == pytest.approx(1e6 * 3 * 4 / (3 * 460))


def test_the_steady_part_has_no_ramp_and_no_drain() -> None:
    made = by_hand(*TEXTS)
    run = simulate(made, Load(4), linear(), seed=1)
    window = steady_window(run)
    assert window is not None
    sizes = run.rounds.batch_sizes
    assert (sizes[window.steps] == 4).all()
    ramp_end = sorted(run.timeline.finish_us)[3]  # as many have finished as there are slots
    assert run.timeline.start_us[window.steps.start] == ramp_end
    assert run.timeline.end_us[window.steps.stop - 1] == run.timeline.arrival_us[-1]
    assert sizes[-1] < 4
    assert run.timeline.num_joined[0] == 4  # the first prompts are not counted
    found = figures_of("hand", [run])
    assert found.steady is not None
    assert found.steady["occupancy"].value == pytest.approx(1.0)
    assert found.whole["occupancy"].value < 1
    assert found.steady["ttft_us"].value < found.whole["ttft_us"].value


@pytest.mark.parametrize("num_requests", [1, 5, 8])
def test_too_few_requests_have_no_steady_part(num_requests: int) -> None:
    run = simulate(by_hand(*TEXTS), Load(4, num_requests=num_requests), linear())
    assert steady_window(run) is None
    assert figures_of("hand", [run]).to_json()["steady"] is None


def test_steady_rate_does_not_depend_on_how_long_the_run_is() -> None:
    """Eight times as many requests: the steady rate stays, the whole one still rises."""
    made = by_hand(*TEXTS)

    def rates(num_requests: int) -> tuple[float, float]:
        runs = simulate_runs(made, Load(6, num_requests=num_requests), linear(), num_runs=6)
        found = figures_of("hand", runs)
        assert found.steady is not None
        return found.steady["tokens_per_s"].value, found.whole["tokens_per_s"].value

    short, long = rates(42), rates(336)
    assert short[0] == pytest.approx(long[0], rel=0.01)
    assert short[1] < 0.98 * long[1]


def test_intervals_come_from_independent_runs() -> None:
    load = Load(3, arrival_rate_per_s=900.0)
    runs = simulate_runs(by_hand(*TEXTS), load, linear(), num_runs=6, seed=2)
    assert [run.seed for run in runs] == [(2, number) for number in range(6)]
    found = figures_of("hand", runs, tpot_limit_us=150.0)
    assert found.steady is not None
    assert set(found.steady) == set(found.whole) == set(RATIOS)
    rate = found.steady["tokens_per_s"]
    assert rate.low < rate.value < rate.high
    assert found == figures_of("hand", runs, tpot_limit_us=150.0)
    assert not set(GOODPUT_RATIOS) & set(figures_of("hand", runs).whole)
    json.dumps(found.to_json(), allow_nan=False)


def test_one_run_claims_no_interval() -> None:
    found = figures_of("hand", [simulate(by_hand(*TEXTS), Load(3), linear())])
    assert all(math.isnan(i.low) and math.isnan(i.high) for i in found.whole.values())
    assert all(math.isfinite(i.value) for i in found.whole.values())


def test_runs_of_equal_seeds_are_compared_in_pairs() -> None:
    """The same load under a clock that is a tenth slower: the ratio is known without noise."""
    made, load = by_hand(*TEXTS), Load(3)
    plain = simulate_runs(made, load, linear(), num_runs=4)
    rates = {"verify_fixed_us": 55.0, "verify_token_us": 11.0, "step_us": 55.0}
    slower = simulate_runs(made, load, linear(**rates), num_runs=4)
    found = compare_runs(slower, plain)
    assert found["tokens_per_s"].value == pytest.approx(1 / 1.1)
    assert found["tpot_p99_us"].value == pytest.approx(1.1)
    assert found["tpot_us"].low == pytest.approx(found["tpot_us"].high)
    with pytest.raises(UsageError, match="equal seeds"):
        compare_runs(plain, simulate_runs(made, load, linear(), num_runs=4, seed=9))
    short = simulate_runs(made, Load(3, num_requests=6), linear(), num_runs=2)
    with pytest.raises(UsageError, match="more requests"):
        compare_runs(short, short)


def test_a_log_that_is_too_small_marks_the_figures() -> None:
    made = by_hand(A, B)
    ones, seen = np.ones_like(made.outcomes.missing), made.outcomes
    lacking = replace(made, outcomes=replace(seen, missing=ones))
    closing = replace(made, outcomes=replace(seen, censored=ones))
    found = {
        name: figures_of(name, [simulate(log, Load(2), linear())])
        for name, log in {"whole": made, "lacking": lacking, "closing": closing}.items()
    }
    assert [f.is_marked for f in found.values()] == [False, True, True]
    assert found["lacking"].expansion_support == pytest.approx(6 / 7)
    assert found["closing"].censored_share == 1
    assert found["lacking"].to_json()["is_marked"] is True
