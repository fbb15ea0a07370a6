"""Static settings, chains and EAGLE-2 trees: their rounds everywhere, and the fastest of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from specctl.errors import UsageError
from specctl.logs.positions import Bools
from specctl.logs.tree_log import DenseLog, Support
from specctl.policy import Chain, PerRequest, Policy, StaticTree
from specctl.replay.ladder.tally import Decided, LoadClock, tally, tokens_per_us
from specctl.replay.summary import Summary, static_accepted, static_verified, summarise
from specctl.replay.walk import walk
from specctl.results import MARKED_BELOW

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


def _levels_and_size(shape: Static) -> tuple[int, int]:
    """Levels drafted and nodes verified, root counted."""
    if isinstance(shape, Chain):
        return shape.num_draft_tokens, shape.num_draft_tokens + 1
    return shape.depth, shape.num_tokens


@dataclass(frozen=True)
class StaticDecision:
    """The rounds of one static setting everywhere.

    Attributes:
        index: of the policy among those given.
        missing: `[R]` bool, the log lacks an expansion that it needs.
    """

    index: int
    summary: Summary
    decided: Decided
    missing: Bools

    @property
    def support(self) -> float:
        """The share of its rounds for which the log holds all that it needs."""
        visited = walk(self.summary.positions, self.decided.accepted + 1)
        return 1 - float(self.missing[visited].mean())


def is_static(policy: Policy) -> bool:
    """Whether a summary of the log says all about it."""
    return isinstance(policy.shape, Static) and isinstance(policy.budget, PerRequest)


def static_decisions(
    log: DenseLog,
    policies: Sequence[Policy],
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
) -> Iterator[StaticDecision]:
    """Decisions of the static ones of policies, width by width; one summary is in memory at a time.

    Args:
        on_positions: called with the positions of each part, once a width.
    """
    shapes = {
        index: policy.shape
        for index, policy in enumerate(policies)
        if is_static(policy) and isinstance(policy.shape, Static)
    }

    def width_of(index: int) -> int:
        shape = shapes[index]
        return 1 if isinstance(shape, Chain) else shape.top_k

    for top_k, group in groupby(sorted(shapes, key=width_of), key=width_of):
        same = {index: _levels_and_size(shapes[index]) for index in group}
        summary = summarise(
            log,
            top_k=top_k,
            depth=max(levels for levels, _ in same.values()),
            num_threads=num_threads,
            on_positions=on_positions,
        )
        for index, (levels, size) in same.items():
            accepted = static_accepted(summary, levels, size)
            decided = Decided(accepted, static_verified(summary, levels, size), levels, top_k)
            yield StaticDecision(index, summary, decided, summary.missing[:, levels - 1])


def fastest(
    log: DenseLog, shapes: Sequence[Static], clock: LoadClock, on_setting: Callable[..., None]
) -> tuple[Static, float, int]:
    """The setting of the highest long-run rate, the earlier one of equals.

    Settings of which the log lacks an expansion in over 1% of their rounds do not compete.

    Returns:
        The setting, its tokens per us, and the number of settings that competed.
    """
    rates: dict[int, float] = {}
    for one in static_decisions(log, [Policy(shape=shape) for shape in shapes]):
        if one.support >= MARKED_BELOW:
            sums = tally(one.summary.positions, one.decided, clock).sum(0)
            rates[one.index] = float(tokens_per_us(sums))
        on_setting()
    if not rates:
        raise UsageError(
            "static rungs of the ladder",
            expected="a log that contains the growth of static trees",
            found="expansions missing in over 1% of the rounds of every setting",
            fix="collect with --nested",
        )
    best = max(rates, key=rates.__getitem__)
    return shapes[best], rates[best], len(rates)
