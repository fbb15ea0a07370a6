"""SGLang's adaptive lengths: chains whose length follows an average of what batches accepted.

The file of `--speculative-adaptive-config` holds one slot a range of batch sizes; its settings and
their effect are those of SGLang 0.5.23 (`speculative/adaptive_spec_params.py`), to which
`tests/engines/test_sglang_policy.py` compares every step. SGLang checks `candidate_steps` alone.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from specctl.errors import InputError, reason_of
from specctl.logs.positions import Longs
from specctl.policy import Chain, RootOnly
from specctl.policy.family import Length
from specctl.records import PositiveInt, Record, describe_violation, increasing, require

ADAPTIVE = "adaptive"
"""The label of such lengths among policies."""
Hysteresis = Annotated[float, Field(ge=-1, le=1)]


class AdaptiveSlot(Record):
    """The choice of a length at batch sizes from one key to the next; one candidate is fixed.

    Attributes:
        candidate_steps: draft tokens to choose from, ascending.
        ema_alpha: weight of the newest batch in the average of accepted draft tokens.
        warmup_batches, update_interval: batches before the first change, and between two.
        down_hysteresis, up_hysteresis: draft tokens added to the thresholds, half a token below a
            candidate, at which the length falls and rises; a higher one down would let it swing.
        ceiling_coeff: caps the length at so many times the average; 0 does not.
    """

    candidate_steps: Annotated[tuple[Length, ...], Field(min_length=1)]
    ema_alpha: Annotated[float, Field(gt=0, le=1)] = 0.2
    update_interval: PositiveInt = 5
    warmup_batches: Annotated[int, Field(ge=0)] = 10
    down_hysteresis: Hysteresis = -0.25
    up_hysteresis: Hysteresis = 0.0
    ceiling_coeff: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        require(increasing(self.candidate_steps), "candidate_steps must be strictly increasing")
        require(self.down_hysteresis <= self.up_hysteresis, "down_hysteresis above up_hysteresis")
        return self


Slots = Mapping[int, AdaptiveSlot]
"""By the batch size from which a slot holds; smaller batches take the first one."""


def parse_slots(text: str) -> dict[int, AdaptiveSlot]:
    """The slots of SGLang's file: keys that are numbers, all others being defaults of every slot.

    Raises:
        ValueError: another file, or a setting out of its range, also where SGLang would take it.
    """
    given = json.loads(text)
    require(isinstance(given, dict), "no JSON object")
    common = {key: value for key, value in given.items() if not key.isdigit()}
    keys = sorted(filter(str.isdigit, given), key=int)
    require(bool(keys), "no key that is a batch size")
    slots = {}
    for key in keys:
        require(str(int(key)) == key != "0", f"key {key!r} is no batch size in plain digits")
        require(isinstance(given[key], dict), f"batch size {key} has no settings")
        one = json.dumps(common | given[key])
        slots[int(key)] = AdaptiveSlot.model_validate_json(one)
    return slots


def read_slots(path: Path) -> dict[int, AdaptiveSlot]:
    """The slots of a file, see `parse_slots`.

    Raises:
        InputError: it is none, or cannot be read.
    """
    try:
        return parse_slots(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        found = reason_of(error)
        if isinstance(error, ValidationError):
            found = describe_violation(error)
        raise InputError(
            f"adaptive configuration {path}",
            expected="SGLang's file of --speculative-adaptive-config, a slot a batch size",
            found=found,
            fix="correct that",
        ) from error


def longest_chain(slots: Slots) -> Chain | RootOnly:
    """The chain of the largest candidate."""
    longest = max(slot.candidate_steps[-1] for slot in slots.values())
    return Chain(num_draft_tokens=longest) if longest else RootOnly()


def initial_steps(slots: Slots) -> int:
    """SGLang's own choice without `--speculative-num-steps`: the middle of all candidates."""
    steps = sorted({step for slot in slots.values() for step in slot.candidate_steps})
    return steps[len(steps) // 2]


class AdaptiveSteps:
    """The state of a run: of every slot its length, the average of accepted drafts, batches seen.

    Args:
        slots: as in the file.
        initial: the length to begin with, in slots that have it; others take their own middle.
    """

    def __init__(self, slots: Slots, initial: int | None = None) -> None:
        first = initial_steps(slots) if initial is None else initial
        self._starts = sorted(slots)
        self._slots = {start: _SlotState(slot, first) for start, slot in slots.items()}

    def _of(self, batch_size: int) -> _SlotState:
        place = bisect_right(self._starts, batch_size) - 1
        return self._slots[self._starts[max(place, 0)]]

    def length_at(self, batch_size: int) -> int:
        """Draft tokens of the next round of so many requests."""
        return self._of(batch_size).length

    def observe(self, accepted: Longs, batch_size: int) -> None:
        """Learns from a round: `[B]` draft tokens accepted."""
        self._of(batch_size).observe(accepted)


class _SlotState:
    def __init__(self, slot: AdaptiveSlot, initial: int) -> None:
        self.slot, steps = slot, slot.candidate_steps
        self.length = initial if initial in steps else steps[len(steps) // 2]
        self.mean = float(self.length - 1)
        self.num_batches = 0

    def observe(self, accepted: Longs) -> None:
        slot = self.slot
        if self.length > 0:
            newest = float(np.sum(accepted)) / len(accepted)
            self.mean = (1 - slot.ema_alpha) * self.mean + slot.ema_alpha * newest
        self.num_batches += 1
        since = self.num_batches - slot.warmup_batches
        if since > 0 and since % slot.update_interval == 0:
            self.length = self._next_length()

    def _next_length(self) -> int:
        slot, steps = self.slot, self.slot.candidate_steps
        place = old = steps.index(self.length)
        last = len(steps) - 1
        if self.length == 0:  # nothing is accepted without drafts: try the next candidate
            found = steps[min(place + 1, last)]
            if found > 0 and self.mean < 0:
                self.mean = float(found - 1)
            return found
        # Half a token below the next shorter candidate; above 0, which no mean falls below.
        while place > 0 and self.mean <= abs(steps[place - 1] - 0.5) + slot.down_hysteresis:
            place -= 1
        if place == old:
            while place < last and self.mean > steps[place] - 0.5 + slot.up_hysteresis:
                place += 1
        if slot.ceiling_coeff > 0 and steps[place] <= self.length:  # never blocks a rise
            ceiling = max(1, math.ceil(self.mean * slot.ceiling_coeff))
            while place > 0 and steps[place] > ceiling:
                place -= 1
        return steps[place]
