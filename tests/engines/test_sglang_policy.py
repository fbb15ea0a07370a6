"""SGLang's own adaptive policy, loaded from its wheel, beside ours: step by step the same lengths.

SPECCTL_SGLANG_WHEEL=sglang-0.5.23-...whl pytest tests/engines/test_sglang_policy.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.replay.adaptive import AdaptiveSteps, initial_steps, read_slots
from tests.engines.sglang_wheel import adaptive_module, needs_wheel

pytestmark = needs_wheel


@pytest.fixture(scope="module")
def theirs() -> Any:
    """SGLang's module; nothing else of the package is loaded, nor needs a GPU."""
    with adaptive_module() as module:
        return module


def settings(draw: random.Random) -> dict[str, Any]:
    """A file that ours takes: one to three slots, common settings or each slot's own."""

    def some() -> dict[str, Any]:
        down, up = sorted(draw.uniform(-1, 1) for _ in range(2))
        every = {
            "ema_alpha": draw.choice([0.1, 0.2, 0.5, 1.0]),
            "update_interval": draw.randint(1, 4),
            "warmup_batches": draw.randint(0, 6),
            "ceiling_coeff": draw.choice([0, 0, 0.8, 1.5]),
            "down_hysteresis": down,
            "up_hysteresis": up,
        }
        return {name: value for name, value in every.items() if draw.random() < 0.7}

    found = some()
    # One hysteresis without the other would be weighed against a default that draws may contradict.
    found |= {"down_hysteresis": -0.25, "up_hysteresis": 0.0}
    for key in draw.sample([1, 2, 4, 8], draw.randint(1, 3)):
        slot = some()
        if not slot.keys() >= {"down_hysteresis", "up_hysteresis"}:
            slot.pop("down_hysteresis", None)
            slot.pop("up_hysteresis", None)
        steps = sorted(draw.sample(range(9), draw.randint(1, 5)))
        found[str(key)] = {"candidate_steps": steps, **slot}
    return found


@pytest.mark.parametrize("seed", range(40))
def test_lengths_are_those_of_sglangs_own_policy(theirs: Any, seed: int, tmp_path: Path) -> None:
    """Over 300 batches of random sizes that accept much, little or a mixture."""
    draw, path = random.Random(seed), tmp_path / "adaptive.json"
    path.write_text(json.dumps(settings(draw)))
    slots = read_slots(path)
    union = theirs.resolve_candidate_steps_from_config(str(path))
    first = initial_steps(slots)
    assert first == union[len(union) // 2]
    if seed % 2:  # from no drafts at all where a slot allows that, else from anywhere
        first = 0 if 0 in union else draw.choice(union)
    other, ours = theirs.AdaptiveSpeculativeParams(first, str(path)), AdaptiveSteps(slots, first)
    seen = set()
    for number in range(300):
        size, luck = draw.randint(1, 10), (0.05, 0.95, 0.5)[number // 50 % 3]
        length = ours.length_at(size)
        assert length == other.get_steps_for_batch(size), number
        accepted = [sum(draw.random() < luck for _ in range(length)) for _ in range(size)]
        other.on_verify_complete(accepted, size)
        ours.observe(np.array(accepted), size)
        seen.add(length)
    if any(len(slot.candidate_steps) > 3 for slot in slots.values()):
        assert len(seen) > 1, "a length that never moves shows nothing"


def test_sglangs_own_default_is_a_file_that_ours_takes(theirs: Any, tmp_path: Path) -> None:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(theirs.DEFAULT_ADAPTIVE_CONFIG))
    slots = read_slots(path)
    assert {size: slot.candidate_steps for size, slot in slots.items()} == {
        1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,),
    }  # fmt: skip
