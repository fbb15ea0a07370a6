"""Metrics and logs of vLLM and SGLang, summarised by hand-worked numbers; tests/engines has
SGLang's own code write them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.command import write_lines
from tests.logs.import_cases import (
    COUNTERS,
    engine_log,
    refused,
    scrape,
    scrape_sglang,
    sglang_log,
    summary,
    taus,
)

# --------------------------------------------------------------------------- rates


# --------------------------------------------------------------------------- vLLM, Prometheus


def without(start: str, *instead: str) -> list[str]:
    return [line for line in COUNTERS if not line.startswith(start)] + list(instead)


@pytest.mark.parametrize("suffix", ["_total", ""])
def test_counters_by_hand(tmp_path: Path, suffix: str) -> None:
    found = summary(scrape(tmp_path / "m.txt", *COUNTERS, suffix=suffix))["models"]["m"]
    assert found["mean_acceptance_length"] == pytest.approx(2.2)
    assert found["marginal_prob"] == [0.7, 0.4, 0.1]
    assert found["conditional_prob"] == [0.7, pytest.approx(4 / 7), 0.25]
    assert np.array(taus(found)) == pytest.approx(np.array([[1.7] * 2, [2.1] * 2, [2.2] * 2]))
    assert "over the rounds that were measured" in found["fixed_length_sweep"]["basis"]


def test_engines_add_up_and_models_stand_apart(tmp_path: Path) -> None:
    lines = [
        f'vllm:spec_decode_{name}_total{{engine="{engine}",model_name="{model}"{more}}} {value}'
        for engine, model in (("0", "m"), ("1", "m"), ("0", 'odd "name", {x}'.replace('"', '\\"')))
        for name, more, value in (
            ("num_drafts", "", 4),
            ("num_draft_tokens", "", 4),
            ("num_accepted_tokens", "", 3),
            ("num_accepted_tokens_per_pos", ',position="0"', 3),
        )
    ]
    found = summary(write_lines(tmp_path / "m.txt", *lines))["models"]
    assert [found[name]["num_rounds"] for name in sorted(found)] == [8, 4]


def test_counters_of_several_lengths_are_marked(tmp_path: Path) -> None:
    lines = without("num_draft_tokens", "num_draft_tokens 25")
    found = summary(scrape(tmp_path / "m.txt", *lines))["models"]["m"]
    assert not found["fixed_length_sweep"]["is_exact"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (without("num_drafts", "num_drafts NaN"), "line 8: .*NaN"),
        (without("num_drafts", "num_drafts +Inf"), r"line 8: .*\+Inf"),
        (without("num_drafts", "num_drafts -1"), "line 8: .*-1"),
        (without("num_drafts", "num_drafts 10.5"), "line 8: .*10.5"),
        (without("num_drafts", "num_drafts ten"), "line 8: .*ten"),
        (without("num_drafts", "num_drafts 1e300"), "line 8: .*1e300"),
        ([*COUNTERS, "num_drafts 10.0"], "line 9: .*line 3 again"),
        ([*COUNTERS, "per_pos x 1"], "line 9: .*position"),
        ([*COUNTERS, 'per_pos "x 1'], "line 9: .*no sample of vllm:spec"),
        (without("per_pos 1"), "positions have a gap"),
        (without("per_pos 0", "per_pos 0 2"), "a position is accepted more often"),
        (without("num_accepted_tokens", "num_accepted_tokens 13"), "add up"),
        (without("num_draft_tokens", "num_draft_tokens 11"), "more tokens are accepted"),
        (without("num_drafts"), "above 0: there are no drafts yet"),
        (without("num_drafts", "num_drafts 0"), "above 0: there are no drafts yet"),
    ],
)
def test_counters_that_are_malformed_or_contradict_each_other(
    tmp_path: Path, lines: list[str], says: str
) -> None:
    assert re.search(says, refused(scrape(tmp_path / "m.txt", *lines)))


# --------------------------------------------------------------------------- vLLM's log


def log_line(drafted: list[int], accepted: list[int], num_positions: int) -> str:
    """As vLLM prints an interval, given the tokens of each of its rounds."""
    rates = [sum(n > place for n in accepted) / len(accepted) for place in range(num_positions)]
    return (
        "(APIServer pid=7) INFO 11-24 05:00:10 [metrics.py:120] SpecDecoding metrics: "
        f"Mean acceptance length: {1 + sum(accepted) / len(accepted):.2f}, "
        "Accepted throughput: 0.50 tokens/s, Drafted throughput: 1.50 tokens/s, "
        f"Accepted: {sum(accepted)} tokens, Drafted: {sum(drafted)} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}, "
        f"Avg Draft acceptance rate: {100 * sum(accepted) / sum(drafted):.1f}%"
    )


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4).filter(
        lambda intervals: any(map(any, intervals))
    )
)
def test_a_log_tells_the_rounds_of_full_drafts_exactly(
    tmp_path_factory: pytest.TempPathFactory, intervals: list[list[int]]
) -> None:
    lines = (log_line([3] * len(rounds), rounds, 3) for rounds in intervals)
    found = summary(engine_log(tmp_path_factory.mktemp("log") / "vllm.log", *lines))
    rounds = [n for interval in intervals for n in interval]
    expected = [sum(n > place for n in rounds) for place in range(3)]
    assert (found["num_intervals"], found["num_rounds"]) == (len(intervals), len(rounds))
    assert found["marginal_prob"] == [count / len(rounds) for count in expected]
    assert found["mean_acceptance_length"] == 1 + sum(rounds) / len(rounds)
    assert found["fixed_length_sweep"]["is_exact"]


@pytest.mark.parametrize(
    ("figures", "rounds", "at_least"),
    [
        (("1.88", "237 tokens, Drafted: 807", "0.428, 0.268, 0.186"), 269, (115, 72, 50)),
        # Five or two draft tokens by batch size, so that only the mean tells the rounds.
        (("1.76", "239 tokens, Drafted: 713", "0.446, 0.282, 0.009, 0.009, 0.009"), 316, None),
    ],
)
def test_lines_of_a_real_server_agree_with_its_counters(
    tmp_path: Path, figures: tuple[str, str, str], rounds: int, at_least: tuple[int, ...] | None
) -> None:
    """vLLM 0.32.0 on the CPU with the embedded pair, and what its /metrics said."""
    mean, tokens, rates = figures
    line = (
        f"SpecDecoding metrics: Mean acceptance length: {mean}, Accepted throughput: 2.3 tokens/s, "
        f"Drafted throughput: 6.8 tokens/s, Accepted: {tokens} tokens, Per-position acceptance "
        f"rate: {rates}, Avg Draft acceptance rate: 33.5%"
    )
    found = summary(engine_log(tmp_path / "vllm.log", line))
    assert found["num_rounds"] == rounds
    assert found["fixed_length_sweep"]["is_exact"] == (at_least is not None)
    if at_least is not None:
        assert found["marginal_prob"] == [count / rounds for count in at_least]


FULL = log_line([3, 3], [2, 1], 3)


@pytest.mark.parametrize(
    ("intervals", "says"),
    [
        ([FULL.replace("Drafted: 6", "Drafted: 0")], "has drafted tokens"),
        ([FULL.replace("1.000, 0.500", "nan, nan")], "vllm.log, line 2: mean acceptance"),
        (
            [FULL, FULL.replace("Mean acceptance", "Median acceptance")],
            "line 3: mean acceptance",
        ),
        ([FULL.replace("Accepted: 3", "Accepted: 5")], "line 2: these figures contradict"),
        ([FULL.replace("1.000, 0.500", "0.500, 1.000")], "line 2: these figures contradict"),
        ([FULL, log_line([2], [1], 2)], "line 3: 2 positions, after lines of"),
    ],
)
def test_logs_that_cannot_be_added_up(tmp_path: Path, intervals: list[str], says: str) -> None:
    assert says in refused(engine_log(tmp_path / "vllm.log", *intervals))


def test_a_log_without_speculation(tmp_path: Path) -> None:
    path = engine_log(tmp_path / "vllm.log")
    assert "without --disable-log-stats" in refused(path, "vllm-log")
    assert "state the format" in refused(path)
    assert "SpecDecoding metrics" in refused(scrape(tmp_path / "m.txt", *COUNTERS), "vllm-log")


# --------------------------------------------------------------------------- metrics


def test_sglang_counters_by_hand(tmp_path: Path) -> None:
    """18,000 tokens, 100 of them from prompts, in 7,000 rounds of three draft tokens."""
    found = summary(scrape_sglang(tmp_path / "m.txt"))["models"]["m"]
    mean = 17900 / 7000
    assert found["mean_acceptance_length_range"] == [mean, mean]
    assert (found["num_rounds"], found["num_draft_tokens_per_round"]) == (7000, 3)
    assert found["last_interval_means"] == [2.4]
    assert taus(found) == [
        [pytest.approx(1 + (mean - 1) / 3), 2.0],
        [pytest.approx(1 + (mean - 1) * 2 / 3), mean],
        [pytest.approx(mean), mean],
    ]
    assert "Acceptance by position is not known" in found["meaning"][0]


@pytest.mark.parametrize(
    ("changes", "depth", "mean", "why"),
    [
        ({"num_aborted_requests": 700}, 3, [17900 / 7000, 18000 / 7000], None),
        ({"spec_verify_calls": None}, 3, [2.4, 2.4], None),
        ({"spec_num_steps": 2.0}, None, [17900 / 7000] * 2, "trees"),
        ({"spec_num_draft_tokens": None}, None, [17900 / 7000] * 2, "is not there"),
    ],
)
def test_sglang_counters_that_say_less(
    tmp_path: Path, changes: dict[str, Any], depth: int | None, mean: list[float], why: str | None
) -> None:
    found = summary(scrape_sglang(tmp_path / "m.txt", **changes))["models"]["m"]
    assert found["num_draft_tokens_per_round"] == depth
    assert found["mean_acceptance_length_range"] == mean
    assert (found["fixed_length_sweep"] is None) == (depth is None)
    assert why is None or why in found["meaning"][1]


def test_sglang_ranks_with_other_draft_lengths(tmp_path: Path) -> None:
    path = scrape_sglang(tmp_path / "m.txt")
    other = 'sglang:spec_num_draft_tokens{model_name="m",dp_rank="1"} 2.0\n'
    path.write_text(path.read_text() + other)
    assert "changed while" in summary(path)["models"]["m"]["why_no_sweep"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spec_accept_length": 0.0, "spec_verify_calls": None}, "above 0: it is 0; speculation"),
        ({"spec_accept_length": None, "spec_verify_calls": None}, "neither; scrape SGLang as"),
        ({"spec_accept_length": "NaN"}, "line 2: NaN is no finite number"),
        ({"spec_verify_calls": 7000.5}, "line 9: 7000.5 is no count"),
        ({"generation_tokens": 3000}, "less than one a round"),
    ],
)
def test_sglang_counters_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    assert says in refused(scrape_sglang(tmp_path / "m.txt", **changes))


# --------------------------------------------------------------------------- log


def test_an_sglang_log_by_hand(tmp_path: Path) -> None:
    found = summary(sglang_log(tmp_path / "sglang.log", (4, 2.5, 0.5), (8, 2.35, 0.45)))
    assert (found["num_intervals"], found["num_rounds"]) == (2, None)
    assert found["mean_of_interval_means"] == pytest.approx((4 * 2.5 + 8 * 2.35) / 12)
    assert found["mean_acceptance_length_range"] == pytest.approx([2.345, 2.505])
    assert found["num_draft_tokens_per_round"] == 3
    assert "how many rounds each interval had" in found["not_known"]
    assert not found["fixed_length_sweep"]["if_chains"]


@pytest.mark.parametrize(
    ("arguments", "intervals", "depth", "why"),
    [
        ("", [(1, 2.5, 0.5), (1, 3.11, 0.7)], 3, None),  # 1.5 / 0.5 and 2.11 / 0.7
        ("", [(1, 1.05, 0.01)], None, "server_args"),  # 5 tokens, or 3 to 11 by the digits
        ("", [(1, 2.5, None)], None, "server_args"),  # as older versions print
        ("'speculative_eagle_topk': 4, ", [(1, 2.5, 0.5)], None, "trees"),
        ("'speculative_adaptive': True, ", [(1, 2.5, 0.5)], None, "changed"),
        ("'speculative_num_draft_tokens': 6, ", [(1, 2.5, None)], 5, None),
    ],
)
def test_how_much_an_sglang_log_drafted(
    tmp_path: Path, arguments: str, intervals: list[Any], depth: int | None, why: str | None
) -> None:
    log = sglang_log(tmp_path / "sglang.log", *intervals, arguments=arguments)
    found = summary(log)
    assert found["num_draft_tokens_per_round"] == depth
    assert why is None or why in found["why_no_sweep"]


def test_sglang_logs_that_are_refused(tmp_path: Path) -> None:
    log = sglang_log(tmp_path / "a.log", (4, 2.5, 0.5))
    text = log.read_text()
    for changed, says in (
        (text + text, "line 4: another start, after that of"),
        (re.sub("accept len.*?, accept rate.*?, ", "", text), "speculation is off"),
        (text.splitlines()[0] + "\n", "has 0 lines 'Decode batch'"),
        (text.replace("accept len: 2.50", "accept len: nan"), "line 3: #running-req"),
        (text.replace("accept len: 2.50", "accept len: 0.50"), "of at least 1"),
        (text.replace("accept len", "acceptance"), "as SGLang 0.5.23 writes it"),
    ):
        log.write_text(changed)
        assert says in refused(log)
