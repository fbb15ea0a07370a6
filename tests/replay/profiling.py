"""Profiles of a tiny pair by a clock that the test turns."""

from __future__ import annotations

from typing import Any

from benchmarks.predicted_time import StepRecorder
from specctl.policy import Policy
from specctl.runtime.capture import GraphSettings
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair
from tests.runtime.toy import toy_requests


class VirtualTime:
    """A clock that moves when told to, and a microsecond whenever it is read."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def __call__(self) -> float:
        self.now_us += 1.0
        return 1e-6 * self.now_us

    def charge(self, model: Any, us_per_token: float) -> None:
        """Every forward of a model takes so long, by its tokens."""
        inner = model.model.forward

        def forward(*args: Any, **options: Any) -> Any:
            self.now_us += us_per_token * options["input_ids"].numel()
            return inner(*args, **options)

        model.model.forward = forward


def run_live(
    pair: Pair, shape: Any, batch_size: int, graphs: GraphSettings | None = None
) -> tuple[StepRecorder, list[int], int]:
    """What a recorder saw, the lengths of the prompts, and the calls of all requests."""
    recorder, requests = StepRecorder(), toy_requests(5, max_new_tokens=9)
    loop = DecodeLoop(
        pair.target.model,
        pair.drafter,
        Policy(shape=shape),
        batch_size=batch_size,
        max_text_tokens=64,
        eos_ids=(),
        observer=recorder,
        graphs=graphs,
    )
    assert loop.round.is_static == (graphs is not None)
    done = list(loop.run(requests))
    return recorder, [len(r.prompt_ids) for r in requests], sum(c.metrics.calls for c in done)


OPTIONS = ("--device", "cpu", "--batch-sizes", "1", "--contexts", "8", "--tokens", "1,5")
QUICK = (*OPTIONS, "--widths", "1,2", "--quick")
