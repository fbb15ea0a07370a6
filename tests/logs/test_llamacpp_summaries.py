"""llama.cpp's metrics, log and answers, as build 11549 wrote them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specctl.errors import InputError
from specctl.logs.importing import import_file
from specctl.logs.sources import Source

PREFIX = "0.00.978.611 I slot print_timing: id  0 | task {} | "
ACCEPTED = "draft acceptance = 0.89474 (   34 accepted /    38 generated), mean len =  3.62"
REST = "draft acceptance = 0.59524 (   25 accepted /    42 generated), mean len =  2.79"
POSITIONS = ("     acc per pos = (0.923, 0.923, 0.769)", "     acc per pos = (0.714, 0.571, 0.500)")
LOG = [PREFIX.format(0) + ACCEPTED, PREFIX.format(0) + POSITIONS[0]]
LOG += [PREFIX.format(15) + REST, PREFIX.format(15) + POSITIONS[1]]
COUNTERS = {"num_drafts": 27, "num_draft_tokens": 80, "num_accepted_tokens": 59}
BY_POSITION = (22, 20, 17)
METRICS = [
    "# HELP llamacpp:spec_decode_num_drafts_total Speculative: ...",
    *(f"llamacpp:spec_decode_{name}_total {value}" for name, value in COUNTERS.items()),
    *(
        f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}'
        for i, n in enumerate(BY_POSITION)
    ),
    "llamacpp:n_decode_total 58",
]


def read(lines: list[str]) -> dict[str, Any]:
    found = import_file(Source("server", "\n".join(lines).encode()))
    [figures] = found.get("models", {"": found}).values()
    return {"format": found["format"], **figures}


@pytest.mark.parametrize("lines", [LOG, METRICS], ids=["log", "metrics"])
def test_rounds_of_two_requests(lines: list[str]) -> None:
    """The log and the metrics of one server say the same: its digits leave one number of rounds."""
    found = read(lines)
    assert found["num_rounds"] == COUNTERS["num_drafts"]
    assert found["num_draft_tokens"] == COUNTERS["num_draft_tokens"]
    assert found["num_accepted_tokens"] == COUNTERS["num_accepted_tokens"]
    assert found["marginal_prob"] == [n / COUNTERS["num_drafts"] for n in BY_POSITION]


def test_a_log_without_positions_is_a_range() -> None:
    found = read([LOG[0], LOG[2]])
    low, high = found["mean_acceptance_length_range"]
    assert found["fixed_length_sweep"] is None
    assert low < 1 + 59 / 27 < high < low + 0.02


def test_answers() -> None:
    """The last round of each may emit its draft alone, so the mean is a range."""
    timings = {"prompt_n": 9, "predicted_n": 48, "draft_n": 38, "draft_n_accepted": 34}
    plain = {"prompt_n": 9, "predicted_n": 11}
    found = read([json.dumps({"content": "", "timings": one}) for one in (timings, plain)])
    assert found["format"] == "llamacpp-answers"
    assert found["mean_acceptance_length_range"] == [57 / 25, 57 / 23]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([LOG[0][:-20]], "no line of a request's drafts"),
        ([*LOG[:3], PREFIX.format(15) + "     acc per pos = (0.714)"], "different numbers"),
        ([*LOG[:3], LOG[3].replace("0.714", "0.914")], "contradict"),
        ([METRICS[-1].replace("n_decode", "spec_decode_n")], "llama.cpp of September 2026"),
        ([json.dumps({"timings": {"draft_n": 2}, "a": 1})], "no draft tokens"),
        ([json.dumps({"timings": []})], "no answer with timings"),
    ],
)
def test_refusals(lines: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(lines)
