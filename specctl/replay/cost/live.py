"""Live rounds of a profile: the time of a policy's decisions, and a check of the fitted model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specctl.errors import UsageError
from specctl.policy import Chain, Policy, RootOnly, StaticTree, StepCost, build_shape
from specctl.progress import advance
from specctl.replay.config import ProfileGrid
from specctl.replay.cost.model import (
    CostModel,
    DeciderCost,
    LiveCheck,
    Steps,
    TableCost,
    decider_of,
)
from specctl.replay.cost.probe import MEASUREMENTS, Bench
from specctl.runtime.compare import waited_us
from specctl.runtime.load import Pair
from specctl.runtime.requests import Observer, Request, RoundRecord, RoundTimes
from specctl.runtime.words import NamedPolicy, resolve_policies, words_of

# ------------------------------------------------------------------------------ time of decisions

ANY_COST = StepCost(token_counts=(1, 4096), step_us=(1.0, 2.0))
"""For budgets without a table of their own; a decision takes as long with any table."""
NUM_PASSES = 3
"""Turns of the policy and of the trees that it is compared with."""


def deciding_policies(specs: Sequence[str], pair: Pair) -> list[NamedPolicy]:
    """The policies of these words, one for each rule.

    Raises:
        UsageError: a static policy, whose time the table holds anyway, or a pair without a drafter.
    """
    words = ",".join(specs)
    named = resolve_policies(words, pair.fingerprint, step_cost=ANY_COST) if specs else []
    static = [one.label for one in named if not decider_of(one.policy)]
    if static:
        raise UsageError(
            f"--policy {static[0]} decides nothing by its drafts", hint="the table has its time"
        )
    if named and pair.drafter is None:
        raise UsageError(
            "--policy needs a drafter, and this is a target alone", hint="leave it out"
        )
    return list({decider_of(one.policy): one for one in named}.values())


def time_decider(
    bench: Bench, named: NamedPolicy, batch_sizes: Sequence[int], requests: Sequence[Request]
) -> DeciderCost:
    """The time of a policy's decisions a level, less EAGLE-2's choice, which a level contains.

    It depends on the kind of rule and the size of its learned part, hardly on its settings; so a
    table holds it by the name of `decider_of`. Prompts are decoded in turns under the policy, under
    static trees of its width and largest depth, and under static trees of one level.

    Args:
        requests: repeated until a batch is full.
    """
    policy = named.policy
    rule = build_shape(policy.shape)
    width = max(rule.width, 1)
    most = min(rule.max_tokens, 1 + width + (rule.max_depth - 1) * width**2)
    deep = StaticTree(depth=rule.max_depth, top_k=width, num_tokens=max(most, rule.max_depth + 1))
    flat = StaticTree(depth=1, top_k=width, num_tokens=min(width + 1, deep.num_tokens))
    turns = (policy, Policy(shape=deep), Policy(shape=flat))

    def rounds(of: Policy, batch_size: int) -> list[tuple[int, float]]:
        again = -(-batch_size // len(requests))
        decoded = [
            replace(one, request_id=f"{number}-{one.request_id}")
            for number in range(again)
            for one in requests
        ][: max(batch_size, len(requests))]
        recorder = StepRecorder()
        list(bench.loop(of, decoded, batch_size, recorder).run(()))
        if bench.graphs is None:
            return [(levels, times.policy_us) for levels, times in recorder.times]
        # Kernels decide among the drafter's passes.
        return [(levels, times.policy_us + times.draft_us) for levels, times in recorder.times]

    level_us = []
    for batch_size in batch_sizes:
        found: list[list[tuple[int, float]]] = [[], [], []]
        for _ in range(NUM_PASSES):
            for kept, one in zip(found, turns, strict=True):
                kept += rounds(one, batch_size)
        ours, whole, once = found
        select_us = statistics.median(us for _, us in once)
        grow_us = 0.0
        if rule.max_depth > 1:
            grow_us = (statistics.median(us for _, us in whole) - select_us) / (rule.max_depth - 1)
        extra = [(us - select_us - (n - 1) * grow_us) / n for n, us in ours if n]
        level_us.append(round(max(statistics.median(extra), 0.0), 3) if extra else 0.0)
        advance(MEASUREMENTS)
    return DeciderCost(policy=named.spec, batch_sizes=tuple(batch_sizes), level_us=tuple(level_us))


# -------------------------------------------------------------------------------------- the check


def predicted_us(
    model: CostModel, steps: Steps, prompt_tokens: Sequence[int], *, drafts: bool
) -> float:
    """Wall time of a run: its prompts and all of its rounds.

    Args:
        drafts: the drafter reads the prompts too.
    """
    prompts_us = model.prefill_us(prompt_tokens, drafts=drafts)
    return float(prompts_us.sum() + model.round_us(steps).sum())


class StepRecorder:
    """An observer that keeps of each round the counts that a cost model needs, and its times."""

    def __init__(self) -> None:
        self.times: list[tuple[int, RoundTimes]] = []  # beside the number of levels
        self._requests: list[set[str]] = []
        self._rows: list[tuple[float, ...]] = []
        self._most = 1

    def on_round(self, record: RoundRecord) -> None:
        sizes = (record.submitted >= 0).sum(1).tolist()
        self._most = max(self._most, *sizes)
        levels = int(record.offered_depth.max())
        self.times.append((levels, record.times))
        self._requests.append({request.request_id for request in record.requests})
        self._rows.append(
            (
                len(sizes),
                sum(sizes),
                float(record.context_tokens.double().mean()) - 1,  # the root is not cached yet
                levels,
                record.offered_width,
                int((record.path_length + 1).sum()) / len(sizes),
            )
        )

    def steps(self, decider: str = "") -> Steps:
        """The rounds so far; after a round that ends all its requests nothing is read.

        Args:
            decider: of the policy that ran, see `model.decider_of`.
        """
        columns = np.array(self._rows, np.float64).T
        following = [*self._requests[1:], set[str]()]
        goes_on = [bool(a & b) for a, b in zip(self._requests, following, strict=True)]
        batch, tokens, context, levels, width, read = columns
        read = np.where(goes_on, read, 0)
        return Steps(batch, tokens, context, levels, width, read, self._most, decider=decider)


def checked_policies(pair: Pair, grid: ProfileGrid) -> list[Policy]:
    """Plain decoding, a chain, and the largest tree on the grid."""
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


def check_live(
    bench: Bench,
    model: TableCost,
    requests: Sequence[Request],
    policies: Sequence[Policy],
    num_timed: int,
) -> tuple[LiveCheck, ...]:
    """Decodes prompts in turns of the policies, and compares the time with the model's. The counts
    behind a prediction come from a run without timing.

    Args:
        num_timed: runs of each policy; the median counts.
    """

    def decode(policy: Policy, observer: Observer | None = None) -> tuple[float, float]:
        loop = bench.loop(policy, requests, 1, observer)
        started, waited = time.perf_counter(), waited_us() or 0.0
        list(loop.run(()))
        bench.wait()
        wall_us = 1e6 * (time.perf_counter() - started)
        advance(MEASUREMENTS)
        return wall_us, min(((waited_us() or 0.0) - waited) / wall_us, 1.0)

    recorders = [StepRecorder() for _ in policies]
    for policy, recorder in zip(policies, recorders, strict=True):
        decode(policy, recorder)
    walls = [[decode(policy) for policy in policies] for _ in range(num_timed)]
    lengths = [len(request.prompt_ids) for request in requests]
    found = []
    for policy, recorder, times in zip(policies, recorders, zip(*walls, strict=True), strict=True):
        steps, drafts = recorder.steps(decider_of(policy)), not isinstance(policy.shape, RootOnly)
        wall_us, waited = np.median(times, axis=0).tolist()
        check = LiveCheck(
            policy=words_of(policy) or decider_of(policy),
            num_tokens=sum(request.max_new_tokens for request in requests),
            predicted_us=predicted_us(model, steps, lengths, drafts=drafts),
            measured_us=wall_us,
            waited=round(waited, 4),
        )
        found.append(check)
    return tuple(found)
