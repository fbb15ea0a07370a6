"""Static settings, chains and EAGLE-2 trees: their rounds everywhere, and the fastest of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Floats
from specctl.logs.tree_log import DenseLog, Support
from specctl.policy import Chain, Policy, Shape, StaticTree, build_shape
from specctl.replay.facts import MARKED_BELOW
from specctl.replay.ladder.tally import NUM_TALLIED, LoadClock, RunningSums, tally, tokens_per_us
from specctl.replay.outcomes import Outcomes
from specctl.replay.submissions import Submissions
from specctl.replay.summary import (
    Summary,
    static_accepted,
    static_verified,
    summaries,
    summarise,
)
from specctl.replay.walk import walk

WIDTHS = (1, 2, 4, 8)
"""Of the trees that are swept, with the log's own top_k."""
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Nodes verified, root counted."""
Static = Chain | StaticTree


def swept_widths(support: Support) -> tuple[int, ...]:
    """Tree widths whose growth the log contains."""
    narrower = WIDTHS if support.nested else (1,)
    return tuple(sorted({*(w for w in narrower if w < support.top_k), 1, support.top_k}))


def chains(support: Support) -> list[Static]:
    """Every chain that the log is deep enough for."""
    return [Chain(num_draft_tokens=length) for length in range(1, support.depth + 1)]


def trees(support: Support, num_kept: int) -> list[Static]:
    """Trees of every width above 1, which is the chain; of 1 only where the log holds no other.

    Args:
        num_kept: draft nodes at most.
    """
    widths = swept_widths(support)
    return [
        StaticTree(depth=levels, top_k=top_k, num_tokens=size)
        for top_k in widths[1:] or widths
        for levels in range(1, support.depth + 1)
        for size in SIZES
        if levels < size <= num_kept + 1
    ]


def spec_of(shape: Static) -> str:
    """The setting as `--policy` takes it."""
    fields = shape.model_dump(exclude={"kind"})
    return ":".join([shape.kind, *(f"{name}={value}" for name, value in fields.items())])


def width_of(shape: Shape) -> int:
    """Nodes that each level below the first evaluates."""
    return shape.top_k if isinstance(shape, StaticTree) else 1


def is_static(policy: Policy) -> bool:
    """Whether a summary of the log says all about it."""
    return isinstance(policy.shape, Static) and not policy.additions


def static_submissions(
    log: DenseLog, policies: Sequence[Policy], num_threads: int = 1
) -> Iterator[tuple[int, Submissions]]:
    """Places of the static ones of policies, with what they do at every position.

    Width by width, so that one summary is in memory at a time.
    """
    for options, same in _widths(policies):
        summary = summarise(log, **options, num_threads=num_threads)
        yield from _submitted(summary, policies, same)


def static_parts(
    log: DenseLog, policies: Sequence[Policy], num_threads: int = 1
) -> Iterator[tuple[int, Submissions]]:
    """The same some requests at a time: every part under every policy of a width, then the next."""
    for options, same in _widths(policies):
        for summary in summaries(log, **options, num_threads=num_threads):
            yield from _submitted(summary, policies, same)


def _widths(
    policies: Sequence[Policy],
) -> Iterator[tuple[dict[str, Any], dict[int, tuple[int, int]]]]:
    """Options of the summary of each width, and depth and size of its policies by place."""
    shapes: dict[int, tuple[int, int, int]] = {}
    for index, policy in enumerate(policies):
        if is_static(policy):
            rule = build_shape(policy.shape)
            shapes[index] = rule.top_k, rule.max_depth, rule.max_tokens
    for top_k in sorted({width for width, _, _ in shapes.values()}):
        same = {i: (depth, size) for i, (width, depth, size) in shapes.items() if width == top_k}
        yield {"top_k": top_k, "depth": max(depth for depth, _ in same.values())}, same


def _submitted(
    summary: Summary, policies: Sequence[Policy], same: dict[int, tuple[int, int]]
) -> Iterator[tuple[int, Submissions]]:
    """A round that lacks anything counts as open."""
    for index, (depth, size) in same.items():
        verified, missing = static_verified(summary, depth, size), summary.missing[:, depth - 1]
        outcomes = Outcomes.of(
            static_accepted(summary, depth, size),
            verified=verified,
            levels=depth,
            wanted=1 + (depth - 1) * summary.top_k,
            missing=missing,
            censored=missing,
        )
        most = int(np.max(verified))
        yield index, Submissions(policies[index], summary.positions, outcomes, most)


def tally_static(of: Submissions, clock: LoadClock) -> tuple[Floats, Outcomes]:
    """`tally` of a static setting, and the outcomes of its rounds."""
    rounds = of.outcomes.at(walk(of.positions, of.outcomes.accepted + 1))
    sums = tally(of.positions, of.outcomes, clock, level_width=width_of(of.policy.shape))
    return sums, rounds


def fastest(
    log: DenseLog, shapes: Sequence[Static], clock: LoadClock, on_setting: Callable[..., None]
) -> tuple[Static, float, int]:
    """The setting of the highest long-run rate, the earlier one of equals.

    Settings of which the log lacks an expansion in over 1% of their rounds do not compete.

    Returns:
        The setting, its tokens per us, and the number of settings that competed.
    """
    totals = [RunningSums(1, NUM_TALLIED) for _ in shapes]
    for index, of in static_parts(log, [Policy(shape=shape) for shape in shapes]):
        sums, rounds = tally_static(of, clock)
        totals[index].add(np.zeros(len(sums), np.int64), sums, rounds)
    rates: dict[int, float] = {}
    for index, total in enumerate(totals):
        if total.support >= MARKED_BELOW:
            rates[index] = float(tokens_per_us(total.sums[0]))
        on_setting()
    if not rates:
        raise UsageError(
            "static rungs of the ladder: expected a log that contains the growth of static "
            "trees, found expansions missing in over 1% of the rounds of every setting",
            hint="collect with --nested",
        )
    best = max(rates, key=rates.__getitem__)
    return shapes[best], rates[best], len(rates)
