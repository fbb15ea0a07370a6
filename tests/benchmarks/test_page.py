"""docs/systems.md is what its generator makes of systems.json, and says nothing that is not so."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.systems import published
from benchmarks.systems.page import OutdatedTextError, change, holds, order, page, span

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(name="result")
def stored_result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "systems.json").read_text("utf-8"))
    return found


def test_the_page_is_what_its_generator_makes_of_the_results(result: dict[str, Any]) -> None:
    assert (ROOT / "docs" / "systems.md").read_text("utf-8") == page(result, RESULTS)


def test_every_number_follows_the_results(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    row = next(row for row in changed["shapes"] if row["num_tokens"] == 16)
    row["tokens"] = {"value": 0.987, "low": 0.9, "high": 1.1, "by_fit": [0.987]}
    assert "+98.7 % [+90.0, +110.0]" in page(changed, RESULTS)


def test_a_conclusion_that_the_results_do_not_bear_out_is_refused(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    for row in changed["long"]:
        if row["stop"] == "AdaSD (paper)":
            row["cost_over_chain_5"] = {"value": 0.1, "low": 0.05, "high": 0.15}
    with pytest.raises(OutdatedTextError, match="the stop gains"):
        page(changed, RESULTS)
    assert holds(True, "so it is") == "so it is"


def figure(*by_fit: float) -> dict[str, Any]:
    mean = sum(by_fit) / len(by_fit)
    return {"value": mean, "low": mean, "high": mean, "by_fit": list(by_fit)}


def test_an_order_is_called_stable_only_where_every_fit_has_it() -> None:
    rows = [
        {"name": "b", "time": figure(-0.1, -0.3)},
        {"name": "a", "time": figure(-0.5, -0.4)},
        {"name": "control", "time": figure(-0.15)},
    ]
    said = order(rows, "name", "time", 2)
    assert said.startswith("least first: *a*, *b*, *control*; ")
    assert said.endswith("but for these: *b* before *control* in 1 of 2.")
    assert order(rows[1:], "name", "time", 2).endswith("in every one of the 2 fits.")


def test_numbers_in_words() -> None:
    assert change({"value": -0.1234, "low": -0.2, "high": 0.05}) == "-12.3 % [-20.0, +5.0]"
    assert change({"value": None, "low": None, "high": None}) == "-"
    assert span([-0.0769, -0.1623]) == "-16.2 to -7.7 %"


def test_published_figures_are_consistent_with_what_the_papers_say_of_them() -> None:
    """Sentences of the papers that follow from the tables which were copied."""
    tokens = published.changes(published.C2T_TOKENS)
    assert all(0.73 <= 1 + tokens[index] <= 0.80 for index in range(3))  # LLaMA-2: 75 to 80 %
    speeds = [ours for _, ours in published.ADASD_BOTH.values()]
    assert [min(speeds), max(speeds)] == pytest.approx([1.23, 1.49], abs=0.005)  # "23-49 %"
    load = published.changes(published.ECHO_HIGH_LOAD)
    assert load == pytest.approx([0.08, 0.144], abs=0.002)  # "8 %", "14.4 %"
    taus = [ours / base for base, ours in published.MARS_TAU.values()]
    assert all(1 < ratio < 1.4 for ratio in taus)
    assert all(math.isfinite(one) for one in published.changes(published.HETERO_CALLS))
