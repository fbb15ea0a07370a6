"""`specctl import` answers: which draft length at which load, when off, or at which price."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import log, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl import console
from specctl.cli.imported import describe_summary
from specctl.engines.lengths import length_lines
from specctl.errors import InputError, UsageError
from specctl.logs import sources
from specctl.logs.acceptance_figures import chain_figures, mean_ranges, narrowed, sweep_of
from specctl.logs.advice import Advice, best_lengths, explain
from specctl.logs.importing import import_files
from specctl.logs.sources import Source
from specctl.replay.cost.files import parse_linear
from specctl.replay.metrics import LoadClock
from tests.cli.command import specctl
from tests.logs.import_cases import (
    figures,
    imported,
    scrape,
    scrape_sglang,
    sglang_line,
    sglang_start,
    vllm_figures,
    vllm_load,
    vllm_log,
)
from tests.replay.costs import table_model
from tests.servers import free_port

LINEAR = (
    "verify_fixed_us=5000,verify_token_us=60,verify_cached_token_us=0,"
    "draft_fixed_us=300,draft_token_us=250,step_us=200"
)

# --------------------------------------------------------------------------- the best length


def counted(*at_least: int, num_rounds: int = 100) -> dict[str, Any]:
    drafted = num_rounds * len(at_least)
    return chain_figures(num_rounds, at_least, drafted, sum(at_least), is_ragged=False)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_a_draft_token_pays_below_its_share(counts: list[int]) -> None:
    chains = counted(*sorted(counts, reverse=True))["fixed_length_sweep"]["chains"]
    taus = [1.0, *(chain["mean_acceptance_length_range"][0] for chain in chains)]
    for length, chain in enumerate(chains, start=1):
        for factor, pays in ((0.99, True), (1.01, False)):
            share = chain["pays_below_step_frac"] * factor
            longer = taus[length] / (1 + length * share)
            assert (longer > taus[length - 1] / (1 + (length - 1) * share)) == pays


def test_the_best_length_is_the_fastest_of_the_sweep() -> None:
    """70, 40, 10 of 100 rounds: steps of 5260, 5870, 6180, 6490 us by hand."""
    clock = LoadClock(parse_linear(LINEAR))
    advice = Advice(lambda _, k, tau, c: clock.chain_us(k, tau, context_tokens=c), (1,), "")
    best = best_lengths(counted(70, 40, 10), advice, 1)
    steps = [5260, 5870, 6180, 6490]
    expected = [1e6 * tau / us for tau, us in zip((1, 1.7, 2.1, 2.2), steps, strict=True)]
    assert best["num_draft_tokens"] == [2]
    assert [low for low, _ in best["tokens_per_s_range"]] == pytest.approx(expected)
    assert best["over_plain_range"][2] == pytest.approx([expected[2] / expected[0]] * 2)


@pytest.mark.parametrize(
    ("step_us", "lengths", "says"),
    [
        ((10, 100, 100, 100), [0], []),
        ((10, 10, 10, 10), [3], ["More than 3 draft tokens were not measured."]),
        ((10, 10, 99, 99), [1], []),
        ((10, 17, 21, 22), [0], []),  # the shortest of equals
    ],
)
def test_the_best_length_in_words(
    step_us: tuple[int, ...], lengths: list[int], says: list[str]
) -> None:
    found = explain(counted(70, 40, 10), Advice(lambda _, k, *more: step_us[k], (1,), "CLOCK"))
    assert found["best_lengths"][0]["num_draft_tokens"] == lengths
    assert found["meaning"][:-1] == says


def test_lengths_whose_ranges_overlap_are_all_named() -> None:
    figures = {
        "mean_acceptance_length_range": [2.0, 2.0],
        "fixed_length_sweep": sweep_of(mean_ranges((2.0, 2.0), 3), "a range"),
        "not_known": ["acceptance by position"],
    }
    found = explain(figures, Advice(lambda _, k, *more: 10 + k, (1,), "CLOCK"))
    assert found["best_lengths"][0]["num_draft_tokens"] == [1, 2, 3]
    assert found["schedule"] is None
    assert "Where several lengths are named, their ranges overlap." in found["meaning"]


def test_lengths_by_load_make_a_schedule() -> None:
    """A request's step of 100 + 10 B K: 2.1 / 160 > 1.7 / 130 at three, 1.7 / 170 = 1 / 100."""
    advice = Advice(lambda size, k, *more: 100 + 10 * size * k, (1, 2, 8, 32), "CLOCK")
    found = explain(counted(70, 40, 10), advice)
    assert [one["num_draft_tokens"] for one in found["best_lengths"]] == [[2], [2], [0], [0]]
    assert found["schedule"] == [(1, 2), (4, 1), (7, 0)]
    alone = Advice(lambda size, k, *more: 100 + 10 * (size - 1) * k, (1, 32), "CLOCK")
    [limit, off, _] = explain(counted(70, 40, 10), alone)["meaning"]
    assert off == "From 8 requests on drafts cost more than they bring."
    assert limit == "More than 3 draft tokens were not measured."  # at one request


@pytest.mark.parametrize("error", [0.02, 0.1])
def test_the_clock_s_error_is_in_the_interval(error: float) -> None:
    """Both times draw it: on the log scale it adds to the square of acceptance's half."""

    def halves(error: float | None) -> list[float]:
        advice = Advice(lambda _, k, *more: 10 + k, (1,), "CLOCK", time_error=error)
        best = best_lengths(counted(70, 40, 10), advice, 1)
        [[gain, _]] = [best["over_plain_range"][n] for n in best["num_draft_tokens"]]
        return [abs(log(end / gain)) for end in best["over_plain_interval"]]

    first, second, _ = counted(70, 40, 10)["marginal_interval"]
    ends = [1 + first[end] + second[end] for end in (0, 1)]
    assert halves(None) == pytest.approx([abs(log(tau / 2.1)) for tau in ends])
    for alone, both in zip(halves(None), halves(error), strict=True):
        assert both**2 - alone**2 == pytest.approx(2 * (1.96 * error) ** 2)


# --------------------------------------------------------------------------- context

AT_1, AT_8 = (9, 8, 7), (5, 2, 1)
"""Rounds of ten that accepted 1, 2, 3 tokens, of short and of long requests."""


def llamacpp_requests(*texts: int) -> str:
    """Requests with these tokens of text, those from 8,000 on accepted less."""
    lines = []
    for task, text in enumerate(texts):
        at_least = AT_8 if text >= 8000 else AT_1
        accepted = sum(at_least)
        slot = f"0.{task:02d}.978.611 I slot print_timing: id  0 | task {task} | "
        lines += [
            f"{slot}       eval time =   912.55 ms /   {11 + accepted} tokens (    7.53 ms)",
            f"{slot}draft acceptance = 0.5 ({accepted} accepted / 30 generated), mean len = "
            f" {1 + accepted / 10:.2f}",
            f"{slot}     acc per pos = ({', '.join(f'{n / 10:.3f}' for n in at_least)})",
            f"{slot}stop processing: n_tokens = {text}, truncated = 0",
        ]
    return "\n".join(lines)


CONTEXTS = llamacpp_requests(*range(1000, 1008), *range(8000, 8008))


def test_lengths_by_context() -> None:
    found = explain(figures(CONTEXTS), Advice(lambda _, k, *more: 100 + 20 * k, (1, 8), "CLOCK"))
    short, long = found["by_context"]
    assert (short["marginal_prob"], long["marginal_prob"]) == ([0.9, 0.8, 0.7], [0.5, 0.2, 0.1])
    # Halfway through 35 or 19 emitted tokens.
    assert short["context_tokens"] == [1000 - 17.5, 1007 - 17.5]
    assert long["mean_context_tokens"] == 8003.5 - 9.5
    lengths = [[one["num_draft_tokens"] for one in part["best_lengths"]] for part in (short, long)]
    assert lengths == [[[3], [3]], [[1], [1]]]
    by_text = Advice(lambda _, k, tau, context: 100 + k * context / 100, (1,), "CLOCK")
    of_clock = explain(figures(CONTEXTS.replace("8000", "7000")), by_text)["by_context"]
    assert [one["best_lengths"][0]["num_draft_tokens"] for one in of_clock] == [[3], [0]]


@pytest.mark.parametrize(
    ("log", "is_known"),
    [
        (CONTEXTS, True),
        (llamacpp_requests(*range(1000, 1016)), False),  # alike
        (llamacpp_requests(*range(1000, 1008), *range(8000, 8007)), False),  # too few
        (CONTEXTS.replace("truncated = 0", "truncated = 1"), False),
        (CONTEXTS.replace("n_tokens = ", "n_past = "), True),
    ],
)
def test_logs_that_hold_the_context(log: str, *, is_known: bool) -> None:
    assert (figures(log)["by_context"] is not None) == is_known


def test_the_context_in_sglang_s_log() -> None:
    """Tokens in the cache over running requests."""
    lines = [
        sglang_line(4, length, 0.5, second=second).replace(word, f"{word[:-3]}{4 * text}")
        for text, length, word in ((500, 2.5, "#token: 300"), (5000, 2.5, "#token: 300"))
        for second in range(text // 500, text // 500 + 8)
    ]
    for form in ("#token", "#full token"):
        log = "\n".join([sglang_start(), *lines]).replace("#token", form)
        assert [part["context_tokens"] for part in figures(log)["by_context"]] == [
            [500, 500], [5000, 5000],
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((70, 40, 10), "Drafting 3 tokens pays if a step with drafts takes less than 2.20 plain"),
        ((70, 40, 10), "Token 3 pays if it makes a step less than 4.8% longer."),  # 2.2 / 2.1
        ((50,), "Drafting 1 token pays"),
        ((0, 0), "Nothing was accepted, so drafting cannot pay: switch it off"),
    ],
)
def test_prices_without_a_clock(counts: tuple[int, ...], says: str) -> None:
    assert says in explain(counted(*counts), None)["meaning"][0]


# --------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("engine", "schedule", "says"),
    [
        ("vllm", [(1, 4)], '--speculative-config: "num_speculative_tokens": 4.'),
        ("vllm", [(1, 4), (9, 2), (33, 0)], "[33, 64, 0]] (vLLM 0.24 or newer)."),
        ("vllm", [(5, 4), (9, 2)], "[[1, 8, 4], [9, 64, 2]]"),
        ("vllm", [(1, 2), (9, 4)], '"num_speculative_tokens": 4, '),
        ("vllm", [(1, 0)], "start the server without --speculative-config"),
        ("sglang", [(1, 3)], "--speculative-num-steps 3 --speculative-eagle-topk 1 "
         "--speculative-num-draft-tokens 4 (the root counts"),
        ("sglang", [(1, 3), (9, 1)], '{"1": {"candidate_steps": [3]}, "9": {"candidate_steps"'),
        ("sglang", [(1, 0)], "without --speculative-algorithm"),
        ("llamacpp", [(1, 3)], "--spec-draft-n-max 3."),
        ("llamacpp", [(1, 3), (4, 0)], "-n-max 3 from 1 request on; no --spec-type from 4"),
    ],
)  # fmt: skip
def test_lengths_as_an_engine_s_settings(engine: str, schedule: Any, says: str) -> None:
    assert says in " ".join(length_lines(engine, schedule, 64))


# --------------------------------------------------------------------------- own clock

FIXED, BY_REQUEST, DRAFTING, BY_TOKEN, BY_BOTH = 8_000.0, 40.0, 3_000.0, 900.0, 30.0
"""us of a step: 8,000 + 40 B, and 3,000 + K (900 + 30 B) more with K draft tokens."""


def step_us(load: int, length: int) -> float:
    drafting = DRAFTING + length * (BY_TOKEN + BY_BOTH * load) if length else 0.0
    return FIXED + BY_REQUEST * load + drafting


def timed_vllm(
    length: int, loads: Sequence[int], method: str = "", by_load: Sequence[int] = ()
) -> str:
    """Intervals of ten seconds at these loads, 70, 50, 30, 20 % accepted by position, with these
    draft tokens at each of the loads if they are given."""
    said = f"SpeculativeConfig(method='{method}', model='m', num_spec_tokens={length})"
    start = f"Initializing a V1 LLM engine (v0.33.0) with config: speculative_config={said}"
    lines = [start] if method else []
    for place, load in enumerate(loads):
        drafted = by_load[place] if by_load else length
        before = f"(APIServer pid={length}) INFO 11-24 05:{place:02d}:00 "
        steps = round(1e7 / step_us(load, drafted) / 10) * 10
        rounds = steps * load
        tokens = rounds * (1 + sum((0.7, 0.5, 0.3, 0.2)[:drafted]))
        lines.append(
            f"{before}Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
            f"{tokens / 10:.1f} tokens/s, Running: {load} reqs, Waiting: 0 reqs"
        )
        if length:
            counts = [round(share * rounds) for share in (0.7, 0.5, 0.3, 0.2)[:drafted]]
            accepted = [sum(n < count for count in counts) for n in range(rounds)]
            lines.append(before + vllm_figures(accepted, length, [drafted] * rounds))
    return "\n".join(lines)


LOADS = (1, 2, 4, 8, 12, 16, 24, 32)


@pytest.mark.parametrize("lengths", [(2, 4), (0, 4), (0, 2, 4)])
def test_logs_of_several_lengths_are_a_clock(lengths: tuple[int, ...]) -> None:
    """The figures of the clock that made the logs, and none of a length that they tell nothing of:
    drafting has a price of its own, so the line through 2 and 4 does not lead to plain decoding.
    """
    logs = [Source(str(k), timed_vllm(k, LOADS).encode()) for k in lengths]
    found = import_files(logs, None, (1, 8, 32, 64))
    own = found.get("models", {"4": found})["4"]
    true = Advice(lambda size, k, *more: step_us(size, k) / size, (1, 8, 32), "truth")
    expected = explain(counted(70, 50, 30, 20), true)
    assert "the logs' own steps, at 1 to 32 requests (typical error" in own["clock"]
    said = " ".join(own["meaning"])
    assert "The logs reach from 1 to 32 requests: 64 not judged." in said
    judged = {(2, 4): [1, 2, 3, 4], (0, 4): [0, 4], (0, 2, 4): [0, 1, 2, 3, 4]}[lengths]
    assert ("Plain decoding is not judged" in said) == (0 not in judged)
    assert ("Fewer than 4 draft tokens are not judged" in said) == (1 not in judged)
    for one, other in zip(own["best_lengths"], expected["best_lengths"], strict=True):
        rates = one["tokens_per_s_range"]
        assert [k for k, rate in enumerate(rates) if rate] == judged
        fastest = max(judged, key=lambda k: other["tokens_per_s_range"][k])
        assert one["num_draft_tokens"] == [fastest]
        for k in judged:
            assert rates[k] == pytest.approx(other["tokens_per_s_range"][k], rel=0.03)
        gains = [one["over_plain_range"][k] for k in judged]
        assert None not in gains if 0 in judged else not any(gains)


SCHEDULE = (4, 4, 4, 4, 2, 2, 2, 2)
"""Draft tokens at each of `LOADS`."""


def test_a_line_under_a_schedule_is_timed_at_its_own_length() -> None:
    """The log of a table that `Set` printed, beside the log before it and plain decoding."""
    texts = {
        "3": timed_vllm(3, LOADS),
        "table": timed_vllm(4, LOADS, by_load=SCHEDULE),
        "plain": timed_vllm(0, LOADS),
    }
    logs = {name: Source(name, text.encode()) for name, text in texts.items()}
    found = import_files([*logs.values()], None, (1, 8, 12, 32))["models"]["table"]
    true = Advice(lambda size, k, *more: step_us(size, k) / size, (1, 8, 12, 32), "truth")
    expected = explain(counted(70, 50, 30, 20), true)
    for one, other in zip(found["best_lengths"], expected["best_lengths"], strict=True):
        judged = range(5) if one["batch_size"] <= 8 else range(4)  # 4 did not run beyond
        rates = one["tokens_per_s_range"]
        assert [k for k, rate in enumerate(rates) if rate] == [*judged]
        for k in judged:
            assert rates[k] == pytest.approx(other["tokens_per_s_range"][k], rel=0.03)
    assert "At 12 and 32 requests, lengths that did not run are not judged" in " ".join(
        found["meaning"]
    )
    alone = import_files([logs["table"], logs["plain"]], None, (8, 32))
    known = [
        [k for k, rate in enumerate(one["tokens_per_s_range"]) if rate]
        for one in alone["best_lengths"]
    ]
    assert known == [[0, 4], [0, 2]]


def test_a_position_counts_over_the_lines_that_drafted_it() -> None:
    """Beyond, nothing was rejected; τ over time is that of the tokens that all lines drafted."""
    log = timed_vllm(4, LOADS[::-1] * 2, by_load=SCHEDULE[::-1] * 2)
    found = figures(log)
    assert found["marginal_prob"] == pytest.approx([0.7, 0.5, 0.3, 0.2], abs=0.002)
    assert found["conditional_prob"] == pytest.approx([0.7, 5 / 7, 0.6, 2 / 3], abs=0.002)
    assert found["fixed_length_sweep"]["is_exact"]
    assert 2.2 < found["mean_acceptance_length"] < 2.7
    [(low, high)] = found["marginal_interval"][3:]
    assert 0.19 < low <= high < 0.21
    over = found["over_time"]
    assert over["num_draft_tokens"] == 2
    assert over["first_half"] == pytest.approx(over["second_half"], abs=0.002)
    assert "Over time: τ of 2 tokens 2.20 in the first half" in " ".join(found["meaning"])


def test_a_line_that_mixes_lengths_tells_no_position() -> None:
    """Its rounds and its time count."""
    log = timed_vllm(4, LOADS * 2, by_load=SCHEDULE * 2)
    mixed = vllm_figures([4] * 100 + [2] * 301, 4, [4] * 100 + [2] * 301)
    before = log[: log.index("Engine")].replace("05:00", "06:00")
    whole, both = figures(log), figures(f"{log}\n{before}{mixed}")
    assert both["num_rounds"] == whole["num_rounds"] + 401
    assert both["marginal_prob"] == whole["marginal_prob"]
    assert "over 16 lines of the log, without 1 line that mixed lengths" in both["interval_basis"]
    assert "the exact number of rounds" in both["not_known"]


def test_each_drafter_has_a_clock_of_its_own() -> None:
    """Beside the same plain steps; one of too few lines has prices in place of a clock."""
    texts = {
        "plain": timed_vllm(0, LOADS),
        "few": timed_vllm(3, LOADS[:3], "mtp"),
        "head": timed_vllm(2, LOADS, "eagle3"),
        "block": timed_vllm(4, LOADS, "dflash"),
    }
    found = import_files([Source(name, text.encode()) for name, text in texts.items()], None, (8,))
    for name, length in (("head", 2), ("block", 4)):
        [best] = found["models"][name]["best_lengths"]
        judged = [k for k, rate in enumerate(best["over_plain_range"]) if rate]
        assert judged == [0, length]
        tau = 1 + sum((0.7, 0.5, 0.3, 0.2)[:length])
        gain = tau * step_us(8, 0) / step_us(8, length)
        assert best["over_plain_range"][length] == pytest.approx([gain] * 2, rel=0.03)
    few = found["models"]["few"]
    assert few["best_lengths"] is None
    assert "Drafting 3 tokens pays" in " ".join(few["meaning"])


def slowed(length: int, factor: float) -> Source:
    """A log at these loads, of whose lines every second took longer."""
    slow = lambda found: f"generation throughput: {float(found[1]) / factor:.1f}"  # noqa: E731
    blocks = re.split(r"\n(?=.*Avg prompt)", timed_vllm(length, sorted(LOADS * 2)))
    blocks[::2] = [re.sub(r"generation throughput: ([\d.]+)", slow, one) for one in blocks[::2]]
    return Source(str(length), "\n".join(blocks).encode())


@pytest.mark.parametrize(("factor", "off", "typical"), [(1.2, 0.1, "9.1%"), (3.0, 0.4, "")])
def test_the_own_clock_s_error(factor: float, off: float, typical: str) -> None:
    """Lines are about a tenth off; at a third of its speed the clock is too rough for a setting."""
    found = import_files([slowed(k, factor) for k in (0, 2, 4)], None, (8,))["models"]["4"]
    assert found["time_error"] == pytest.approx(off * (pi / 2) ** 0.5, rel=0.15)
    assert f"(typical error {typical}" in found["clock"]
    assert found["best_lengths"]
    rough = "No setting is named: these times are too rough" in " ".join(found["meaning"])
    assert (found["schedule"] is None) == rough == (factor == 3)


def test_loads_that_the_logs_do_not_reach() -> None:
    """Their ends are judged in place of loads outside, and the logged length stays below."""
    logs = [Source(str(k), timed_vllm(k, (16, 20, 24, 28, 30)).encode()) for k in (0, 2, 4)]
    own = import_files(logs, None, (1, 16, 32))["models"]["4"]
    assert [one["batch_size"] for one in own["best_lengths"]] == [16, 30]
    assert own["schedule"][:2] == [(1, 4), (16, 3)]
    line = "The logs reach from 16 to 30 requests: 1 and 32 not judged, and below 16 Set keeps the "
    assert f"{line}log's 4." in own["meaning"]
    assert import_files(logs, None, (16, 32))["models"]["4"]["schedule"][0] == (16, 3)


@pytest.mark.parametrize(
    ("factor", "is_forced", "says"),
    [
        (1.0, False, ""),
        (0.8, False, "this clock predicts"),
        (0.4, False, "so it is another server's"),
        (0.4, True, "so it is another server's"),
        (2.0, False, "so it is another server's"),
    ],
)
def test_a_clock_is_held_against_the_log(factor: float, says: str, *, is_forced: bool) -> None:
    """At 24 and 32 requests only it is wrong; one that the log refutes names no length."""

    def clock(size: int, k: int, *more: float) -> float:
        return step_us(size, k) / size * (factor if size > 16 else 1)

    advice = Advice(clock, (1, 8), "CLOCK", is_forced=is_forced)
    found = import_files([Source("4", timed_vllm(4, sorted(LOADS * 4)).encode())], advice)
    assert found["log_over_clock"] == pytest.approx(1 / factor, rel=0.02)
    said = " ".join(found["meaning"])
    assert says in said
    assert ("this clock predicts" in said) == bool(says)
    refuted = "another" in says and not is_forced
    assert (found["best_lengths"] is None, found["schedule"] is None) == (refuted, refuted)
    assert ("Drafting 4 tokens pays" in said) == refuted


@pytest.mark.parametrize(("factor", "is_refuted"), [(1.0, False), (3.0, True)])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_and_go_are_no_other_server(
    factor: float, seed: int, *, is_refuted: bool
) -> None:
    """The running requests of a line are those of one moment, and its tokens/s a mean over ten
    seconds: here of another load than that moment's. Lines of a right clock are off many times, and
    their sums agree."""
    draw = np.random.default_rng(seed)
    text = timed_vllm(4, [int(load) for load in draw.choice(LOADS, 48)])
    moments = iter(draw.permutation(re.findall(r"Running: (\d+)", text)))
    text = re.sub(r"Running: \d+", lambda _: f"Running: {next(moments)}", text)
    clock = Advice(lambda size, k, *_: step_us(size, k) / size * factor, (8,), "CLOCK")
    found = import_files([Source("4", text.encode())], clock)
    assert ("this clock predicts" in " ".join(found["meaning"])) == is_refuted
    assert (found["best_lengths"] is None) == is_refuted


@given(
    st.lists(st.floats(0.0, 1.0), min_size=3, max_size=6),
    st.sets(st.integers(1, 5), min_size=1),
    st.floats(0.0, 0.1),
)
def test_measured_lengths_narrow_the_others(rates: list[float], at: set[int], off: float) -> None:
    """The truth stays inside, and a measured length is known as its log has it."""
    taus = [1 + sum(sorted(rates, reverse=True)[:k]) for k in range(len(rates) + 1)]
    ends = [(max(tau - off, 1.0), tau + off) for tau in taus]
    sweep = sweep_of(mean_ranges(ends[-1], len(rates)), "a range")
    found = narrowed(sweep, {k: ends[k] for k in at if k < len(rates)})
    for k, (one, other) in enumerate(zip(found["chains"], sweep["chains"], strict=True), start=1):
        low, high = one["mean_acceptance_length_range"]
        assert low - 1e-9 <= taus[k] <= high + 1e-9
        least, most = other["mean_acceptance_length_range"]
        if k in at:
            least, most = max(least, ends[k][0]), min(most, ends[k][1])
        assert least - 1e-9 <= low <= high <= most + 1e-9


def test_a_log_of_means_at_a_shorter_length() -> None:
    """SGLang's means at 2 and 5 tokens: the mean at 2 is not guessed from that at 5."""

    def log(length: int, mean: float) -> str:
        start = f"speculative_eagle_topk=1, speculative_num_draft_tokens={length + 1}"
        lines = [sglang_line(4, mean, (mean - 1) / length, second=n) for n in range(9)]
        return "\n".join([sglang_start(start), *lines])

    found = import_files([Source("5", log(5, 3.0).encode()), Source("2", log(2, 2.3).encode())])
    low, high = found["models"]["5"]["fixed_length_sweep"]["chains"][1][
        "mean_acceptance_length_range"
    ]
    assert (low, high) == (pytest.approx(2.295), pytest.approx(2.305))


def test_logs_that_are_no_clock() -> None:
    one, short = timed_vllm(4, LOADS), timed_vllm(2, LOADS[:3])
    apart = timed_vllm(2, [64, 80, 96, 99])
    for texts in ((one,), (one, short), (one, apart), (one, "\n".join(vllm_log()))):
        sources = [Source(str(n), text.encode()) for n, text in enumerate(texts)]
        found = import_files(sources, None, (1, 8))
        for own in found.get("models", {"": found}).values():
            assert own["best_lengths"] is None


START = (
    "(EngineCore pid=9) INFO 11-24 05:00:00 [core.py:113] Initializing a V1 LLM engine (v0.33.0) "
    "with config: model='small', speculative_config=SpeculativeConfig(method='eagle3', "
    "model='head', num_spec_tokens=4), dtype=torch.bfloat16\n"
)


@pytest.mark.parametrize(
    ("length", "start", "is_one", "says"),
    [
        (2, START, True, ""),
        (2, START.replace("'small'", "'large'"), False, "has the model large and 4 small: their"),
        (2, START.replace("0.33", "0.32"), False, "has the version 0.32.0 and 4 0.33.0: their"),
        (2, START.replace("'eagle3'", "'mtp'"), False, "has the method mtp and 4 eagle3: their"),
        (2, START.replace("'head'", "'other'"), False, "has the drafter other and 4 head: their"),
        (2, "", True, "2 does not name its model, version, method and drafter: taken as of the "),
        (0, "", True, "0 does not name its model and version: taken as of the server of 4"),
        (0, START.replace("'small'", "'large'"), False, "has the model large and 4 small: their"),
    ],
)
def test_logs_of_one_server(length: int, start: str, says: str, *, is_one: bool) -> None:
    """As their start lines say; one without them is joined where nothing contradicts."""
    texts = {"4": START + timed_vllm(4, LOADS), str(length): start + timed_vllm(length, LOADS)}
    found = import_files([Source(name, text.encode()) for name, text in texts.items()])
    assert (found.get("models", {"4": found})["4"]["best_lengths"] is not None) == is_one
    assert says in " ".join(found["taken"])
    assert bool(found["taken"]) == bool(says)


def test_logs_that_both_name_nothing_are_joined_and_that_is_said() -> None:
    found = imported(timed_vllm(4, LOADS), timed_vllm(2, LOADS))
    assert found["models"]["0"]["best_lengths"]
    assert found["taken"] == [
        "1 does not name its model: taken as of the server of 0. Keep its start lines."
    ]


def test_a_log_of_two_servers_is_no_clock() -> None:
    other = START.replace("small", "large") + timed_vllm(2, LOADS)
    found = imported(START + timed_vllm(4, LOADS) + "\n" + other)
    assert "0 has the model small and large, so its steps make no clock" in found["taken"][0]
    assert not any(own["best_lengths"] for own in found["models"].values())


@pytest.mark.parametrize("length", [0, 2])
def test_a_log_that_may_be_of_two_servers_is_joined_to_none(length: int) -> None:
    texts = {
        "a": START + timed_vllm(4, LOADS),
        "b": START.replace("small", "large") + timed_vllm(3, LOADS),
        "c": timed_vllm(length, LOADS),
    }
    found = import_files([Source(name, text.encode()) for name, text in texts.items()])
    assert "c may be of the server of a or b, and is joined to none" in found["taken"][-1]
    assert not any(own["best_lengths"] for own in found["models"].values())


def test_a_log_given_twice() -> None:
    texts = [timed_vllm(4, LOADS), timed_vllm(4, LOADS)]
    with pytest.raises(InputError, match="1 has the lines of 0 again; give each log once"):
        import_files([Source(str(n), text.encode()) for n, text in enumerate(texts)])
    with pytest.raises(InputError, match="0 is given twice; give each log once"):
        import_files([Source("0", text.encode()) for text in texts])


def cut_log(length: int, start: int, end: int, *, timed: bool = True) -> Source:
    """Intervals of one server's log, such as a copy of what it had written by then."""
    loads = [1 + place % 7 + place // 2 for place in range(40)]
    blocks = re.split(r"\n(?=.*Avg prompt)", timed_vllm(length, loads))
    text = "\n".join(blocks[start:end])
    text = text if timed else re.sub(r"11-24 \d\d:\d\d:\d\d ", "", text)
    return Source(f"{start}-{end}", text.encode())


@pytest.mark.parametrize("length", [4, 0])
@pytest.mark.parametrize(
    ("ends", "timed", "told", "left"),
    [
        (((0, 20), (10, 40)), True, "10 lines of 10-40 stand in 0-20 too", (20, 20)),
        (((0, 20), (0, 40)), True, "20 lines of 0-40 stand in 0-20 too", (20, 20)),
        (((0, 40), (10, 20)), True, "10 lines of 10-20 stand in 0-40 too", (40,)),
        (((0, 20), (19, 40)), True, "1 line of 19-40 stand in 0-20 too", (20, 20)),
        (((10, 40), (0, 20)), True, "10 lines of 0-20 stand in 10-40 too", (30, 10)),
        (((0, 20), (10, 40)), False, "10 lines of 10-40 stand in 0-20 too", (20, 20)),
        (((0, 20), (20, 40)), True, "", (20, 20)),
        (((0, 20), (20, 40)), False, "", (20, 20)),
    ],
)
def test_lines_that_two_logs_share_count_once(
    length: int, ends: Any, told: str, left: tuple[int, ...], *, timed: bool
) -> None:
    """Two copies of a running server's log, or what was kept at a rotation. Lines without times,
    such as those of a log without drafts, are known by runs of eight."""
    if length == 0 and told.startswith("1 line"):
        return
    drafts = [Source("d", timed_vllm(2, LOADS).encode())] if length == 0 else []
    logs = [cut_log(length, *own, timed=timed) for own in ends]
    for advice in (None, Advice(lambda *_: 1e4, (8,), "CLOCK")):
        found = import_files([*logs, *drafts], advice)
        assert [*found["taken"], ""][0].startswith(told)
        assert len(" ".join(found["taken"]).split("count once")) == 1 + bool(told)
        names = [source.name for source in logs][: len(left)]
        if length == 0:
            assert found["without_drafts"] == names
            continue
        models = found.get("models", {names[0]: found})
        assert {name: own["num_intervals"] for name, own in models.items()} == dict(
            zip(names, left, strict=True)
        )


def test_a_context_longer_than_the_server_takes() -> None:
    start = START.replace("dtype=", "max_seq_len=8192, dtype=")
    log = Source("k5.log", (start + timed_vllm(4, LOADS)).encode())
    advice = Advice(lambda _, k, *more: 10 + k, (1,), "CLOCK", context_tokens=8192)
    assert import_files([log], advice)["num_rounds"]
    with pytest.raises(UsageError, match=r"than the server of k5.log takes: max_seq_len=8192"):
        import_files([log], replace(advice, context_tokens=8193))


def test_a_log_without_drafts_beside_one_of_sglang() -> None:
    def log(length: float, us: int) -> str:
        lines = [sglang_start()] if length > 1 else []
        for second in range(9):
            line = sglang_line(4, length, (length - 1) / 3, second=second)
            line = line.replace("812.10", f"{4 * length * 1e6 / us:.2f}")
            lines.append(
                line if length > 1 else re.sub("accept len.*?, accept rate.*?, ", "", line)
            )
        return "\n".join(lines)

    sources = [Source("0", log(1.0, 10_000).encode()), Source("3", log(2.5, 14_000).encode())]
    found = import_files(sources, None, (1, 8))
    assert [one["batch_size"] for one in found["best_lengths"]] == [4]
    gain = found["best_lengths"][0]["over_plain_range"][3]
    assert gain == pytest.approx([2.5 / 1.4] * 2, rel=0.01)


def timed_llamacpp(
    length: int, *, together: int = 1, start: str = "", drafted: int | None = None
) -> str:
    """Eight requests of 10 rounds, 6 ms + 4 ms a draft token each, or of 10 ms plain; and one of a
    single token.

    Args:
        drafted: tokens of a request.
    """
    lines = ["srv load_model: loading model 'm.gguf'" + f"\n{start}" * bool(start)]
    at_least = (7, 5, 3)[:length]
    accepted, ms = sum(at_least), 10 * (6 + 4 * length if length else 10)
    for first in range(0, 8, together):
        tasks = [f"slot x: id  0 | task {first + n} | " for n in range(together)]
        lines += [f"{task}processing task, is_child = 0" for task in tasks]
        for task in tasks:
            lines.append(f"{task}eval time = {ms:.2f} ms / {11 + accepted} tokens (")
            if length:
                lines.append(
                    f"{task}draft acceptance = 0.5 ({accepted} accepted / {drafted or 10 * length} "
                    f"generated), mean len = {1 + accepted / 10:.2f}"
                )
                rates = ", ".join(f"{n / 10:.3f}" for n in at_least)
                lines.append(f"{task}acc per pos = ({rates})")
            lines.append(f"{task}stop processing: n_tokens = 56, truncated = 0")
    return "\n".join([*lines, "slot x: id  0 | task 99 | eval time = 0.00 ms / 1 tokens ("])


def test_logs_of_llama_cpp_are_a_clock() -> None:
    """Of requests that ran alone: 1.7, 2.2, 2.5 tokens in 10, 14, 18 ms, and 1 in 10."""
    found = import_files(
        [Source(str(k), timed_llamacpp(k).encode()) for k in (3, 2, 0)], None, (1, 8)
    )
    [best] = found["models"]["3"]["best_lengths"]
    assert (best["batch_size"], best["num_draft_tokens"]) == (1, [1])
    gains = [gain for gain, _ in best["over_plain_range"]]
    assert gains == pytest.approx([1, 1.7, 2.2 / 1.4, 2.5 / 1.8], rel=1e-6)
    assert "at 1 request (typical" in found["models"]["3"]["clock"]
    said = " ".join(found["models"]["3"]["meaning"])
    assert "The logs have 1 request at a time: 8 not judged." in said
    speeds = {
        one["log"]: (one["tokens_per_s"], one["over_plain"]) for one in found["request_speeds"]
    }
    assert speeds["0"] == (pytest.approx(100), None)
    assert speeds["2"] == (pytest.approx(2200 / 14), pytest.approx(2.2 / 1.4))
    assert [(one["lines"], one["first"]) for one in found["left_out"]] == [
        (1, "3, line 42"), (1, "2, line 42"),
    ]  # fmt: skip


STOP = "I spec common_specu: - n_max=3, n_min=0, p_min=0.800000, backend_sampling=0"
MTP_STOP = "I spec common_specu: - n_max=3, n_min=2, p_min=0.75, n_embd=5120, backend_sampling=1"


@pytest.mark.parametrize(
    ("start", "drafted", "says"),
    [
        (STOP, 20, "Set: --spec-draft-n-max 3 --spec-draft-p-min 0.8 --no-spec-draft-backend-sam"),
        (STOP, 20, "3 draft tokens, p_min=0.8, n_min=0, backend_sampling=0; 8 requests"),
        (MTP_STOP, 20, "Set: --spec-draft-n-max 3 --spec-draft-p-min 0.75 --spec-draft-n-min 2."),
        (MTP_STOP, 20, "on (--spec-draft-p-min 0.75): 2.0 of 3 tokens were drafted a round."),
        (STOP.replace("0.8", "0.0"), 28, "Set: --spec-draft-n-max 3 --no-spec-draft-backend"),
        ("", 20, "Set: --spec-draft-n-max 3 and the --spec-draft-p-min that the server has."),
        ("", 20, "whose value the log does not state): 2.0 of 3 tokens were drafted a round."),
        ("", 28, "Set: --spec-draft-n-max 3."),
        (
            "I spec common_specu: adding speculative implementation 'draft-mtp'\n"
            "I spec common_specu: adding speculative implementation 'ngram-mod'",
            28,
            "llama.cpp, draft-mtp, ngram-mod, 3 draft tokens; 8 requests",
        ),
    ],
)
def test_a_stop_of_llama_cpp_is_read_shown_and_set(start: str, drafted: int, says: str) -> None:
    texts = timed_llamacpp(3, start=start, drafted=drafted), timed_llamacpp(0)
    assert says in "\n".join(map(str, describe_summary(imported(*texts))))


STOPPED = timed_llamacpp(3, start=STOP, drafted=20)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (timed_llamacpp(2), "1 has the early stop off and 0 on: their steps"),
        (timed_llamacpp(3, start=STOP.replace("0.8", "0.7"), drafted=21), "has the p_min 0.7 and"),
        (timed_llamacpp(2, start=STOP.replace("n_min=0", "n_min=1")), "has the n_min 1 and"),
        (timed_llamacpp(2, start=STOP.replace("=0.8", "=0.0")), "has the p_min 0 and"),
        (timed_llamacpp(2, start=STOP.replace("sampling=0", "sampling=1")), "backend_sampling 1"),
        (timed_llamacpp(2, start=STOP), ""),
    ],
)
def test_logs_of_two_stops_are_two_servers(other: str, says: str) -> None:
    """One clock of both would take the time of stopped rounds for that of whole chains."""
    found = imported(STOPPED, other, timed_llamacpp(0))
    judged = [
        rate is not None for rate in found["models"]["0"]["best_lengths"][0]["over_plain_range"]
    ]
    assert judged == [True, not says, not says, True]
    assert says in " ".join(found["taken"])


def test_a_restart_with_another_stop_is_not_pooled() -> None:
    found = imported(STOPPED + "\n" + timed_llamacpp(3))
    assert [own["num_draft_tokens"] for own in found["models"].values()] == [160, 240]
    assert [own["settings"]["p_min"] for own in found["models"].values()] == [
        ["0.8"],
        ["not stated"],
    ]
    assert "two settings: p_min not stated against 0.8. Tokens/s" in found["comparison"][0]


def test_whole_chains_clock_names_no_stopped_setting() -> None:
    advice = Advice(lambda _, k, *more: 1e3 * (6 + 4 * k if k else 10), (1,), "CLOCK")
    for drafted, is_named in ((20, False), (30, True)):
        found = import_files([Source("3", timed_llamacpp(3, drafted=drafted).encode())], advice)
        assert (found["schedule"] is not None) == is_named
        assert ("This clock times whole chains" in " ".join(found["meaning"])) != is_named


def test_requests_side_by_side_are_no_clock() -> None:
    """Their speeds stand beside each other all the same."""
    logs = [timed_llamacpp(k, together=2) for k in (3, 0)]
    found = imported(*logs)
    assert found["best_lengths"] is None
    assert found["request_speeds"][0]["over_plain"] == pytest.approx(2.5 / 1.8)


@pytest.mark.parametrize(
    ("drafted", "plain", "over", "says"),
    [
        (1, (1, 4), 2.5 / 1.8, ""),  # of the first alone
        (4, (1, 4), 2.5 / 1.8, ""),
        (1, (4,), None, "0 has no ratio: it has 1 at a time, and the logs without drafts 4."),
        (4, (1,), None, "0 has no ratio: it has 4 at a time, and the logs without drafts 1."),
    ],
)
def test_speed_over_plain_is_of_the_same_load(
    drafted: int, plain: tuple[int, ...], over: float | None, says: str
) -> None:
    """A plain request among four takes as long as three draftless ones alone."""
    logs = [timed_llamacpp(0, together=n) for n in plain]
    other = 4 if drafted == 1 else 1
    logs = [
        re.sub(r"= 100.00 ms", "= 300.00 ms", log) if n == other else log
        for n, log in zip(plain, logs, strict=True)
    ]
    found = imported(timed_llamacpp(3, together=drafted), *logs)
    assert found["request_speeds"][0]["over_plain"] == (over and pytest.approx(over))
    assert says in "\n".join(map(str, describe_summary(found)))


@pytest.mark.parametrize("length", [3, 0])
def test_a_clock_is_held_against_the_log_at_its_own_context(length: int) -> None:
    """At 512 tokens it would be called another server's; the requests had about 40."""

    def clock(size: int, k: int, tau: float, context: float) -> float:
        return 1e3 * (6 + 4 * k if k else 10) * (1 if context < 64 else 4)

    texts = [timed_llamacpp(n) for n in {3, length}]
    sources = [Source(str(n), text.encode()) for n, text in enumerate(texts)]
    found = import_files(sources, Advice(clock, (1,), "CLOCK"))
    assert found["log_over_clock"] == pytest.approx(1, rel=0.01)


def test_answers_with_and_without_drafts() -> None:
    """Twenty tokens behind the first in 100 and in 50 ms."""
    timings = {"predicted_n": 21, "predicted_ms": 100.0}
    drafts = {"draft_n": 30, "draft_n_accepted": 10, "predicted_ms": 50.0}
    texts = [json.dumps({"timings": one}) for one in (timings | drafts, timings)]
    drafted, plain = imported(*texts)["request_speeds"]
    assert (drafted["tokens_per_s"], plain["tokens_per_s"]) == (400, 200)
    assert (drafted["over_plain"], drafted["over_plain_interval"]) == (2, None)


def test_two_logs_are_compared() -> None:
    before = [(3, 3, 2, n % 4, 1, 0) for n in range(16)]
    after = [(3, 2, 1, n % 4, 0, 0) for n in range(16)]
    texts = ["\n".join(vllm_log(rounds)) for rounds in (before, after)]
    [line] = imported(*texts)["comparison"]
    assert "τ 2.25 against 2.75, a fall: -0.50, 95% interval" in line
    [line] = imported(texts[0], "\n".join(vllm_log(before[::-1])))["comparison"]
    assert "no difference beyond chance" in line
    [line] = imported(*("\n".join(vllm_log(rounds[:3])) for rounds in (before, after)))[
        "comparison"
    ]
    assert "too few lines" in line


def drawn(name: str, shares: Sequence[float], *lengths: int, day: int = 20) -> str:
    """A log of 24 lines of 200 rounds, each as many drafts as the next of these lengths, of tokens
    accepted with these shares of those reached; 0: drafts of one to all tokens."""
    draws = np.random.default_rng(len(lengths)).random((24, 200, len(shares)))
    lines = []
    for place, line in enumerate(draws < shares):
        length = lengths[place % len(lengths)]
        drafted = [length or 1 + n % len(shares) for n in range(200)]
        runs = line.cumprod(1).sum(1).tolist()
        accepted = [min(*pair) for pair in zip(runs, drafted, strict=True)]
        shown = lengths[0] if len({*lengths}) == 1 and length else len(shares)
        before = f"({name} pid=1) INFO 11-{day} 05:{place:02d}:00 "
        lines += [f"{before}[loggers.py:310] {vllm_load()}"]
        lines += [f"{before}[metrics.py:120] {vllm_figures(accepted, shown, drafted)}"]
    return "\n".join(lines)


HIGH, LOW = (0.8, 0.7, 0.6, 0.6, 0.5), (0.72, 0.62, 0.52, 0.5, 0.4)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((HIGH, 5), (HIGH, 5, 5), "1 against 0: τ 3.0"),
        ((HIGH, 5), (HIGH, 5, 5), "no difference beyond chance"),
        ((HIGH, 5), (LOW, 5), "1 against 0: τ 2.5"),
        ((HIGH, 5), (LOW, 5), "a fall: -0."),
        # Another length: neither hidden nor invented.
        ((HIGH, 5), (HIGH, 3), "(3 draft tokens against 5): τ of the first 3 draft tokens 2.7"),
        ((HIGH, 5), (HIGH, 3), "no difference beyond chance"),
        ((HIGH, 3), (HIGH, 5), "no difference beyond chance"),
        ((HIGH, 5), (LOW, 3), "a fall: -0."),
        ((LOW, 3), (HIGH, 5), "a rise: +0."),
        # A schedule by batch, with lines of 4, of 3 and of any number of 5 tokens.
        ((HIGH, 5), (HIGH, 4, 3, 0), "(3.33 against 5.00 draft tokens a round): τ of the first 4 "),
        ((HIGH, 5), (HIGH, 4, 3, 0), "no difference beyond chance"),
        ((HIGH, 5), (LOW, 4, 3, 0), "a fall: -0."),
        # Drafts of any length: the first token alone is in all of them, or both are alike.
        ((HIGH, 5), (HIGH, 0), "τ of the first draft token 1.8"),
        ((HIGH, 5), (HIGH, 0), "no difference beyond chance"),
        ((HIGH, 5), (LOW, 0), "a fall: -0."),
        ((HIGH, 0), (LOW, 0), "1 against 0: τ 2."),
        ((HIGH, 0), (HIGH, 0, 0), "no difference beyond chance"),
    ],
)  # fmt: skip
def test_acceptance_is_compared_at_the_positions_of_both(
    before: tuple[Any, ...], after: tuple[Any, ...], says: str
) -> None:
    texts = [drawn("a", *before), drawn("a", *after, day=21)]
    [line] = imported(*texts)["comparison"]
    assert says in line


@pytest.mark.parametrize(
    ("means", "says"),
    [
        ((3.0, 2.3), "of the first 3 draft tokens 2.30 to 2.30 against 2.20 to 3.00, not told"),
        ((2.3, 3.0), "against 1.78 to 2.30, a rise"),
        ((3.0, 2.0), "2.00 to 2.00 against 2.20 to 3.00, a fall"),
    ],
)
def test_means_of_two_lengths(means: tuple[float, float], says: str) -> None:
    """At 5 and at 3 draft tokens: no position is accepted more often than one before it."""
    texts = []
    for day, (length, mean) in enumerate(zip((5, 3), means, strict=True), start=24):
        start = f"speculative_eagle_topk=1, speculative_num_draft_tokens={length + 1}"
        lines = [sglang_line(4, mean, (mean - 1) / length, second=n) for n in range(9)]
        texts.append("\n".join([sglang_start(start), *lines]).replace("11-25", f"11-{day}"))
    [line] = imported(*texts)["comparison"]
    assert says in line


RELEASE = (
    "({} pid=1) INFO 11-20 04:00:00 [core.py:1] Initializing a V1 LLM engine (v0.3{}.0) with "
    "config: model='m'\n"
)


UPGRADE = "(version 0.33.0 against 0.32.0): τ "


@pytest.mark.parametrize(
    ("logs", "says"),
    [
        # Replicas of two versions, in any order.
        ("a20 b20 c21 d21", [f"c21 and d21 against a20 and b20 {UPGRADE}2.5"]),
        ("c21 a20 d21 b20", [f"c21 and d21 against a20 and b20 {UPGRADE}2.5"]),
        ("a20 c20", [f"c20 against a20 {UPGRADE}2.5"]),
        # Of one version, at two times, or side by side.
        ("a20 b20 a21 b21", ["a21 and b21 against a20 and b20: τ 3.0"]),
        ("a20 a21", ["a21 against a20: τ 3.0"]),
        ("a20 b20", ["b20 against a20: τ 3.0"]),
        ("a20 b20 e20", []),
        # Each with the one before it.
        ("a20 c21 a22", [f"c21 against a20 {UPGRADE}2.5", "a22 against c21 (version 0.32.0"]),
    ],
)  # fmt: skip
def test_replicas_are_compared_by_version_and_time(logs: str, says: list[str]) -> None:
    sources = []
    for place, name in enumerate(logs.split()):
        shares, release = (LOW, 3) if name[0] in "cd" else (HIGH, 2)
        log = drawn(name[0], shares, *[5] * (1 + place), day=int(name[1:]))
        sources.append(Source(name, (RELEASE.format(name[0], release) + log).encode()))
    found = import_files(sources)["comparison"]
    assert len(found) == len(says)
    assert all(line.startswith(start) for line, start in zip(found, says, strict=True))


def test_versions_in_one_log_are_compared() -> None:
    """Two replicas of each, joined."""
    texts = []
    for pod, shares, release, day in (
        ("a", HIGH, 2, 20), ("b", HIGH, 2, 20), ("c", LOW, 3, 21), ("d", LOW, 3, 21)
    ):  # fmt: skip
        texts.append(RELEASE.format(pod, release) + drawn(pod, shares, *[5] * day, day=day))
    [line] = imported("\n".join(texts[::-1]))["comparison"]
    assert "d pid=1 and 5 draft tokens, c pid=1 against 5 draft tokens, b pid=1 and 5" in line
    assert f"{UPGRADE}2.5" in line
    assert "a fall: -0." in line


@pytest.mark.parametrize(
    ("factor", "says"),
    [(1.0, "x 1.00 ["), (1.2, "x 1.20 ["), (0.8, "x 0.80 [")],
)
def test_speed_is_compared_at_like_loads(factor: float, says: str) -> None:
    """Also where one log ran at other loads beside."""
    fast = lambda found: f"generation throughput: {float(found[1]) * factor:.1f}"  # noqa: E731
    before = timed_vllm(4, (1, 1, 1, 1, *LOADS[2:], *LOADS[2:]))
    after = timed_vllm(4, LOADS[2:] * 2).replace("11-24", "11-25")
    after = re.sub(r"generation throughput: ([\d.]+)", fast, after)
    [line] = imported(before, after)["comparison"]
    assert f"Tokens/s at 4 to 32 requests: {says}" in line
    assert ("slower" in line, "faster" in line) == (factor < 1, factor > 1)
    for apart in (timed_vllm(4, [64, 80, 96, 99] * 3), re.sub("Running: ..*", "", after)):
        [line] = imported(before, apart)["comparison"]
        assert "Speed was not compared: fewer than 8 lines of each have a throughput" in line


@pytest.mark.parametrize(
    ("first", "second", "is_swapped"),
    [("11-24", "11-25", False), ("11-25", "11-24", True), ("12-31", "01-01", False)],
)
def test_the_later_log_is_compared_with_the_earlier(
    first: str, second: str, *, is_swapped: bool
) -> None:
    texts = ["\n".join(vllm_log()).replace("11-24", day) for day in (first, second)]
    [line] = imported(*texts)["comparison"]
    assert line.startswith("0 against 1" if is_swapped else "1 against 0")


# --------------------------------------------------------------------------- the command


def saved(path: Path, text: str | Sequence[str]) -> Path:
    path.write_text(text if isinstance(text, str) else "\n".join(text) + "\n")
    return path


def test_import_with_a_cost_model(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.prom", scrape())
    outcome = specctl("import", source, "--linear", LINEAR, "-o", tmp_path / "out")
    assert '"num_speculative_tokens": 2' in outcome.out
    assert "What to do, on the rates of --linear, 512 tokens of context" in outcome.out
    assert "the rates of --linear" in (tmp_path / "out" / "summary.json").read_text()
    found = json.loads(
        specctl("import", source, "--linear", LINEAR, "--batch-sizes", "64,2", "--json").out
    )
    best = found["models"]["m"]["best_lengths"]
    assert [one["batch_size"] for one in best] == [2, 64]
    assert best[1]["num_draft_tokens"] == [0]
    both = specctl("import", source, "--linear", LINEAR, "--cost-model", "c.json")
    assert "give either --cost-model or --linear" in both.err


def test_lengths_by_context_are_shown(tmp_path: Path) -> None:
    rates = LINEAR.replace("draft_token_us=250", "draft_token_us=900")
    log = saved(tmp_path / "llama.log", CONTEXTS)
    shown = " ".join(specctl("import", log, "--linear", rates, "--batch-sizes", "1,64").out.split())
    assert "Best length by context" in shown
    assert "send requests of these lengths to servers of their own" in shown


@pytest.mark.parametrize("sizes", ["0", "1,x", "1;8", "1.5", "9999999"])
def test_batch_sizes_that_are_none(tmp_path: Path, sizes: str) -> None:
    outcome = specctl("import", saved(tmp_path / "m.prom", scrape()), "--batch-sizes", sizes)
    assert outcome.code == 2
    assert "write them with commas, e.g. --batch-sizes 1,8,32" in outcome.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--batch-sizes", 8), "the time of a step is not known"),
        (("--context-tokens", 64), "on the clock of --cost-model or --linear"),
    ],
)
def test_options_of_a_clock_that_is_not_there(
    tmp_path: Path, words: tuple[object, ...], says: str
) -> None:
    outcome = specctl("import", saved(tmp_path / "m.prom", scrape()), *words)
    assert outcome.code == 2
    assert says in outcome.err


def test_a_measured_cost_model_says_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "cost_model.json").write_bytes(table_model().to_bytes())
    words = ("--cost-model", tmp_path / "cost_model.json", "--batch-sizes", 1)
    found = specctl("import", saved(tmp_path / "m.prom", scrape()), *words)
    assert "the log does not name its own" in found.err
    assert "'Test CPU'" in found.err
    assert "times of specctl's own loop, not of vllm" in found.err


def test_a_clock_of_the_log_s_models_by_name(tmp_path: Path) -> None:
    (tmp_path / "cost_model.json").write_bytes(table_model().to_bytes())
    words = ("--cost-model", tmp_path / "cost_model.json", "--batch-sizes", 1)
    start = "loading model '/models/toy'\nloading draft model '/models/large'\n"
    log = saved(tmp_path / "llama.log", start + CONTEXTS)
    said = specctl("import", log, *words).err
    assert "target" not in said
    assert "measured for drafter 'small'; the log is of /models/large" in said
    assert "times of specctl's own loop, not of llama.cpp" in said


def test_what_was_read_comes_first(tmp_path: Path) -> None:
    log = saved(tmp_path / "vllm.log", [*vllm_log(), vllm_log()[1][:-20]])
    lines = specctl("import", log).out.splitlines()
    assert lines[0].endswith(
        "vllm.log: vLLM, 3 draft tokens; 3 intervals, 12 rounds, 11-24 05:00:00 to 11-24 05:00:20"
    )
    assert lines[-1].startswith(
        "Left out 1 line: it is cut off or split: its end is missing (first:"
    )
    twice = specctl("import", saved(tmp_path / "twice.log", [*vllm_log(), *vllm_log()])).out
    assert "Left out 3 lines: each repeats one of the same process, time and figures" in twice


def test_the_title_names_the_log_of_its_figures(tmp_path: Path) -> None:
    logs = [saved(tmp_path / f"{k}.log", timed_vllm(k, LOADS)) for k in (4, 0)]
    first, *_ = specctl("import", *logs).out.splitlines()
    assert first.startswith(f"{logs[0]}: vLLM, 4 draft tokens; 8 intervals, ")


def test_import_without_torch(tmp_path: Path) -> None:
    """Torch takes longer to load than a log to read."""
    words = ["import", saved(tmp_path / "m.prom", scrape()), "--linear", LINEAR]
    script = (
        "import sys; from specctl.cli import main\n"
        f"sys.argv = {['specctl', *map(str, words)]!r}\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.TextIOWrapper(io.BytesIO("\n".join(vllm_log()).encode()))
    monkeypatch.setattr(sys, "stdin", text)
    assert import_files([Source.of("-")])["num_rounds"] == 12


# --------------------------------------------------------------------------- pages


@contextmanager
def page(*bodies: bytes, status: int = 200, kind: str = "text/plain") -> Iterator[str]:
    """A server on loopback that answers with these, the last again; the address of its metrics."""
    left = list(bodies)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing on standard error."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("text", [scrape(), scrape_sglang()])
def test_a_page_reads_like_its_file(text: str) -> None:
    with page(text.encode()) as url:
        found = import_files([Source.of(url)])
        assert json.loads(specctl("import", url, "--json").out) == {"kind": "import", **found}
    assert found["models"] == imported(text)["models"]


def test_a_page_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[str, int | None]] = []
    silent = nullcontext(lambda _: None)
    monkeypatch.setattr(console, "progress", lambda *bar: bars.append(bar) or silent)
    later = scrape("num_drafts 16", "num_draft_tokens 48", "num_accepted_tokens 18", "per_pos 0 10",
                   "per_pos 1 6", "per_pos 2 2")  # fmt: skip
    with page(scrape().encode(), later.encode()) as url:
        found = json.loads(specctl("import", url, "--watch", 1, "--json").out)
    assert bars == [("seconds to the second scrape", 1), ("lines read", None)]
    assert found["models"]["m"]["num_rounds"] == 6
    outcome = specctl("import", "vllm.log", "--watch", 1)
    assert "--watch scrapes one address twice; give http://HOST:PORT/metrics alone" in outcome.err


@pytest.mark.parametrize(
    ("body", "answer", "says"),
    [
        (b"none", {"status": 404}, "status 404 Not Found; name its page of metrics"),
        (b"busy", {"status": 503}, "status 503 Service Unavailable; check that it runs"),
        (b"<html>hi</html>", {"kind": "text/html"}, "it is text/html and begins with"),
        (b"<html>hi</html>", {}, "it is text/plain and begins with"),
        (
            b'{"object": "list"}',
            {"kind": "application/json"},
            "no line of vLLM, SGLang or llama.cpp",
        ),
        (b"# HELP python_gc x\npython_gc 1\n", {}, "metrics of another program"),
        (b"vllm:num_requests_running 0\n", {}, "either this server does not speculate"),
    ],
)
def test_pages_that_are_no_metrics(body: bytes, answer: Any, says: str) -> None:
    with page(body, **answer) as url, pytest.raises(InputError) as refusal:
        import_files([Source.of(url)])
    assert says in str(refusal.value)
    assert url in str(refusal.value)


def test_a_page_that_is_too_large_or_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PAGE_BYTES", 1 << 20)
    with page(b"x" * (3 << 20)) as url, pytest.raises(InputError, match="more than 1 MiB"):
        Source.of(url)
    monkeypatch.setattr(sources, "DEADLINE_S", 0.0)
    with page(b"x 1\n") as url, pytest.raises(InputError, match="no whole answer within"):
        Source.of(url)


def test_servers_that_are_not_there() -> None:
    port = free_port()
    for url, says in (
        (f"http://127.0.0.1:{port}/metrics", "Connection refused"),
        ("http://127.0.0.1:port/metrics", "port"),
        ("http://", "cannot be read"),
    ):
        with pytest.raises(InputError, match=says):
            Source.of(url)
