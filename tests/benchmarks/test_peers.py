"""SpecDecode-Bench's speed-ups against a loop that steps through each request as its simulator."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.specdecode_bench import LENGTHS, read, speed_ups
from specctl.replay.cost.files import load_cost_model

CLOCK = Path("h100-llama-3.1-8b-eagle")
DEPTH = 6


def rows() -> list[dict[str, Any]]:
    """More requests than the simulator draws, in the published form. Rates differ, so that means
    of rates are not rates of sums."""
    rng, found = np.random.default_rng(7), []
    for _ in range(330):
        size, prompt = int(rng.integers(40, 120)), int(rng.integers(5, 900))
        accepted = rng.binomial(DEPTH, 0.1 + 0.7 * rng.random(), size)
        entries = 1 + np.minimum(accepted, np.maximum(size - 1 - np.arange(size), 0))
        entries[0] = 1
        found.append({"prompt_token_ids": [5] * prompt, "acc_eagle": {"acc_len": entries.tolist()}})
    return found


def forward_s(cached: int, batched: int) -> float:
    return cached * 3.92645679e-08 + batched * 2.10103129e-05 + 5.88590713e-03


def draft_s(cached: int, tokens: int) -> float:
    return cached * 2.37768493e-09 + tokens * 8.41429603e-07 + 2.13526175e-03


STEP_S = 1.20683946e-03


def plain_s(row: dict[str, Any], count: int) -> float:
    """Mean seconds of a copy."""
    prompt, total = len(row["prompt_token_ids"]), len(row["acc_eagle"]["acc_len"])
    spent = forward_s(0, count * prompt) + STEP_S
    for made in range(1, total):
        spent += forward_s(count * (prompt + made), count) + STEP_S
    return spent


def drafting_s(row: dict[str, Any], count: int, length: int | None) -> float:
    """The same; tokens that a copy accepts are cached before the next copy's draft is timed, and a
    finished copy frees its own."""
    prompt, entries = len(row["prompt_token_ids"]), row["acc_eagle"]["acc_len"]
    made, cached = [1] * count, count * (prompt + 1)
    spent = [forward_s(0, count * prompt) + STEP_S] * count
    while made[0] < len(entries):
        emits = entries[made[0] - 1]  # copies are alike
        tokens = emits if length is None else length + 1
        verify = forward_s(cached, count * tokens)
        for copy in range(count):
            spent[copy] += verify + draft_s(cached, tokens) + STEP_S
            made[copy] += min(emits, tokens)
            cached += min(emits, tokens)
            if made[copy] >= len(entries):
                cached -= made[copy] + prompt
    return sum(spent) / count


def simulated(requests: list[dict[str, Any]], count: int, length: int | None) -> float:
    """Mean tokens a second over that of plain decoding, of 300 requests as so many copies: after
    SpecDecode-Bench's published code (`simulator.py`, `predictor.py`). Without a length it is its
    oracle."""
    random.seed(42)
    chosen = random.sample(requests, k=300)
    sizes = [count * len(row["acc_eagle"]["acc_len"]) for row in chosen]
    pairs = list(zip(sizes, chosen, strict=True))
    ours = sum(size / drafting_s(row, count, length) for size, row in pairs)
    return ours / sum(size / plain_s(row, count) for size, row in pairs)


@pytest.mark.parametrize("batch_size", [1, 32])
def test_speed_ups_are_those_of_the_simulator(batch_size: int, tmp_path: Path) -> None:
    """It prints them to a hundredth."""
    path = tmp_path / "combined.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows()))
    found = read(path, "eagle")
    assert found.positions.num_requests == 300
    speeds = speed_ups(found, load_cost_model(CLOCK), batch_size)
    for length, ours in zip((*LENGTHS, None), speeds, strict=True):
        theirs = simulated(rows(), batch_size, length)
        assert ours.value == pytest.approx(theirs, abs=5e-4)
        assert abs(theirs - 1) > 0.01, "it would pass as plain decoding"
