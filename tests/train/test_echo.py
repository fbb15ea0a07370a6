"""`fit_echo`: areas, sweet spots, thresholds, recall, what is refused, and the artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from specctl.errors import TraceEmptyError, UsageError
from specctl.policy import SparseGates, build_shape
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.rates import LinearCost
from specctl.stats import UNKNOWN, Interval
from specctl.train import echo
from specctl.train.configs import EchoConfig
from specctl.train.report import Fit
from tests.train.cases import ECHO as CONFIG
from tests.train.cases import Replay, echo_fit, planted


def level_rows(frame: pl.DataFrame) -> echo.LevelRows:
    return echo.LevelRows.of_prompts(frame, frame["prompt_id"].unique().to_list())


@pytest.fixture(scope="module")
def fit(fits: dict[str, Fit[Any]]) -> Fit[echo.EchoReport]:
    return fits["echo"]


def rows_by_hand(scores: list[float], reached: list[bool], prompts: list[int]) -> echo.LevelRows:
    logp = np.log(np.array(scores))[:, None].astype(np.float32)
    return echo.LevelRows(logp, np.array(reached, np.int64), np.array(prompts))


def test_an_area_by_hand() -> None:
    """Against .4, .6 and .5 the .9 wins three pairs, the .5 one and a half: 4.5 of 6."""
    rows = rows_by_hand([0.9, 0.5, 0.4, 0.6, 0.5], [True, True, False, False, False], [0] * 5)
    assert echo.area_by_prompt(rows, 1, min_rows=1, seed=0).value == pytest.approx(4.5 / 6)
    # A class of few rows has none.
    for reached, least in (([True, False, False], 2), ([True, True, True], 1)):
        rows = rows_by_hand([0.9, 0.5, 0.4], reached, [0, 1, 2])
        assert echo.area_by_prompt(rows, 1, min_rows=least, seed=0) == UNKNOWN


def test_intervals_are_of_prompts_not_rows() -> None:
    """Repeating rows tells nothing new; an interval over rows would shrink by a factor of 3."""
    frame = planted(num_prompts=24, per_prompt=8)
    once, ten = (
        echo.area_by_prompt(level_rows(pl.concat([frame] * n)), 1, min_rows=5, seed=0)
        for n in (1, 10)
    )
    assert once.value == pytest.approx(ten.value)
    assert ten.high - ten.low == pytest.approx(once.high - once.low, rel=0.15)
    assert once.low < once.value < once.high


def test_youden_by_hand() -> None:
    """J is 3/4 - 0 at .55 and 1 - 1/3 at .4: the cut lies between .55 and .5."""
    scores = np.array([0.9, 0.6, 0.55, 0.4, 0.5, 0.3, 0.2])
    label = np.array([True, True, True, True, False, False, False])
    assert echo.youden_threshold(scores, label) == pytest.approx((0.55 + 0.5) / 2)
    assert echo.youden_threshold(scores, ~label) == 0.0, "a confidence that misleads cuts nothing"


def test_gates_find_what_was_planted(fit: Fit[echo.EchoReport]) -> None:
    assert isinstance(fit.policy.shape, SparseGates)
    assert fit.policy.shape.gate_levels == (1, 4)
    one, four = fit.policy.shape.thresholds
    assert 0.28 <= one <= 0.41
    assert 0.095 <= four <= 0.12
    assert build_shape(fit.policy.shape).max_depth == 4
    assert fit.policy.lossless
    assert fit.policy.budget.kind == "per_request"


def test_a_later_gate_is_judged_on_what_earlier_ones_let_pass() -> None:
    """Level 4 tells success from failure at level 1 well, and the rest not at all."""
    rng = np.random.default_rng(0)
    n = 4000
    fails = rng.random(n) < 0.5
    one = np.where(fails, 0.1, 0.9)
    last = np.where(fails, 0.05, 0.5) * rng.uniform(0.8, 1.0, n)
    accepted = np.where(fails, 0, np.where(rng.random(n) < 0.5, 3, 4))
    logp = np.log(np.stack([one, one, one, last], 1)).astype(np.float32)
    rows = echo.LevelRows(logp, accepted, np.arange(n) % 50)
    areas = [echo.area_by_prompt(rows, d, min_rows=20, seed=0) for d in range(1, 5)]
    assert areas[3].value > 0.8
    [first, behind] = echo.gates_at([1, 4], rows, min_rows=20, seed=0)
    assert first.threshold == pytest.approx(0.5)
    assert behind.auc.value < 0.55
    assert [gate.level for gate in echo.choose_gates(rows, areas, CONFIG)] == [1]


def test_priority_is_root_then_target_then_area() -> None:
    rng = np.random.default_rng(1)
    accepted = rng.integers(0, 6, 4000)
    # Every level tells by a little noise how long the accepted path is, level 3 best.
    noise = {1: 1.0, 2: 0.8, 3: 0.05, 4: 0.5, 5: 0.9}
    columns = [accepted + noise[d] * rng.normal(size=4000) for d in range(1, 6)]
    logp = (np.stack(columns, 1) - 12).astype(np.float32)
    rows = echo.LevelRows(logp, accepted, np.arange(4000) % 80)
    areas = [Interval(v, v, v) for v in (0.82, 0.85, 0.99, 0.9, 0.83)]
    for number, levels in [(1, [1]), (2, [1, 5]), (3, [1, 3, 5])]:
        config = EchoConfig(depth=5, delta=0.6, max_gates=number, min_rows=20)
        chosen = echo.choose_gates(rows, areas, config)
        assert [gate.level for gate in chosen] == levels
    low = [Interval(0.5, 0.5, 0.5), *areas[1:]]
    chosen = echo.choose_gates(rows, low, config.model_copy(update={"max_gates": 1}))
    assert [gate.level for gate in chosen] == [5], "a root below the bar gives way to the target"


def test_no_sweet_spot_is_refused_with_a_delta_that_finds_a_gate() -> None:
    with pytest.raises(TraceEmptyError, match=r"level 1 0\.9.*level 4 .*--delta 0\.9") as refusal:
        echo_fit(planted(), CONFIG.model_copy(update={"delta": 0.999}))
    delta = float(str(refusal.value).partition("--delta ")[2].partition(",")[0])
    again = echo_fit(planted(), CONFIG.model_copy(update={"delta": delta}))
    assert again.policy.shape.gate_levels
    few = CONFIG.model_copy(update={"min_rows": 10_000})
    with pytest.raises(TraceEmptyError, match=r"level 1 -.*--min-rows"):
        echo_fit(planted(), few)


def test_thresholds_by_cost_are_the_cheapest_tried() -> None:
    config = CONFIG.model_copy(update={"thresholds": "cost"})
    replay = Replay({1: 0.0, 4: 0.2})
    fit = echo_fit(planted(), config, replay)
    one, four = fit.policy.shape.thresholds
    assert one == 0.0, "a gate that does not pay never closes"
    tried = [p.shape.thresholds[1] for p, _ in replay.asked if p.shape.gate_levels == (1, 4)]
    assert abs(four - 0.2) == min(abs(t - 0.2) for t in tried)
    asked = [prompts for _, prompts in replay.asked]
    assert asked[-1] == asked[-2], "the report is of the held-out prompts"
    assert not any(prompts & asked[-1] for prompts in asked[:-2])
    with pytest.raises(UsageError, match="specctl profile"):
        echo_fit(planted(), config)


def test_recall_by_hand() -> None:
    """Prompt 0: 4 of 4 kept and 3 cut to 0; prompt 1: 2 cut to 1, its level widened."""
    logp = np.log([[0.9, 0.9], [0.1, 0.9], [0.9, 0.1], [0.9, 0.9]]).astype(np.float32)
    rows = echo.LevelRows(logp, np.array([4, 3, 2, 0]), np.array([0, 0, 1, 1]))
    gates = [echo.Gate(1, 0.5, UNKNOWN), echo.Gate(2, 0.5, UNKNOWN)]
    found = echo.recall(gates, rows)
    assert found.num_prompts == 2
    assert found.loss_frac == pytest.approx((3 / 7 + 1 / 2) / 2)
    assert found.widened_loss_frac == pytest.approx((2 / 7 + 0) / 2)
    assert found.loss_bound == pytest.approx((2 * found.loss_frac + 1) / 3)


def test_gates_of_the_report_are_judged_on_what_reaches_them(fit: Fit[echo.EchoReport]) -> None:
    first, second = fit.data.gates
    assert first.num_rows == fit.data.rows["held_out"]
    assert second.num_rows == round(first.num_rows * (1 - first.closes_frac))
    for gate in (first, second):
        assert gate.true_rate > 0.8
        assert gate.false_rate < 0.25


def hinge(plain_us: float, knee: int, gamma: float) -> Any:
    """Eq. 2 as printed."""
    return lambda tokens: plain_us * (1 + gamma * np.maximum(0, tokens - knee))


@pytest.mark.parametrize(("knee", "gamma"), [(96, 0.5), (96, 1 / 96), (200, 1 / 100), (33, 0.02)])
def test_k_max_of_a_clock_with_a_knee(knee: int, gamma: float) -> None:
    found = echo.saturation_tokens(hinge(7000.0, knee, gamma), 8, 60)
    assert knee <= found <= knee + 1 / (3 * gamma)


@pytest.mark.parametrize("name", ["h100-llama-3.1-8b-eagle", "line"])
def test_k_max_of_a_packaged_clock_is_where_tokens_take_half_the_time(name: str) -> None:
    clock = load_cost_model(Path(name))
    assert isinstance(clock, LinearCost)
    for batch in (1, 8, 64):
        fixed = clock.verify_fixed_us + batch * 100 * clock.verify_cached_token_us
        found = echo.saturation_tokens(lambda n, b=batch: clock.verify_us(n, b, 100), batch, 1024)
        assert found == int(fixed / clock.verify_token_us)


@pytest.mark.parametrize(
    ("clock", "found"),
    [
        (lambda n: 0 * n + 5.0, "never saturated: 480 take 0% longer"),
        (hinge(5.0, 470, 0.01), "never saturated: 480"),
        (lambda n: 20.0 * n, "always saturated: 16 take 100% longer"),
    ],
)
def test_k_max_of_a_clock_without_a_knee_is_refused(clock: Any, found: str) -> None:
    with pytest.raises(UsageError, match=f"{found}.*--max-tokens"):
        echo.saturation_tokens(clock, 8, 60)
