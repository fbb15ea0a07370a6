"""The time that a policy's own decisions take beyond EAGLE-2's choice, which is part of a level's.

It depends on the kind of rule and the size of what it learned, and hardly on its settings: a tuned
threshold or beam decides by the same few operations. So a table has it by the name of
`model.decider_of`, and `tune` finds it for every setting that it tries.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specctl.errors import UsageError
from specctl.policy import Policy, StaticTree, StepCost, build_shape
from specctl.replay.cost.model import DeciderCost, decider_of
from specctl.replay.cost.probe import own_clock
from specctl.runtime.words import resolve_policies

if TYPE_CHECKING:
    from specctl.runtime.capture import GraphSettings
    from specctl.runtime.load import Pair
    from specctl.runtime.requests import Request, RoundRecord

ANY_COST = StepCost(token_counts=(1, 4096), step_us=(1.0, 2.0))
"""For budgets that weigh tokens by a table and bring none: to decide takes as long by any other."""
NUM_PASSES = 3
"""Turns of the policy and the trees that it is compared with."""


def deciding_policies(specs: Sequence[str], pair: Pair) -> list[Policy]:
    """The policies of these words, one for each rule.

    Raises:
        UsageError: one whose decisions are part of every level anyway, or a pair without a drafter.
    """
    words = ",".join(specs)
    named = resolve_policies(words, pair.fingerprint, step_cost=ANY_COST) if specs else []
    found = {decider_of(one.policy): one.policy for one in named}
    still = [one.label for one in named if not decider_of(one.policy)]
    if still or (named and pair.drafter is None):
        raise UsageError(
            "--policy: expected a policy that decides by its drafts, and a drafter that makes "
            f"them, found {f'{still[0]}, which decides nothing' if still else 'a target alone'}",
            hint="leave it out: the table has its time",
        )
    return list(found.values())


class _Rounds:
    """An observer that keeps levels and time of the decisions of rounds."""

    def __init__(self, *, is_captured: bool) -> None:
        self.is_captured, self.found = is_captured, list[tuple[int, float]]()

    def on_round(self, record: RoundRecord) -> None:
        times = record.times  # kernels decide among the drafter's passes
        us = times.policy_us + (times.draft_us if self.is_captured else 0.0)
        self.found.append((int(record.offered_depth.max()), us))


def time_decider(
    pair: Pair,
    policy: Policy,
    batch_sizes: Sequence[int],
    requests: Sequence[Request],
    *,
    graphs: GraphSettings | None = None,
    on_batch: Callable[[], object] = lambda: None,
) -> DeciderCost:
    """Decodes prompts under the policy and, in turns, under trees of equal width that nothing
    decides for: as deep as the policy may draft, and of one level.

    Args:
        requests: repeated until a batch is full.
        graphs: as in `profile`.
    """
    from specctl.runtime.decode import DecodeLoop

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
        observer = _Rounds(is_captured=graphs is not None)
        loop = DecodeLoop(
            pair.target.model,
            pair.drafter,
            of,
            batch_size=batch_size,
            max_text_tokens=max(len(r.prompt_ids) + r.max_new_tokens for r in decoded),
            eos_ids=(),
            observer=observer,
            graphs=graphs,
        )
        loop.now = own_clock(loop.target.device)
        for _ in loop.run(decoded):
            pass
        return observer.found

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
        on_batch()
    return DeciderCost(batch_sizes=tuple(batch_sizes), level_us=tuple(level_us))
