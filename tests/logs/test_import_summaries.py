"""Answer files and counters of other tools, summarised by hand-worked numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.errors import InputError, UsageError
from specctl.logs.acceptance_figures import chain_figures
from tests.cli.command import passes
from tests.logs.import_cases import (
    COUNTERS,
    answer,
    choice,
    engine_log,
    imported,
    metrics,
    refused,
    scrape,
    summary,
    taus,
    write_rows,
)

# --------------------------------------------------------------------------- Spec-Bench


def test_spec_bench_by_hand(tmp_path: Path) -> None:
    """Question 1: mean 9/5, question 2: 4/1. Pooled 13/6; mean of means 2.9."""
    short = choice(new_tokens=[4], wall_time=[0.25], decoding_steps=[1], accept_lengths=[4])
    source = write_rows(
        tmp_path / "a.jsonl", answer(1, choice(), category="math"), answer(2, short, category="qa")
    )
    found = summary(source)
    figures = found["all"]
    assert figures["mean_acceptance_length"] == pytest.approx(13 / 6)
    assert figures["mean_of_question_means"] == pytest.approx((9 / 5 + 4) / 2)
    assert figures["tokens_per_s"] == pytest.approx(13 / 1.0)
    assert figures["mean_of_question_rates"] == pytest.approx(14.0)
    assert figures["acceptance_histogram"] == [2, 2, 1, 1]
    assert figures["marginal_prob"] == [4 / 6, 2 / 6, 1 / 6]
    assert "do not say whether drafts were chains or trees" in figures["meaning"][1]
    assert (figures["num_questions"], figures["num_rounds"], figures["num_tokens"]) == (2, 6, 13)
    assert set(found["by_category"]) == {"math", "mt_bench", "qa"}
    assert found["by_category"]["qa"]["tokens_per_s"] == pytest.approx(16.0)


def test_answers_are_compared_with_those_of_plain_decoding(tmp_path: Path) -> None:
    """Rates 12 and 16, plain 6 and 4: sums 13/1 over 13/2.5, means 14 over 5."""
    short = choice(new_tokens=[4], wall_time=[0.25], decoding_steps=[1], accept_lengths=[4])
    plain = {"accept_lengths": [1] * 4}
    slow = (choice(wall_time=[1.0, 0.5], **plain), {**short, **plain, "wall_time": [1.0]})
    both = ((choice(), short), slow)
    ours, theirs = (
        write_rows(tmp_path / name, *(answer(i, one, category="qa") for i, one in enumerate(them)))
        for name, them in zip(("ours", "plain"), both, strict=True)
    )
    figures = summary(ours, plain=theirs)
    for group in (figures["all"], figures["by_category"]["qa"]):
        assert group["speed_up"] == pytest.approx(13 / (13 / 2.5))
        assert group["speed_up_of_mean_rates"] == pytest.approx(14 / 5)
    table = passes("import", ours, "--plain", theirs).out
    assert re.search(r"all +2 +2.167 +13.0 +2.50 +2.80", table), table
    fewer = write_rows(tmp_path / "fewer", answer(0, slow[0]))
    with pytest.raises(InputError, match=r"fewer: .*found 1 that one of the files lacks, such"):
        summary(ours, plain=fewer)


def test_speed_ups_are_those_of_speed_py(tmp_path: Path) -> None:
    """Of each task and overall, after `speed.py`: the mean of the rates of first choices over the
    baseline's; eight categories are its task `mt_bench`."""
    rng = np.random.default_rng(5)
    tasks = [str(task) for task in rng.choice(["writing", "stem", "rag", "qa"], 40)]

    def answers(speed: float) -> list[dict[str, Any]]:
        made = []
        for number, task in enumerate(tasks):
            tokens, seconds = rng.integers(3, 9, (2, 2)), rng.uniform(0.2, 1.0, (2, 2)) / speed
            both = [
                choice(new_tokens=tokens[i].tolist(), wall_time=seconds[i].tolist()) for i in (0, 1)
            ]
            made.append(answer(number, *both, category=task))
        return made

    def rates(file: list[dict[str, Any]], task: str) -> list[float]:
        groups = {"overall": set(tasks), "mt_bench": {"writing", "stem"}}
        kept = [one for one in file if one["category"] in groups.get(task, {task})]
        firsts = [one["choices"][0] for one in kept]
        return [sum(one["new_tokens"]) / sum(one["wall_time"]) for one in firsts]

    files = {"ours": answers(2.5), "base": answers(1.0)}
    paths = [write_rows(tmp_path / name, *rows) for name, rows in files.items()]
    found = summary(paths[0], plain=paths[1])
    for task in ("overall", "mt_bench", "rag", "qa"):
        group = found["all"] if task == "overall" else found["by_category"][task]
        ratio = np.mean(rates(files["ours"], task)) / np.mean(rates(files["base"], task))
        assert group["speed_up_of_mean_rates"] == pytest.approx(ratio)
        assert group["speed_up"] != pytest.approx(ratio, rel=1e-3), "ours stands beside it"


def test_spec_bench_pools_choices(tmp_path: Path) -> None:
    found = summary(write_rows(tmp_path / "a.jsonl", answer(1, choice(), choice())))
    assert (found["all"]["num_choices"], found["all"]["num_tokens"]) == (2, 18)
    assert found["by_category"] == {}


def test_spec_bench_question_file(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", answer(1, choice(), category="old"))
    questions = write_rows(
        tmp_path / "q.jsonl", {"question_id": 1, "category": "rag", "turns": ["hi"]}
    )
    assert set(summary(source, questions=questions)["by_category"]) == {"rag"}
    other = write_rows(tmp_path / "b.jsonl", answer(7, choice()))
    assert "--questions" in refused(other, questions=questions)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (answer(2, choice(wall_time=[0.5, -0.25])), "-0.25 at index 1"),
        (answer(2, choice(wall_time=[0.5, 0])), "0 at index 1"),
        (answer(2, choice(wall_time=[0.5, True])), "True at index 1"),
        (answer(2, choice(wall_time=[0.5, None])), "nothing at index 1"),
        (answer(2, choice(wall_time=[0.5])), "one entry a turn"),
        (answer(2, choice(wall_time=0.5)), "'wall_time': a valid list, found 0.5"),
        (answer(2, choice(new_tokens=[6, 3.0])), "3.0 at index 1"),
        (answer(2, choice(new_tokens=[])), "at least 1 item"),
        (answer(2, choice(decoding_steps=None)), "'decoding_steps'"),
        (answer(2, choice(accept_lengths=[3, 0])), "at least 1, found 0 at index 1"),
        (answer(2, choice(accept_lengths=[3, 10**20])), "index 1"),
        (answer(2, choice(accept_lengths=None)), "'accept_lengths'"),
        (answer(1, choice()), "which line 1 has too"),
        (answer(2), "'choices'"),
        (answer(2, "text"), "'choices'"),
        (answer(None, choice()), "'question_id'"),
        ('{"question_id": 2, "choices": [{"wall_time": [NaN]}]}', "finite numbers, found NaN"),
    ],
)
def test_answers_that_are_malformed(tmp_path: Path, row: Any, says: str) -> None:
    line = refused(write_rows(tmp_path / "a.jsonl", answer(1, choice()), row))
    assert "line 2" in line
    assert says in line


# --------------------------------------------------------------------------- rates


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(lambda h: sum(h) > 0))
def test_marginal_and_conditional_tell_the_same_mean(histogram: list[int]) -> None:
    """E[accepted] = Σ_j P(at least j), and marginals are products of conditionals."""
    rounds = sum(histogram)
    at_least = [sum(histogram[j:]) for j in range(1, len(histogram))]
    rates = chain_figures(rounds, at_least, 0, 0, is_ragged=False)
    mean = sum(j * count for j, count in enumerate(histogram)) / rounds
    sweep = rates["fixed_length_sweep"]["chains"]
    assert sweep[-1]["mean_acceptance_length_range"] == pytest.approx([1 + mean] * 2)
    product = 1.0
    for marginal, conditional in zip(
        rates["marginal_prob"], rates["conditional_prob"], strict=True
    ):
        product *= conditional or 0.0
        assert marginal == pytest.approx(product)


# --------------------------------------------------------------------------- vLLM, per request


def response(found: Any) -> dict[str, Any]:
    return {"choices": [{"text": "x"}], "metrics": {"speculative_decoding": found}}


def test_vllm_requests_by_hand(tmp_path: Path) -> None:
    """Histograms [2, 1, 1] and [0, 0, 4]: 8 rounds; at least one in 6, at least two in 5."""
    rows = [response(metrics(2, 1, 1)), metrics(0, 0, 4), response(None), response(metrics(0, 0))]
    found = summary(write_rows(tmp_path / "r.jsonl", *rows))
    assert found["acceptance_histogram"] == [2, 1, 5]
    assert found["mean_acceptance_length"] == pytest.approx(1 + 11 / 8)
    assert found["mean_of_request_means"] == pytest.approx((1 + 3 / 4 + 3) / 2)
    assert found["marginal_prob"] == [6 / 8, 5 / 8]
    assert found["conditional_prob"] == [6 / 8, 5 / 6]
    assert found["draft_acceptance_rate"] == pytest.approx(11 / 16)
    assert (found["num_requests"], found["num_requests_without_metrics"]) == (4, 1)
    assert found["fixed_length_sweep"]["is_exact"]
    assert taus(found) == [[1.75, 1.75], [2.375, 2.375]]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "acceptance_histogram_by_draft_length": {"1": [1, 0], "2": [1, 1, 1]},
            "num_draft_tokens": 7,
        },
        {"acceptance_histogram_by_draft_length": None, "num_draft_tokens": 7},
    ],
)
def test_vllm_rounds_of_several_lengths_are_marked(tmp_path: Path, changes: Any) -> None:
    found = summary(write_rows(tmp_path / "r.jsonl", metrics(2, 1, 1, **changes)))
    assert not found["fixed_length_sweep"]["is_exact"]
    assert "some rounds drafted fewer" in found["fixed_length_sweep"]["basis"]


def test_vllm_detailed_arrays_and_a_pretty_printed_response(tmp_path: Path) -> None:
    row = metrics(1, 0, 1, per_step_accepted=[0, 2], per_step_drafted=[2, 2])
    path = tmp_path / "one.json"
    path.write_text(json.dumps(response(row), indent=2))
    assert summary(path)["num_rounds"] == 2
    path.write_text(json.dumps([response(row), response(row)], indent=2))
    assert summary(path)["num_rounds"] == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_spec_steps": 5}, "'num_spec_steps'"),
        ({"num_accepted_draft_tokens": 2}, "'num_accepted_draft_tokens'"),
        ({"num_draft_tokens": 2}, "no more accepted"),
        ({"num_draft_tokens": -2}, "'num_draft_tokens'"),
        ({"num_spec_steps": True}, "'num_spec_steps'"),
        ({"acceptance_histogram": None}, "'acceptance_histogram'"),
        ({"acceptance_histogram": [2, "1", 1]}, "'1' at index 1"),
        ({"per_step_accepted": [1, 2]}, "'per_step_accepted'"),
    ],
)
def test_vllm_requests_that_contradict_themselves(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    source = write_rows(tmp_path / "r.jsonl", metrics(2, 1, 1), metrics(2, 1, 1, **changes))
    line = refused(source)
    assert "line 2" in line
    assert says in line


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([response(None), response(metrics(0, 0))], "--per-request-spec-decode-metrics"),
        ([response(3)], "a valid dictionary"),
        ([answer(1, choice(accept_lengths=[]))], "at least one round"),
        (["# HELP x y", "vllm:num_requests_running 0"], "above 0, found none"),
    ],
)
def test_files_that_tell_of_no_round(tmp_path: Path, rows: list[Any], says: str) -> None:
    assert says in refused(write_rows(tmp_path / "source", *rows))


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
    found = summary(write_rows(tmp_path / "m.txt", *lines))["models"]
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
        ([*COUNTERS, 'per_pos "x 1'], "line 9: .*a sample of vllm:spec"),
        (without("per_pos 1"), "without a gap"),
        (without("per_pos 0", "per_pos 0 2"), "no position accepted more often"),
        (without("num_accepted_tokens", "num_accepted_tokens 13"), "add up"),
        (without("num_draft_tokens", "num_draft_tokens 11"), "no more accepted"),
        (without("num_drafts"), "above 0, found no drafts yet"),
        (without("num_drafts", "num_drafts 0"), "above 0, found no drafts yet"),
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


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=60))
def test_a_log_of_drafts_of_several_lengths_is_marked(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[int, int]]
) -> None:
    drafted = [1, *(length for length, _ in rounds)]
    accepted = [1, *(min(pair) for pair in rounds)]
    path = tmp_path_factory.mktemp("log") / "vllm.log"
    found = summary(engine_log(path, log_line(drafted, accepted, 4)))
    sweep = found["fixed_length_sweep"]
    assert not sweep["is_exact"] or found["num_rounds"] * 4 == sum(drafted)
    assert found["num_accepted_tokens"] == sum(accepted)
    assert found["mean_acceptance_length"] == pytest.approx(
        1 + sum(accepted) / len(accepted), abs=0.0101
    )


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
        ([FULL.replace("Drafted: 6", "Drafted: 0")], "1 such lines, without drafts"),
        ([FULL.replace("1.000, 0.500", "nan, nan")], "vllm.log, line 2: expected mean acceptance"),
        ([FULL, FULL.replace("Mean acceptance", "Median acceptance")], "line 3: expected mean"),
        ([FULL.replace("Accepted: 3", "Accepted: 5")], "line 2: expected figures that fit"),
        ([FULL.replace("1.000, 0.500", "0.500, 1.000")], "line 2: expected figures that fit"),
        ([FULL, log_line([2], [1], 2)], "line 3: expected one number of positions"),
    ],
)
def test_logs_that_cannot_be_added_up(tmp_path: Path, intervals: list[str], says: str) -> None:
    assert says in refused(engine_log(tmp_path / "vllm.log", *intervals))


def test_a_log_without_speculation(tmp_path: Path) -> None:
    path = engine_log(tmp_path / "vllm.log")
    assert "without --disable-log-stats" in refused(path, format="vllm-log")
    assert "state the format" in refused(path)


def test_options_of_other_formats(tmp_path: Path) -> None:
    source = scrape(tmp_path / "m.txt", *COUNTERS)
    for option in ({"drafters": ("e",)}, {"max_misaligned": 0.0}, {"questions": source}):
        with pytest.raises(UsageError, match="vllm-prometheus"):
            imported(source, **option)
