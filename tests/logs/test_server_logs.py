"""Logs of vLLM, SGLang and llama.cpp by hand: every release's form, odd lines, processes, time.
tests/engines has the engines' own code write them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specctl.errors import InputError
from specctl.logs.acceptance_figures import chain_figures, mean_ranges
from specctl.logs.server_log import rounds_of
from tests.logs.import_cases import (
    ROUNDS,
    VLLM_START,
    figures,
    imported,
    llamacpp_log,
    refused,
    sglang_line,
    sglang_log,
    sglang_start,
    taus,
    vllm_figures,
    vllm_load,
    vllm_log,
)

# --------------------------------------------------------------------------- rates


@given(st.integers(1, 60_000), st.lists(st.floats(0, 1), min_size=1, max_size=7))
@example(13_988, [10_498 / 13_988, 7_323 / 10_498])  # prints 0.751 and 0.524, at the edge of both
def test_figures_at_the_edge_of_their_digits(num_rounds: int, shares: list[float]) -> None:
    counts = [round(num_rounds * share) for share in accumulate(shares, mul)]
    accepted, rates = sum(counts), [float(f"{count / num_rounds:.3f}") for count in counts]
    mean = float(f"{1 + accepted / num_rounds:.2f}")
    found = rounds_of(mean, accepted, num_rounds * len(counts), rates)
    assert found == (num_rounds, len(counts))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(lambda h: sum(h) > 0))
def test_marginal_and_conditional_tell_the_same_mean(histogram: list[int]) -> None:
    """E[accepted] = Σ_j P(at least j), and marginals are products of conditionals."""
    rounds = sum(histogram)
    at_least = [sum(histogram[j:]) for j in range(1, len(histogram))]
    rates = chain_figures(rounds, at_least, 0, 0, is_ragged=False)
    mean = sum(j * count for j, count in enumerate(histogram)) / rounds
    assert taus(rates)[-1] == pytest.approx([1 + mean] * 2)
    product = 1.0
    for marginal, conditional in zip(
        rates["marginal_prob"], rates["conditional_prob"], strict=True
    ):
        product *= conditional or 0.0
        assert marginal == pytest.approx(product)


DEPTH = 4


def true_taus(outcomes: list[int]) -> list[float]:
    return [
        1 + sum(min(outcome, length) for outcome in outcomes) / len(outcomes)
        for length in range(1, DEPTH + 1)
    ]


@given(st.lists(st.tuples(st.integers(1, DEPTH), st.integers(0, DEPTH)), min_size=1, max_size=30))
def test_ranges_of_ragged_drafts_hold_the_truth(rounds: list[tuple[int, int]]) -> None:
    """Position 1 is exact, because every round drafts it; a bound that is too tight fails here."""
    accepted = [min(drafted, outcome) for drafted, outcome in rounds]
    at_least = [sum(n >= j for n in accepted) for j in range(1, DEPTH + 1)]
    drafted = sum(length for length, _ in rounds)
    found = taus(chain_figures(len(rounds), at_least, drafted, sum(accepted), is_ragged=True))
    for (low, high), tau in zip(found, true_taus([one for _, one in rounds]), strict=True):
        assert low - 1e-9 <= tau <= high + 1e-9
    assert len(set(found[0])) == 1


@given(st.lists(st.integers(0, DEPTH), min_size=1, max_size=30))
def test_ranges_of_a_mean_hold_the_truth(outcomes: list[int]) -> None:
    truth = true_taus(outcomes)
    for (low, high), tau in zip(mean_ranges((truth[-1],) * 2, DEPTH), truth, strict=True):
        assert low - 1e-9 <= tau <= high + 1e-9


# --------------------------------------------------------------------------- vLLM


def one_line(accepted: Sequence[int], **more: Any) -> str:
    return (
        f"(APIServer pid=7) INFO 11-24 05:00:10 [metrics.py:120] {vllm_figures(accepted, **more)}"
    )


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4).filter(
        lambda intervals: any(map(any, intervals))
    ),
    st.sampled_from(["", "0.9"]),
)
def test_full_drafts_tell_the_rounds_exactly(intervals: list[list[int]], release: str) -> None:
    found = figures(
        "\n".join(f"{n} {vllm_figures(own, release=release)}" for n, own in enumerate(intervals))
    )
    rounds = [n for interval in intervals for n in interval]
    assert (found["num_intervals"], found["num_rounds"]) == (len(intervals), len(rounds))
    expected = [sum(n > place for n in rounds) for place in range(3)]
    assert found["marginal_prob"] == [count / len(rounds) for count in expected]
    assert found["mean_acceptance_length"] == 1 + sum(rounds) / len(rounds)
    assert found["fixed_length_sweep"]["is_exact"]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=60))
def test_drafts_of_several_lengths_are_marked(rounds: list[tuple[int, int]]) -> None:
    drafted = [1, *(length for length, _ in rounds)]
    accepted = [1, *(min(pair) for pair in rounds)]
    found = figures(one_line(accepted, num_positions=4, drafted=drafted))
    sweep = found["fixed_length_sweep"]
    assert not sweep["is_exact"] or found["num_rounds"] * len(sweep["chains"]) == sum(drafted)
    assert found["num_accepted_tokens"] == sum(accepted)
    assert found["mean_acceptance_length"] == pytest.approx(
        1 + sum(accepted) / len(accepted), abs=0.0101
    )


@pytest.mark.parametrize(
    ("mean", "tokens", "rates", "rounds", "at_least"),
    [
        ("1.88", (237, 807), "0.428, 0.268, 0.186", 269, (115, 72, 50)),
        # Five or two draft tokens by batch size, so that only the mean tells the rounds.
        ("1.76", (239, 713), "0.446, 0.282, 0.009, 0.009, 0.009", 316, None),
        ("7.24", (231, 259), "1.000, 1.000, 0.973, 0.973, 0.892, 0.784, 0.622", 37, None),
        ("3.49", (92, 259), "0.757, 0.622, 0.432, 0.324, 0.189, 0.108, 0.054", 37, None),
        ("1.82", (82, 100), "0.820", 100, (82,)),
    ],
)
def test_lines_of_real_servers(
    mean: str, tokens: tuple[int, int], rates: str, rounds: int, at_least: tuple[int, ...] | None
) -> None:
    """The first two: vLLM 0.32.0 on the CPU with the embedded pair, and what its /metrics said."""
    found = figures(
        f"SpecDecoding metrics: Mean acceptance length: {mean}, Accepted throughput: 2.3 tokens/s, "
        f"Drafted throughput: 6.8 tokens/s, Accepted: {tokens[0]} tokens, Drafted: {tokens[1]} "
        f"tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate: "
        f"{100 * tokens[0] / tokens[1]:.1f}%"
    )
    assert found["num_rounds"] == rounds
    if at_least is not None:
        assert found["marginal_prob"] == [count / rounds for count in at_least]


FULL = one_line((2, 1, 3, 0))


@pytest.mark.parametrize(
    ("line", "rounds"),
    [
        (one_line((2, 1, 3, 0), release="0.9"), 4),
        (one_line((2, 1, 3, 0), release="0.9-"), 4),  # the mean without the bonus token
        (FULL.replace(", ", ","), 4),
        (FULL.replace(": ", ":"), 4),
        (FULL.replace(" tokens", "tokens"), 4),
        (re.sub(r"rate: (0\.75.*?), Avg", r"rate: [\1], Avg", FULL), 4),
        (FULL.replace("SpecDecoding metrics: ", "SpecDecoding metrics:"), 4),
    ],
)
def test_forms_of_vllm_s_line(line: str, rounds: int) -> None:
    found = figures(line)
    assert (found["num_rounds"], found["marginal_prob"]) == (rounds, [0.75, 0.5, 0.25])
    assert found["mean_acceptance_length"] == 2.5


CUT, ODD = "is cut off or split: its end is missing", "contradicts itself"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        *((FULL[: FULL.index(part) + len(part)], CUT) for part in (
            "Mean acceptance length: 2.", "Accepted: 6", "Drafted: 12 tokens,", "0.750, 0.5",
            "0.750, 0.500", "0.250,", "Avg Draft acceptance rate:", "acceptance rate: 50.",
        )),
        (FULL.replace("0.750, 0.500", "nan, nan"), "lacks figures that vLLM 0.9 to 0.33 prints"),
        (FULL.replace("Mean acceptance", "Median acceptance"), "lacks figures"),
        (FULL.replace("0.750", "0.\ufffd50"), "lacks figures"),
        (FULL.replace("Accepted: 6", "Accepted: 7"), ODD),
        (FULL.replace("Drafted: 12", "Drafted: 5"), ODD),
        (FULL.replace("0.750, 0.500", "0.500, 0.750"), ODD),
        (FULL.replace("0.750, 0.500, 0.250", "0.750, 0.500"), ODD),
        (FULL.replace("rate: 50.0%", "rate: 60.0%"), ODD),
        (FULL.replace("length: 2.50", "length: 1.50"), ODD),
        (one_line((2, 1), release="0.9")[:-5], ODD),
        ("SpecDecoding metrics: Draft acceptance rate: 61.3%, Accepted: 613 tokens, Drafted: 1000 "
         "tokens",
         "is of a vLLM before 0.9"),
        ("Speculative metrics: Draft acceptance rate: 0.651, System efficiency: 0.609, Number of "
         "speculative tokens: 3, Number of accepted tokens: 4210, Number of draft tokens: 6468, "
         "Number of emitted tokens: 5254.", "is of a vLLM before 0.9"),
        ("DiffusionDecoding metrics: Committed token throughput: 5 tokens/s", "is of a diffusion"),
    ],
)  # fmt: skip
def test_a_line_that_is_left_out(line: str, reason: str) -> None:
    """Counted by reason beside lines that count, and refused alone."""
    found = imported("\n".join([*vllm_log(), line, *vllm_log()[:1]]))
    assert found["num_rounds"] == 12
    [one] = found["left_out"]
    assert reason in one["reason"]
    assert (one["lines"], one["first"]) == (1, "0, line 7")
    assert reason in refused(line)
    assert "line 1" in refused(line)


def test_lines_that_ray_left_out() -> None:
    found = imported(f"{FULL} [repeated 3x across cluster]")
    assert found["left_out"][0]["lines"] == 3
    assert found["num_rounds"] == 4


START = "(EngineCore pid=9) INFO 11-24 05:00:01 [core.py:1] Initializing a V1 LLM engine (v0.32.0) "
START += "with config: model='m', speculative_config={}, tokenizer='m'"
EAGLE = "SpeculativeConfig(method='eagle3', model='e', num_spec_tokens=3)"


@pytest.mark.parametrize(
    ("lines", "version", "method"),
    [
        ([VLLM_START], ["0.32.0"], None),
        ([VLLM_START, START.format(EAGLE)], ["0.32.0"], ["eagle3"]),
        ([START.format("SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3)")],
         ["0.32.0"], ["ngram"]),
        (["non-default args: {'model': 'm', 'speculative_config': {'method': 'mtp', "
          "'num_speculative_tokens': 3}}"], None, ["mtp"]),
        (["Initializing a V1 LLM engine (v0.9.1) with: speculative_config=None"], ["0.9.1"], None),
        (["Initializing an LLM engine (v0.6.3.post1) with config: m"], ["0.6.3.post1"], None),
    ],
)  # fmt: skip
def test_what_vllm_s_start_says(
    lines: list[str], version: list[str] | None, method: list[str] | None
) -> None:
    settings = imported("\n".join([*lines, *vllm_log()]))["settings"]
    settings = {name.removesuffix(" argument"): values for name, values in settings.items()}
    assert (settings.get("version"), settings.get("method")) == (version, method)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([vllm_load()], "0 has no line of vLLM about drafts (`SpecDecoding metrics: ...`); either"),
        ([START.format(None), vllm_load()], "this vLLM does not speculate, as its start says"),
        ([START.format(EAGLE), vllm_load()], "; the lines are hidden (--disable-log-stats) or"),
        ([FULL.replace("Drafted: 12", "Drafted: 0")], "drafted no token, as n-grams without a"),
    ],
)
def test_vllm_logs_without_drafts(lines: list[str], says: str) -> None:
    assert says in refused("\n".join(lines))


# --------------------------------------------------------------------------- processes, time


def test_processes_are_pooled_and_told_apart() -> None:
    side_by_side = [
        line
        for pair in zip(vllm_log(), vllm_log(process="ApiServer_1 pid=9"), strict=True)
        for line in pair
    ]
    found = figures("\n".join(side_by_side))
    assert found["num_rounds"] == 24
    assert [one["process"] for one in found["processes"]] == [
        "APIServer pid=7",
        "ApiServer_1 pid=9",
    ]
    assert "Pooled over 2 processes, side by side" in " ".join(found["meaning"])
    later = [line.replace("11-24", "11-25") for line in vllm_log(process="APIServer pid=11")]
    after = figures("\n".join([*vllm_log(), *later]))
    assert (
        "1 of them after another had ended, as after a restart (APIServer pid=7: τ 2.33"
        in " ".join(after["meaning"])
    )


def pods(*names: str, day: str = "24") -> list[str]:
    """Logs one behind another, of as many pods."""
    return [
        line.replace("11-24", f"11-{day}")
        for name in names
        for line in vllm_log(process=f"{name} pid=1")
    ]


ALIKE, ONE_AFTER, TWO_AFTER = "side by side (", "1 of them after another", "2 of them after another"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (pods("a", "b"), ALIKE),
        (pods("a", "b")[::-1], ALIKE),
        ([*pods("a"), *pods("b", day="25")], ONE_AFTER),
        ([*pods("b", day="25"), *pods("a")], ONE_AFTER),
        ([*pods("a", "b"), *pods("c", "d", day="25")], TWO_AFTER),
        ([*pods("c", "d", day="25"), *pods("a", "b")], TWO_AFTER),
        ([*pods("a", "b"), *pods("c", "d", day="25")][::-1], TWO_AFTER),
    ],
)
def test_processes_follow_each_other_by_time(lines: list[str], says: str) -> None:
    """Wherever their lines stand."""
    [said] = [one for one in figures("\n".join(lines))["meaning"] if one.startswith("Pooled")]
    assert says in said
    assert "a pid=1: τ 2.33, 11-24 05:00:00 to 11-24 05:00:20" in said


@pytest.mark.parametrize(
    "lines",
    [
        [VLLM_START, *vllm_log([(n % 4, 1, 0) for n in range(9)])],
        sglang_log([(4 + n, 2.5 - n / 100, None) for n in range(9)]),
        llamacpp_log(),
        [*pods("a"), VLLM_START.replace("APIServer pid=7", "a pid=1"), *pods("a", day="25")],
        [line.replace("11-24", "12-31") for line in pods("a")]
        + [line.replace("11-24", "01-01") for line in pods("a")],
    ],
    ids=["vllm", "sglang", "llamacpp", "a restart", "new year"],
)
def test_newest_first(lines: list[str]) -> None:
    """As exports print: the figures, loads and order of the log as it was written."""
    found, backwards = figures("\n".join(lines)), figures("\n".join(lines[::-1]))
    for one in (found, backwards):
        for places in ("processes", "over_time"):
            for part in (one[places] or {}) if places == "processes" else ():
                del part["first_line"], part["last_line"]
        for part in (one["over_time"] or {}).get("parts", ()):
            del part["first_line"]
    assert backwards == found
    assert found["from"] != found["to"]


def test_pairs_of_lines_that_an_export_turned_round() -> None:
    """A throughput is of the interval of its second, not of the one before."""
    lines = [line.replace("Running: 2", f"Running: {n}") for n, line in enumerate(vllm_log())]
    turned = [line for n in range(0, len(lines), 2) for line in lines[n : n + 2][::-1]]
    loads = [figures("\n".join(own))["mean_running_requests"] for own in (lines, turned)]
    assert loads == [2, 2]
    untimed = [re.sub(r"\S+ \S+ \[", "[", line) for line in lines]
    assert figures("\n".join(untimed))["mean_running_requests"] == 2


def test_lines_without_times_say_that_they_stand_in_order() -> None:
    lines = [line.replace("INFO 11-24 05", "INFO") for line in vllm_log(FALLS)]
    said = " ".join(figures("\n".join([*lines, *pods("b")]))["meaning"])
    assert "Over time, if the lines stand in its order: τ 3.0" in said
    assert (
        "after a restart, if the lines stand in its order (APIServer pid=7: τ 2.99, lines" in said
    )


@pytest.mark.parametrize(
    "start",
    [
        VLLM_START,
        VLLM_START.replace("▀▄▀ █", "\x1b[1m▀▄▀ █\x1b[0m").replace("0.32", "\x1b[1m0.32"),
        f"{VLLM_START[:52]} vLLM server version 0.32.0, serving model m",
        f"{VLLM_START[:52]} vLLM API server version 0.19.0",
    ],
    ids=["logo", "logo in colours", "without it", "before"],
)
def test_a_restart_under_the_same_pid(start: str) -> None:
    """In a container every server is process 1."""
    lines = [
        start,
        *vllm_log(),
        start,
        *(one.replace("11-24", "11-25") for one in vllm_log()),
    ]
    found = figures("\n".join(lines))
    assert [one["process"] for one in found["processes"]] == [
        "APIServer pid=7", "APIServer pid=7, start 2",
    ]  # fmt: skip
    assert "as after a restart" in " ".join(found["meaning"])


MODEL = (
    "(EngineCore pid=9) INFO 11-24 05:00:01 Initializing a V1 LLM engine (v0.32.0) with config: "
)
MODEL += (
    "model='m', speculative_config=SpeculativeConfig(method='mtp', model='d', num_spec_tokens=3)"
)
LLAMA_START = "0.00.015.358 I srv    load_model: loading model '/m/a.gguf'"


@pytest.mark.parametrize(
    ("starts", "log", "run"),
    [
        ((VLLM_START, VLLM_START.replace("0.32.0", "0.33.0")), vllm_log(), "APIServer pid=7"),
        ((MODEL, MODEL.replace("'m'", "'n'")), vllm_log(), "APIServer pid=7"),
        ((MODEL, MODEL.replace("'d'", "'e'")), vllm_log(), "APIServer pid=7"),
        ((sglang_start(), sglang_start().replace("'m'", "'n'")), sglang_log()[1:], "TP0"),
        ((LLAMA_START, LLAMA_START.replace("a.gguf", "b.gguf")), llamacpp_log(), None),
    ],
)  # fmt: skip
def test_runs_of_other_settings_are_not_pooled(
    starts: tuple[str, str], log: list[str], run: str | None
) -> None:
    """Another version, model or drafter; a day later, in one log."""
    later = [line.replace("11-24", "11-25").replace("11-25 07", "11-26 07") for line in log]
    later = [line.replace("0.00.9", "0.03.9").replace("0.01.9", "0.04.9") for line in later]
    found = imported("\n".join([starts[0], *log, starts[1], *later]))
    names = [f", {run}", f", {run}, start 2"] if run else ["", ", the server, start 2"]
    assert [*found["models"]] == [f"3 draft tokens{name}" for name in names]
    assert len(found["comparison"]) == 1
    settings = [own["settings"] for own in found["models"].values()]
    assert settings[0] != settings[1]
    assert all(len(values) == 1 for own in settings for values in own.values())


def test_draft_lengths_are_not_pooled() -> None:
    lines = [*vllm_log(), one_line((2, 1, 0, 5), num_positions=5)]
    found = imported("\n".join(lines))["models"]
    assert {name: own["num_rounds"] for name, own in found.items()} == {
        "3 draft tokens": 12, "5 draft tokens": 4,
    }  # fmt: skip


def test_two_logs_stand_side_by_side() -> None:
    found = imported("\n".join(vllm_log()), "\n".join(vllm_log(ROUNDS[2:])))
    assert [*found["models"]] == ["0", "1"]
    assert "logs of SGLang and vLLM" in refused("\n".join(vllm_log()), "\n".join(sglang_log()))


def test_lines_of_two_engines() -> None:
    assert "has lines of vLLM and SGLang" in refused("\n".join([*vllm_log(), *sglang_log()]))


FALLS = [(3, 3, 3, 2, 1, 3, 3, 2 - (n > 3), 3 - (n > 5), 1, 1, 0) for n in range(12)]


@pytest.mark.parametrize(
    ("rounds", "says"),
    [
        (FALLS[:9], "in the second: too few lines to tell from chance."),
        (FALLS, "τ 3.06 in the first half of the log, 2.92 in the second (3.08 in the first of 12 "
         "parts, 2.92 in the last). τ fell by 4.5%: parts in random order differ as much in "),
        (FALLS[::-1], "τ rose by 4.8%: "),
        ([FALLS[0], FALLS[-1]] * 6, "in the second: no difference beyond chance."),
        (FALLS[:5], "in the second: too few lines to tell from chance."),
        (FALLS[:3], None),
    ],
)  # fmt: skip
def test_acceptance_over_time(rounds: list[tuple[int, ...]], says: str | None) -> None:
    found = figures("\n".join(vllm_log(rounds)))
    if says is None:
        assert found["over_time"] is None
    else:
        assert says in " ".join(found["meaning"])
        assert len(found["over_time"]["parts"]) == len(rounds)


def test_intervals_are_over_lines_of_the_log() -> None:
    """Alike intervals tell little; with chance between them the interval holds its own rate."""
    found = figures("\n".join(vllm_log(FALLS)))
    for (low, high), rate in zip(found["marginal_interval"], found["marginal_prob"], strict=True):
        assert 0 <= low <= rate <= high <= 1
    assert found["interval_basis"] == "over 12 lines of the log"
    few = figures("\n".join(vllm_log()))
    assert few["interval_basis"] == "as if rounds were independent: the true ones are wider"
    assert few["marginal_interval"][1] == pytest.approx([0.193, 0.680], abs=1e-3)  # 5 of 12


def test_a_long_log_has_twelve_parts() -> None:
    rounds = [(n % 4, (n * 7) % 4, 1) for n in range(500)]
    over = figures("\n".join(vllm_log(rounds)))["over_time"]
    assert len(over["parts"]) == 12
    assert over["chance"] > 0.05


@pytest.mark.parametrize("num_lines", [10, 12, 60])
def test_a_steady_log_rarely_moves(num_lines: int) -> None:
    """At most 1 in 100 of its orders moves as much as is told."""
    random, told = np.random.default_rng(5), 0
    for _ in range(40):
        accepted = random.binomial(3, 0.6, (num_lines, 40)).tolist()
        said = figures("\n".join(vllm_log([tuple(one) for one in accepted])))["meaning"][0]
        told += "fell" in said or "rose" in said
    assert told <= 3  # of 40 at 1 in 100; at 1 in 20 as many or more in 2 of 3 cases


# --------------------------------------------------------------------------- SGLang


def test_an_sglang_log_by_hand() -> None:
    found = figures("\n".join(sglang_log([(4, 2.5, 0.5), (8, 2.35, 0.45)])))
    assert (found["num_intervals"], found["num_rounds"]) == (2, None)
    assert found["mean_of_interval_means"] == pytest.approx((4 * 2.5 + 8 * 2.35) / 12)
    assert found["mean_acceptance_length_range"] == pytest.approx([2.345, 2.505])
    assert found["num_draft_tokens_per_round"] == 3
    assert "how many rounds each interval had" in found["not_known"]
    assert not found["fixed_length_sweep"]["if_chains"]


@pytest.mark.parametrize(
    ("arguments", "intervals", "depth", "why"),
    [
        # The three definitions of the rate: (l - 1) / (n - 1), l / n and l / steps.
        ("", [(1, 2.5, 0.5), (1, 3.11, 0.7)], 3, None),
        ("", [(1, 2.0, 0.33), (1, 2.01, 0.34), (1, 2.5, 0.5)], 3, None),
        ("", [(1, 2.17, 0.54), (1, 1.8, 0.45), (1, 1.57, 0.39)], None, "3 if SGLang is older"),
        ("", [(1, 2.0, 0.5), (1, 2.01, 0.5)], None, "2 if SGLang is of April 2026 or newer; 3 if"),
        ("", [(1, 3.2, 1.07), (1, 2.9, 0.97)], None, "above 1 is of an SGLang older"),
        ("", [(1, 2.0, 1.0), (1, 1.5, 0.5)], 1, None),
        ("", [(1, 1.05, 0.01)], None, "leave many draft lengths"),
        ("", [(1, 1.0, 0.0)], None, "leave many draft lengths"),
        ("", [(1, 2.5, 0.9), (1, 2.5, 0.2)], None, "fit no chain"),
        ("", [(1, 2.5, None)], None, "no accept rate"),
        ("speculative_eagle_topk=4", [(1, 2.5, 0.5)], None, "trees"),
        ("'speculative_eagle_topk': 4, 'speculative_num_steps': 3", [(1, 2.5, 0.5)], None, "trees"),
        ("'speculative_adaptive': True", [(1, 2.5, 0.5)], None, "changed"),
        ("'speculative_num_draft_tokens': 6", [(1, 2.5, None)], 5, None),
        ("speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4",
         [(1, 3.2, 1.07)], 3, None),
    ],
)  # fmt: skip
def test_how_much_an_sglang_log_drafted(
    arguments: str, intervals: list[Any], depth: int | None, why: str | None
) -> None:
    found = figures("\n".join(sglang_log(intervals, arguments)))
    assert found["num_draft_tokens_per_round"] == depth
    assert (found["fixed_length_sweep"] is None) == (depth is None)
    assert why is None or why in found["why_no_sweep"]


SGLANG = sglang_line(4, 2.5, 0.5)
PLAIN = re.sub("accept len.*?, accept rate.*?, ", "", SGLANG)


@pytest.mark.parametrize(
    "line",
    [
        SGLANG.replace("Decode batch,", "Decode batch."),
        SGLANG.replace("Decode batch,", "Decode batch [7],"),
        SGLANG + ", ",
        SGLANG.replace("cuda graph: True", "cpu graph: False"),
        SGLANG.replace(
            "token usage: 0.03", "full token usage: 0.03, mamba num: 4, mamba usage: 0.1"
        ),
        SGLANG.replace("cuda graph", "pre-allocated usage: 0.00, #prealloc-req: 0, cuda graph"),
        SGLANG.replace("cuda graph", "block accept len: 2.60, cuda graph"),
        SGLANG.replace("accept rate", "valid draft len: 3.00, accept rate"),
        SGLANG.replace(
            "[2026-11-25 07:00:05 TP0]", "2026-09-27T00:15:25.500Z 5ylyr21v-rhkt6 INFO TP0]"
        ),
    ],
)
def test_forms_of_sglang_s_line(line: str) -> None:
    found = figures("\n".join([sglang_start(), line]))
    assert found["mean_acceptance_length_range"] == pytest.approx([2.495, 2.505])
    assert found["mean_running_requests"] == 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        *((SGLANG[: SGLANG.index(part) + len(part)], CUT) for part in (
            "#running-req:", "accept len: 2.", "accept len: 2.50", "accept rate: 0.5", "/s): 812",
        )),
        (SGLANG.replace("2.50", "2,50"), "at least 1"),
        (SGLANG.replace("2.50", "nan"), "lacks #running-req or an accept len of at least 1"),
        (SGLANG.replace("2.50", "0.50"), "at least 1"),
        (SGLANG.replace("#running-req", "#running"), "lacks #running-req"),
        (SGLANG.replace("accept len", "acceptance"), "lacks #running-req or an accept len"),
    ],
)  # fmt: skip
def test_a_line_of_sglang_that_is_left_out(line: str, reason: str) -> None:
    found = imported("\n".join([*sglang_log(), line, sglang_line(4, 2.2, 0.4, second=20)]))
    assert found["num_intervals"] == 4
    [one] = found["left_out"]
    assert reason in one["reason"]
    assert reason in refused(line)


def test_sglang_s_ranks_engines_and_restarts() -> None:
    ranks = [sglang_line(4, 2.5, 0.5, rank=f" DP{n} TP0") for n in range(4)]
    found = figures("\n".join([sglang_start(), *ranks]))
    assert (found["num_intervals"], len(found["processes"])) == (4, 4)
    engines = [f"(SGLangEngine pid={pid}) {line}" for pid in (1, 2) for line in sglang_log()]
    mixed = [line for pair in zip(engines[:5], engines[5:], strict=True) for line in pair]
    assert "side by side" in " ".join(figures("\n".join(mixed))["meaning"])
    restart = [*sglang_log(), *(line.replace("11-25", "11-26") for line in sglang_log())]
    assert "as after a restart" in " ".join(figures("\n".join(restart))["meaning"])
    longer = sglang_log(arguments="speculative_eagle_topk=1, speculative_num_draft_tokens=6")
    other = imported(
        "\n".join([*sglang_log(), *(line.replace("11-25", "11-26") for line in longer)])
    )
    assert [*other["models"]] == ["3 draft tokens", "5 draft tokens"]


def test_engines_of_other_lengths_without_their_starts() -> None:
    """Three draft tokens and five: no length fits all, so none are pooled."""
    by_pid = {1: (2.5, 0.5), 2: (2.5, 0.3), 3: (2.2, 0.4)}
    lines = [
        f"(SGLangEngine pid={pid}) {sglang_line(4, length + off, rate + off / n, second=second)}"
        for second, off in enumerate((0.0, 0.1, 0.21))
        for n, (pid, (length, rate)) in zip((3, 5, 3), by_pid.items(), strict=True)
    ]
    found = imported("\n".join(lines))["models"]
    assert [own["num_draft_tokens_per_round"] for own in found.values()] == [3, 5, 3]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (sglang_log([])[:1], "0 has no line of SGLang about drafts"),
        ([PLAIN], "0 has no line of SGLang about drafts"),
        ([sglang_start().replace("'EAGLE3'", "None"), PLAIN], "this SGLang does not speculate"),
    ],
)  # fmt: skip
def test_sglang_logs_without_drafts(lines: list[str], says: str) -> None:
    assert says in refused("\n".join(lines))


# --------------------------------------------------------------------------- llama.cpp

BEFORE = "slot print_timing: id  0 | task 12 | "
EVAL = f"{BEFORE}       eval time =   1912.55 ms /   254 tokens (    7.53 ms per token)"
JUNE = f"{BEFORE}draft acceptance = 0.64479 (  167 accepted /   259 generated), mean acceptance "
JUNE += "length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)"
OLD = f"{BEFORE}draft acceptance rate = 0.64479 (  167 accepted /   259 generated)"


BLOCK = [
    f"{BEFORE}",
    "prompt eval time =     900.22 ms /    30 tokens (   30.01 ms per token)",
    EVAL,
]
BLOCK += ["      total time =   15224.00 ms /   222 tokens", OLD]
"""As builds of May 2026 print it, the task on a line of its own."""


def test_llama_cpp_s_forms() -> None:
    found = figures(JUNE)
    assert (found["num_rounds"], found["marginal_prob"]) == (87, [70 / 87, 55 / 87, 42 / 87])
    now = figures("\n".join(llamacpp_log()))
    assert (now["num_requests"], now["num_rounds"]) == (2, 27)
    assert now["marginal_prob"] == [22 / 27, 20 / 27, 17 / 27]
    without = figures("\n".join(llamacpp_log()[::2]))
    low, high = without["mean_acceptance_length_range"]
    assert low < 1 + 59 / 27 < high < low + 0.02
    assert "run the server with -lv 4" in without["why_no_sweep"]
    for block in (f"{EVAL}\n{OLD}", "\n".join(line.replace(BEFORE, "") for line in BLOCK)):
        mean = figures(block)["mean_acceptance_length_range"]  # 86 or 87 rounds
        assert mean == [1 + 167 / 87, 1 + 167 / 86]
    two = [f"[{port}] {line.replace(BEFORE, '')}" for line in BLOCK for port in (53409, 53410)]
    assert figures("\n".join(two))["num_requests"] == 2


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([JUNE[: JUNE.index("259")]], CUT),
        ([llamacpp_log()[0], llamacpp_log()[1][:-6]], None),
        ([JUNE.replace("0.805", "0.905")], ODD),
        ([JUNE.replace("167", "367")], ODD),
        ([OLD], "says no mean length, and no `eval time` of its task"),
    ],
)
def test_lines_of_llama_cpp_that_are_left_out(lines: list[str], reason: str | None) -> None:
    text = "\n".join([*lines, *(line.replace("task ", "task 9") for line in llamacpp_log())])
    found = imported(text)
    assert len(found["left_out"]) == 1
    assert reason is None or reason in found["left_out"][0]["reason"]
    assert reason is None or found["num_rounds"] == 27 or reason == ODD


def test_a_task_s_number_comes_again_after_a_restart() -> None:
    again = [re.sub(r"^0\.0", "0.1", line) for line in llamacpp_log()]
    assert figures("\n".join([*llamacpp_log(), *again]))["num_rounds"] == 54


MADE_UP = "0.00.361.140 W spec common_specu: synthetic speculative acceptance is enabled for "
MADE_UP += "benchmarking; generated output is not valid"
VLLM_MADE_UP = "non-default args: {'speculative_config': {'method': 'mtp', "
VLLM_MADE_UP += "'num_speculative_tokens': 3, 'rejection_sample_method': 'synthetic', "
VLLM_MADE_UP += "'synthetic_acceptance_rates': [0.8, 0.5, 0.3]}}"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([MADE_UP, *llamacpp_log()], "this llama.cpp makes acceptances up, as its start says; "
         "start it without --spec-synth-rates and --spec-synth-len"),
        ([VLLM_MADE_UP, *vllm_log()], "start it without rejection_sample_method synthetic"),
    ],
)  # fmt: skip
def test_acceptances_that_are_made_up(lines: list[str], says: str) -> None:
    assert says in refused("\n".join(lines))


def test_a_llama_cpp_log_without_drafts() -> None:
    assert "0 has no line of llama.cpp about drafts" in refused(EVAL)
    start = "I spec common_specu: no implementations specified for speculative decoding"
    assert "this llama.cpp does not speculate, as its start says" in refused(f"{start}\n{EVAL}")
    # A server that drafts is not taken for a plain one.
    start = "I spec common_specu: adding speculative implementation 'draft-eagle3'"
    assert "it logs less than -lv 3" in refused(f"{start}\n{EVAL}", JUNE)


def answers(*timings: Any) -> str:
    return "\n".join(json.dumps({"content": "", "timings": one}) for one in timings)


def test_answers_of_llama_cpp() -> None:
    """The last round may emit its draft alone, so the mean is a range: 13 or 14 rounds, and none
    of the five that were drafted in 8 or 9; a request without drafts tells nothing."""
    found = imported(
        answers(
            {"prompt_n": 9, "predicted_n": 48, "draft_n": 38, "draft_n_accepted": 34},
            {"prompt_n": 9, "predicted_n": 9, "draft_n": 5, "draft_n_accepted": 0},
            {"prompt_n": 9, "predicted_n": 11},
            {"predicted_n": -1},
            [],
        )
        + "\n"
        + json.dumps({"stop": False, "timings": {"predicted_n": 4, "draft_n": 9}})
    )
    assert found["format"] == "llamacpp-answers"
    assert found["num_requests"] == 2
    assert found["mean_acceptance_length_range"] == [1 + 34 / 23, 1 + 34 / 21]
    assert "answers do not state the draft length" in found["why_no_sweep"]
    assert {one["reason"]: one["lines"] for one in found["left_out"]} == {
        "has timings without whole counts": 2, "is a part of a streamed answer": 1,
        "is of a request that drafted no token: it was too short, or nothing was proposed": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("timings", "says"),
    [
        (
            {"predicted_n": 4, "draft_n": 0},
            "has no answer with draft tokens; give answers of a server that drafts",
        ),
        ({"draft_n": 2}, "has timings without whole counts; keep one answer of"),
        ([], "has timings without whole counts"),
        ({"predicted_n": 4, "draft_n": 9, "draft_n_accepted": 6}, ODD),
    ],
)
def test_answers_that_are_refused(timings: Any, says: str) -> None:
    assert says in refused(answers(timings))


# --------------------------------------------------------------------------- damage


def read_figures(lines: list[str]) -> Any:
    try:
        found = imported("\n".join(lines))
    except InputError:
        return "refused"
    names = ("num_rounds", "num_accepted_tokens", "marginal_prob", "mean_of_interval_means")
    return found.get("models", [found.get(name) for name in names])


@pytest.mark.parametrize(
    ("lines", "place", "kept"),
    [
        (vllm_log(), 3, None),
        (sglang_log(), 3, None),
        (llamacpp_log(), 2, llamacpp_log()[:2]),
        (llamacpp_log(), 3, llamacpp_log()[:2]),
    ],
    ids=["vllm", "sglang", "llamacpp", "llamacpp, positions"],
)
def test_a_damaged_line_never_becomes_a_figure(
    lines: list[str], place: int, kept: list[str] | None
) -> None:
    """Cut anywhere, a letter lost, or a digit changed: it is read as it was, or left out. Nothing
    beside SGLang's running requests, the weight of a mean, tells that they were changed."""
    rest = kept or [*lines[:place], *lines[place + 1 :]]
    right = [read_figures(lines), read_figures(rest)]
    line = lines[place]
    for at in range(0, len(line), 2):
        digit = str((int(line[at]) + 3) % 10) if line[at].isdigit() else line[at]
        changed = [line[:at], line[:at] + line[at + 1 :]]
        changed += (
            [] if line[:at].endswith("#running-req: ") else [line[:at] + digit + line[at + 1 :]]
        )
        for one in changed:
            assert read_figures([*lines[:place], one, *lines[place + 1 :]]) in right, one
