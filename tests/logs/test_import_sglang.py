"""SGLang's metrics and log, by hand; tests/engines has its own code write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.logs.import_cases import (
    refused,
    scrape_sglang,
    sglang_log,
    summary,
    taus,
)

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
        ({"spec_accept_length": 0.0, "spec_verify_calls": None}, "above 0, found 0; speculation"),
        ({"spec_accept_length": None, "spec_verify_calls": None}, "neither name; scrape SGLang as"),
        ({"spec_accept_length": "NaN"}, "line 2: expected a number, found NaN"),
        ({"spec_verify_calls": 7000.5}, "line 9: expected a count, found 7000.5"),
        ({"generation_tokens": 3000}, "at least one token of each round"),
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
        (text + text, "line 4: expected lines of one server, found another start"),
        (re.sub("accept len.*?, accept rate.*?, ", "", text), "speculation is off"),
        (text.splitlines()[0] + "\n", "found 0 lines 'Decode batch'"),
        (text.replace("accept len: 2.50", "accept len: nan"), "line 3: expected #running-req"),
        (text.replace("accept len: 2.50", "accept len: 0.50"), "of at least 1"),
        (text.replace("accept len", "acceptance"), "as SGLang 0.5.23 writes it"),
    ):
        log.write_text(changed)
        assert says in refused(log)
