"""Static settings at every position, from summaries: one pass over the log for each width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from specctl.logs.positions import Bools
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy
from specctl.policy.records import Chain, StaticTree
from specctl.replay.ladder.static import decide_static, levels_and_size
from specctl.replay.ladder.tally import Decided
from specctl.replay.summary import Summary, summarise

NUM_KEPT = 1
"""Nodes of the order that a summary keeps: static settings only ask for ranks on the path."""


@dataclass(frozen=True)
class StaticDecision:
    """What one static setting does everywhere.

    Attributes:
        index: of the policy among those given.
        missing: `[R]` bool, the log lacks an expansion that it asked for.
    """

    index: int
    policy: Policy
    summary: Summary
    decided: Decided
    missing: Bools


def static_decisions(
    log: DenseLog, policies: Sequence[Policy], num_threads: int
) -> Iterator[StaticDecision]:
    """Decisions of all policies, width by width; one summary is in memory at a time."""
    order = sorted(range(len(policies)), key=lambda index: _top_k(policies[index]))
    for top_k, indices in groupby(order, key=lambda index: _top_k(policies[index])):
        same = list(indices)
        depth = max(levels_and_size(_shape(policies[index]))[0] for index in same)
        summary = summarise(
            log, top_k=top_k, depth=depth, num_kept=NUM_KEPT, num_threads=num_threads
        )
        for index in same:
            yield _decision(index, policies[index], summary)


def _decision(index: int, policy: Policy, summary: Summary) -> StaticDecision:
    depth, _ = levels_and_size(_shape(policy))
    decided = decide_static(summary, _shape(policy))
    return StaticDecision(index, policy, summary, decided, summary.missing[:, depth - 1])


def _shape(policy: Policy) -> Chain | StaticTree:
    assert isinstance(policy.shape, Chain | StaticTree), "the caller picks static policies"
    return policy.shape


def _top_k(policy: Policy) -> int:
    shape = _shape(policy)
    return shape.top_k if isinstance(shape, StaticTree) else 1
