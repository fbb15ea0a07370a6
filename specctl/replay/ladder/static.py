"""Static settings, chains and EAGLE-2 trees: their rounds everywhere, and the fastest of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

from specctl.errors import UsageError
from specctl.logs.positions import Bools
from specctl.logs.tree_log import DenseLog, Support
from specctl.policy import Chain, PerRequest, Policy, StaticTree
from specctl.replay.ladder.tally import Decided, LoadClock, tally
from specctl.replay.summary import Summary, static_accepted, static_verified, summarise
from specctl.replay.walk import walk
from specctl.results import MARKED_BELOW

WIDTHS = (1, 2, 4, 8)
"""Of the trees that are swept, with the log's own top_k."""
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Nodes verified, root counted."""


@dataclass(frozen=True)
class TunedStatic:
    """The fastest setting of a grid and its rate on the prompts that chose it."""

    shape: Chain | StaticTree
    tokens_per_us: float
    num_settings: int

    @property
    def spec(self) -> str:
        """As `--policy` takes it."""
        fields = self.shape.model_dump(exclude={"kind"})
        return ":".join([self.shape.kind, *(f"{name}={value}" for name, value in fields.items())])


def swept_widths(support: Support) -> tuple[int, ...]:
    """Tree widths whose growth the log contains."""
    if not support.nested:
        return tuple(sorted({1, support.top_k}))
    return tuple(sorted({*(w for w in WIDTHS if w < support.top_k), support.top_k}))


def tree_widths(support: Support) -> tuple[int, ...]:
    """Those above 1, which is the chain; 1 only where the log holds nothing else."""
    widths = swept_widths(support)
    return widths[1:] or widths


def chains(depth: int) -> list[Chain]:
    """Every chain that the log is deep enough for."""
    return [Chain(num_draft_tokens=length) for length in range(1, depth + 1)]


def trees(depth: int, top_k: int, num_kept: int) -> list[StaticTree]:
    """Trees of one width; sizes as `SIZES`, up to the nodes that a summary of `num_kept` knows."""
    return [
        StaticTree(depth=levels, top_k=top_k, num_tokens=size)
        for levels in range(1, depth + 1)
        for size in SIZES
        if levels < size <= num_kept + 1
    ]


def levels_and_size(shape: Chain | StaticTree) -> tuple[int, int]:
    """Levels drafted and nodes verified, root counted."""
    if isinstance(shape, Chain):
        return shape.num_draft_tokens, shape.num_draft_tokens + 1
    return shape.depth, shape.num_tokens


def decide_static(summary: Summary, shape: Chain | StaticTree) -> Decided:
    """The rounds of a static setting everywhere; `summary` is of its width."""
    depth, size = levels_and_size(shape)
    accepted = static_accepted(summary, depth, size)
    return Decided(accepted, static_verified(summary, depth, size), depth, summary.top_k)


@dataclass(frozen=True)
class StaticDecision:
    """The rounds of one static setting everywhere.

    Attributes:
        index: of the policy among those given.
        missing: `[R]` bool, the log lacks an expansion that it needs.
    """

    index: int
    policy: Policy
    summary: Summary
    decided: Decided
    missing: Bools


def is_static(policy: Policy) -> bool:
    """Whether a summary of the log says all about it."""
    return isinstance(policy.shape, Chain | StaticTree) and isinstance(policy.budget, PerRequest)


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
    shapes: list[tuple[int, Chain | StaticTree]] = [
        (index, cast("Chain | StaticTree", policy.shape))
        for index, policy in enumerate(policies)
        if is_static(policy)
    ]

    def width_of(indexed: tuple[int, Chain | StaticTree]) -> int:
        return indexed[1].top_k if isinstance(indexed[1], StaticTree) else 1

    for width, group in groupby(sorted(shapes, key=width_of), key=width_of):
        same = list(group)
        summary = summarise(
            log,
            top_k=width,
            depth=max(levels_and_size(shape)[0] for _, shape in same),
            num_threads=num_threads,
            on_positions=on_positions,
        )
        for index, shape in same:
            missing = summary.missing[:, levels_and_size(shape)[0] - 1]
            decided = decide_static(summary, shape)
            yield StaticDecision(index, policies[index], summary, decided, missing)


def fastest(
    candidates: Iterator[tuple[Summary, Chain | StaticTree]],
    clock: LoadClock,
    on_setting: Callable[..., None] = lambda: None,
) -> TunedStatic:
    """The setting of the highest long-run rate, the earlier one of equals.

    Settings of which the log lacks an expansion in over 1% of their rounds do not compete.
    """
    best, seen = None, 0
    for summary, shape in candidates:
        decided, depth = decide_static(summary, shape), levels_and_size(shape)[0]
        on_setting()
        visited = walk(summary.positions, decided.accepted + 1)
        if float(summary.missing[visited, depth - 1].mean()) > 1 - MARKED_BELOW:
            continue
        seen += 1
        rate = tally(summary.positions, decided, clock).tokens_per_us
        if best is None or rate > best[0]:
            best = rate, shape
    if best is None:
        raise UsageError(
            "static rungs of the ladder",
            expected="a log that contains the growth of static trees",
            found="expansions missing in over 1% of the rounds of every setting",
            fix="collect with --nested",
        )
    return TunedStatic(best[1], best[0], seen)
