"""SpecDecode-Bench's speed-ups against a loop that steps through each request as its simulator."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.specdecode_bench import LENGTHS, Acceptance, read, speed_ups
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


class Simulator:
    """SpecDecode-Bench's simulator after its published code (`simulator.py`, `predictor.py`): lists
    of requests, copies with counters of their own, seconds.

    Args:
        length: draft tokens; None is its oracle.
    """

    def __init__(self, length: int | None, batch_size: int) -> None:
        self.length, self.copies = length, range(batch_size)

    @staticmethod
    def forward(cached: int, batched: int) -> float:
        return cached * 3.92645679e-08 + batched * 2.10103129e-05 + 5.88590713e-03

    @staticmethod
    def draft(cached: int, tokens: int) -> float:
        return cached * 2.37768493e-09 + tokens * 8.41429603e-07 + 2.13526175e-03

    def plain(self, row: dict[str, Any]) -> float:
        """Mean seconds of a copy."""
        prompt, total = len(row["prompt_token_ids"]), len(row["acc_eagle"]["acc_len"])
        count = len(self.copies)
        spent = self.forward(0, count * prompt) + 1.20683946e-03
        for made in range(1, total):
            spent += self.forward(count * (prompt + made), count) + 1.20683946e-03
        return spent

    def drafting(self, row: dict[str, Any]) -> float:
        """The same; tokens that a copy accepts are cached before the next copy's draft is timed,
        and a finished copy frees its own."""
        prompt, entries = len(row["prompt_token_ids"]), row["acc_eagle"]["acc_len"]
        made, count = [1 for _ in self.copies], len(self.copies)
        prefill = self.forward(0, count * prompt) + 1.20683946e-03
        spent, cached = [prefill for _ in self.copies], count * (prompt + 1)
        while made[0] < len(entries):
            emits = entries[made[0] - 1]  # copies are alike
            tokens = emits if self.length is None else self.length + 1
            verify = self.forward(cached, count * tokens)
            for copy in self.copies:
                spent[copy] += verify + self.draft(cached, tokens) + 1.20683946e-03
                made[copy] += min(emits, tokens)
                cached += min(emits, tokens)
                if made[copy] >= len(entries):
                    cached -= made[copy] + prompt
        return sum(spent) / count

    def speed_up(self, requests: list[dict[str, Any]]) -> float:
        """Mean tokens a second over that of plain decoding, of 300 requests."""
        random.seed(42)
        chosen = random.sample(requests, k=300)
        sizes = [len(self.copies) * len(row["acc_eagle"]["acc_len"]) for row in chosen]
        ours, plain = (
            sum(size / run(row) for size, row in zip(sizes, chosen, strict=True))
            for run in (self.drafting, self.plain)
        )
        return ours / plain


def written(folder: Path, found: list[dict[str, Any]]) -> Acceptance:
    path = folder / "combined.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return read(path, "eagle")


@pytest.mark.parametrize("batch_size", [1, 32])
def test_speed_ups_are_those_of_the_simulator(batch_size: int, tmp_path: Path) -> None:
    """It prints them to a hundredth."""
    found = written(tmp_path, rows())
    assert found.positions.num_requests == 300
    speeds = speed_ups(found, load_cost_model(CLOCK), batch_size)
    for length, ours in zip((*LENGTHS, None), speeds, strict=True):
        theirs = Simulator(length, batch_size).speed_up(rows())
        assert ours.value == pytest.approx(theirs, abs=5e-4)
        assert abs(theirs - 1) > 0.01, "it would pass as plain decoding"
