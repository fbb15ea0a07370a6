"""Units of a watch: whole hours, days and conversations, and the false alarms of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from specctl.stats import Interval
from specctl.watch.drift import evidence, lie_apart, watch
from specctl.watch.signals import COLUMNS, Prompts, in_units, watched

ALPHA, STREAMS = 0.05, 100
START = np.datetime64("2026-01-01T00:00:00")


def prompts_at(times: np.ndarray, kind: np.ndarray, names: list[str], calls: float = 1) -> Prompts:
    """Prompts of two categories; those of the second emit twice the tokens per call."""
    sums = np.zeros((len(times), len(COLUMNS)))
    sums[:, COLUMNS.index("calls")] = calls
    sums[:, COLUMNS.index("tokens")] = 2.0 + 2.0 * kind
    sums[:, COLUMNS.index("verified")] = 5.0
    finished = np.array([str(one).replace("T", " ") for one in times], object)
    category = np.array(["chat", "code"], object)[kind]
    return Prompts(np.array(names, object), category, finished, np.full(len(times), 9.0), sums)


def daily(rng: np.random.Generator, num_days: int, *, code: float = 0.5) -> Prompts:
    """96 prompts a day; the share of code swings by 0.5 about its mean."""
    at = np.arange(96 * num_days)
    share = code + 0.5 * np.sin(2 * np.pi * at / 96)
    kind = (rng.random(len(at)) < share).astype(int)
    return prompts_at(START + at * np.timedelta64(15, "m"), kind, [str(one) for one in at])


def in_conversations(rng: np.random.Generator, number: int, *, code: float = 0.5) -> Prompts:
    """Conversations of 5 prompts of one category, one a minute, behind one another."""
    kind = np.repeat(rng.random(number) < code, 5).astype(int)
    names = [f"chat-{one // 5}#{one % 5}" for one in range(5 * number)]
    return prompts_at(START + np.arange(5 * number) * np.timedelta64(1, "m"), kind, names)


def rings(prompts: Prompts, num_reference: int) -> bool:
    """Whether the alarm rings, at any look, of units behind the first ones."""
    start = prompts.start_of(num_reference)
    sides = watched(prompts.take(slice(start)), prompts.take(slice(start, None)))
    return bool((evidence(sides, 0)[-1] >= 1 / ALPHA).any())


Traffic = Callable[..., Prompts]


@pytest.mark.parametrize(
    ("traffic", "unit", "size", "num_reference", "moved"),
    [(daily, "day", 42, 20, (0.4, 0.6)), (in_conversations, "conversation", 215, 100, (0.3, 0.7))],
)
def test_traffic_with_an_order_rings_by_prompt_and_not_by_its_unit(
    traffic: Traffic, unit: str, size: int, num_reference: int, moved: tuple[float, float]
) -> None:
    """100 streams of 20 whole days or some 100 conversations, behind as many of a reference.

    The bound is a binomial's at alpha and 3 sigma, 11.5 of 100: a true rate of 20 % is above it
    with probability 0.98. By prompt most streams ring. Where the share of code moves behind the
    reference, by `moved`, most of 20 streams ring by the unit, too.
    """
    rng = np.random.default_rng(5)

    def streams(number: int) -> Iterator[tuple[Prompts, int]]:
        """Prompts, and how many of them are the reference."""
        for _ in range(number):
            prompts = traffic(rng, size)
            yield prompts, in_units(prompts, unit).start_of(num_reference)

    by_unit = [rings(in_units(one, unit), num_reference) for one, _ in streams(STREAMS)]
    assert np.mean(by_unit) <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / STREAMS)
    by_prompt = [rings(in_units(one, "prompt"), start) for one, start in streams(8)]
    assert np.mean(by_prompt) > 0.5
    changed = []
    for _ in range(20):
        before, after = (in_units(traffic(rng, size, code=code), unit) for code in moved)
        found = watch(before.take(slice(before.start_of(num_reference))), after, unit=unit)
        changed.append(found.alarm_at is not None)
    assert np.mean(changed) > 0.8


def test_the_first_and_the_last_day_of_a_log_are_left_out() -> None:
    at = START + np.arange(10, 100) * np.timedelta64(1, "h")  # 14 hours, three days, 4 hours
    prompts = prompts_at(at, np.zeros(90, int), [str(one) for one in range(90)])
    days = in_units(prompts, "day")
    assert (days.num_units, len(days), days.finished[0]) == (3, 72, "2026-01-02 00:00:00")
    assert days.unit is not None
    assert np.bincount(days.unit).tolist() == [24, 24, 24]
    assert in_units(prompts, "hour").num_units == 88
    reference, stream = days.split(8)
    assert (reference.num_units, len(stream)) == (3, 0)  # 8 units are the least
    assert in_units(prompts.take(slice(20)), "day").num_units == 0


def test_a_conversation_is_whole_an_hour_after_its_last_prompt() -> None:
    minutes = np.array([0, 1, 2, 30, 62, 200, 201, 270])
    names = ["a#0", "b#0", "a#1", "c", "b#1", "a#2", "b#2", "d"]
    at = START + minutes * np.timedelta64(1, "m")
    found = in_units(prompts_at(at, np.zeros(8, int), names), "conversation")
    assert found.unit is not None
    units = [found.ids[found.unit == one].tolist() for one in range(found.num_units)]
    # b paused for 61 minutes, a for 198; b#2 and d may go on.
    assert units == [["b#0"], ["a#0", "a#1"], ["c"], ["b#1"], ["a#2"], ["b#2"]]


def test_what_a_log_gains_comes_behind_what_was_whole() -> None:
    """At every later look the units of an earlier one stand first, as they were."""
    rng = np.random.default_rng(3)
    at = START + np.sort(rng.integers(0, 3000, 200)) * np.timedelta64(1, "m")
    names = [f"{one}#{at}" for at, one in enumerate(rng.integers(0, 12, 200))]
    prompts = prompts_at(at, rng.integers(0, 2, 200), names)
    for unit in ("prompt", "hour", "day", "conversation"):
        before: list[str] = []
        for end in range(20, 201, 20):
            looked = in_units(prompts.take(slice(end)), unit)
            assert looked.ids.tolist()[: len(before)] == before, unit
            before = looked.ids.tolist()
        assert before


def test_a_signal_whose_intervals_overlap_has_not_moved() -> None:
    before = Interval(0.9, 0.89, 0.91)
    ends = [(0.7, 0.88), (0.87, 0.92), (math.nan, math.nan)]
    assert [lie_apart(before, Interval(0.8, *pair)) for pair in ends] == [True, False, True]
    kind = np.random.default_rng(2).integers(0, 2, 1500)
    kind[200:260] = 1  # and what follows is again as the reference
    at = START + np.arange(1500) * np.timedelta64(1, "m")
    prompts = prompts_at(at, kind, [str(one) for one in range(1500)])
    found = watch(prompts.take(slice(200)), prompts.take(slice(200, None)))
    [tokens] = [one for one in found.signals if one.signal == "tokens per call"]
    assert (found.alarm, tokens.moved, tokens.most_wealth > 1000) == (True, False, True)
    said = " ".join(map(str, found.model_copy(update={"signals": (tokens,)}).shown()))
    assert "No signal moved by itself and by more than its interval; most evidence" in said


def test_a_quiet_watch_is_said_in_few_digits_and_without_what_is_nowhere() -> None:
    """No category is beyond those of the reference; the evidence may be large at a small alpha."""
    rng = np.random.default_rng(2)
    prompts = in_conversations(rng, 20)
    quiet = watch(prompts.take(slice(50)), prompts.take(slice(50, None)), alpha=1e-90)
    said = " ".join(map(str, quiet.shown()))
    assert "alarm at 1e+90)" in said
    assert "category code" in said
    assert "category other" not in said
    loud = quiet.model_copy(update={"wealth": 1e80, "most_wealth": 1e80})
    assert "evidence 1e+80, alarm at" in str(loud.shown()[0])
