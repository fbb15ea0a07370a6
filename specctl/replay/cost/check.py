"""A cost model held against live rounds: recorded counts under the model, and a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specctl.policy import Chain, Policy, RootOnly, StaticTree
from specctl.replay.config import ProfileGrid
from specctl.replay.cost.model import CostModel, LiveCheck, Steps, TableCost, decider_of
from specctl.runtime.capture import GraphSettings
from specctl.runtime.compare import waited_us
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair
from specctl.runtime.requests import Observer, Request, RoundRecord
from specctl.runtime.words import words_of

NUM_TIMED, NUM_TIMED_QUICK = 3, 2
"""Timed runs of a policy, of which the median counts."""


@dataclass(frozen=True)
class Prediction:
    """Wall time of a run by part, us; parts as in `Metrics`, decisions counted as drafting."""

    prefill_us: float
    draft_us: float
    verify_us: float
    loop_us: float

    @property
    def wall_us(self) -> float:
        """All parts together."""
        return self.prefill_us + self.draft_us + self.verify_us + self.loop_us


def predict(
    model: CostModel, steps: Steps, prompt_tokens: Sequence[int], *, drafts: bool
) -> Prediction:
    """Time of a run: its prompts, then the sum over its rounds.

    Args:
        steps: every round of the batch. prompt_tokens: length of each prompt read.
        drafts: the drafter reads the prompts too.
    """
    counts = (steps.num_tokens, steps.batch_size, steps.context_tokens)
    verify = model.verify_us(*counts, steps.max_tokens)
    return Prediction(
        prefill_us=float(model.prefill_us(prompt_tokens, drafts=drafts).sum()),
        draft_us=float(model.draft_us(steps).sum()),
        verify_us=float(verify.sum()),
        loop_us=float(model.loop_us(steps).sum()),
    )


class StepRecorder:
    """An observer that keeps the counts that a cost model needs of each round."""

    def __init__(self) -> None:
        self._requests: list[set[str]] = []
        self._rows: list[tuple[float, ...]] = []
        self._most = 1

    def on_round(self, record: RoundRecord) -> None:
        sizes = (record.submitted >= 0).sum(1).tolist()
        self._most = max(self._most, *sizes)
        self._requests.append({request.request_id for request in record.requests})
        self._rows.append(
            (
                len(sizes),
                sum(sizes),
                float(record.context_tokens.double().mean()) - 1,  # the root is not cached yet
                int(record.offered_depth.max()),
                record.offered_width,
                int((record.path_length + 1).sum()) / len(sizes),
            )
        )

    def steps(self, decider: str = "") -> Steps:
        """The rounds so far; one whose requests all ended has nothing more to read.

        Args:
            decider: name of the policy that ran, see `model.decider_of`.
        """
        columns = np.array(self._rows, np.float64).T
        following = [*self._requests[1:], set[str]()]
        goes_on = [bool(a & b) for a, b in zip(self._requests, following, strict=True)]
        batch, tokens, context, levels, width, read = columns
        read = np.where(goes_on, read, 0)
        return Steps(batch, tokens, context, levels, width, read, self._most, decider=decider)


def checked_policies(pair: Pair, grid: ProfileGrid) -> list[Policy]:
    """Plain decoding, a chain, and the largest tree that the grid has times for."""
    plain = Policy(shape=RootOnly())
    most, width = grid.tokens[-1], grid.widths[-1]
    if pair.drafter is None or most < 2:
        return [plain]
    chain = Chain(num_draft_tokens=min(4, most - 1))
    size = min(StaticTree().num_tokens, most)
    depth, top_k = min(StaticTree().depth, size - 1), min(StaticTree().top_k, width)
    size = min(size, 1 + top_k + (depth - 1) * top_k**2)
    tree = StaticTree(depth=depth, top_k=top_k, num_tokens=size)
    return [plain, Policy(shape=chain), Policy(shape=tree)]


def num_runs(grid: ProfileGrid) -> int:
    """Runs of every policy that is checked: one to count, the others timed."""
    return 1 + (NUM_TIMED_QUICK if grid.quick else NUM_TIMED)


def check_live(
    pair: Pair,
    model: TableCost,
    grid: ProfileGrid,
    requests: Sequence[Request],
    *,
    policies: Sequence[Policy] = (),
    graphs: GraphSettings | None = None,
    on_run: Callable[[], object] = lambda: None,
) -> tuple[LiveCheck, ...]:
    """Decodes prompts one at a time, in turns, and compares the time with the model's.

    Only counts of a run that is not timed enter the prediction.

    Args:
        policies: checked beside plain decoding, a chain and a tree.
        graphs: as in `profile`.
        on_run: called after each run of a policy.
    """
    policies = [*checked_policies(pair, grid), *policies]

    def decode(policy: Policy, observer: Observer | None = None) -> tuple[float, float]:
        loop = DecodeLoop(
            pair.target.model,
            pair.drafter,
            policy,
            batch_size=1,
            max_text_tokens=max(len(r.prompt_ids) + r.max_new_tokens for r in requests),
            eos_ids=(),
            observer=observer,
            graphs=graphs,
        )
        started, waited = time.perf_counter(), waited_us() or 0.0
        for _ in loop.run(requests):
            pass
        if pair.target.model.device.type == "cuda":
            torch.cuda.synchronize()
        on_run()
        wall_us = 1e6 * (time.perf_counter() - started)
        return wall_us, min(((waited_us() or 0.0) - waited) / wall_us, 1.0)

    recorders = [StepRecorder() for _ in policies]
    for policy, recorder in zip(policies, recorders, strict=True):
        decode(policy, recorder)
    walls = [[decode(policy) for policy in policies] for _ in range(num_runs(grid) - 1)]
    lengths = [len(request.prompt_ids) for request in requests]
    return tuple(
        LiveCheck(
            policy=words_of(policy) or decider_of(policy),
            num_tokens=sum(request.max_new_tokens for request in requests),
            predicted_us=predict(
                model,
                recorder.steps(decider_of(policy)),
                lengths,
                drafts=not isinstance(policy.shape, RootOnly),
            ).wall_us,
            measured_us=statistics.median(wall_us for wall_us, _ in times),
            waited=round(statistics.median(waited for _, waited in times), 4),
        )
        for policy, recorder, times in zip(
            policies, recorders, zip(*walls, strict=True), strict=True
        )
    )
