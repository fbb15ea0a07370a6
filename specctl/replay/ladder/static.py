"""The static rungs: every chain and every EAGLE-2 tree of a grid, the fastest one kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specctl.errors import UsageError
from specctl.logs.tree_log import Support
from specctl.policy.records import Chain, StaticTree
from specctl.replay.ladder.tally import Decided, LoadClock, tally
from specctl.replay.summary import Summary, static_accepted, static_verified
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
    return Decided(accepted, static_verified(summary, depth, size), depth, summary.width)


def fastest(
    candidates: Iterator[tuple[Summary, Chain | StaticTree]],
    clock: LoadClock,
    on_setting: Callable[..., None] = lambda: None,
) -> TunedStatic:
    """The setting of the highest long-run rate, the earlier one of equals.

    Settings of which the log lacks an expansion in over 1% of their rounds do not compete.

    Raises:
        UsageError: the log supports none of them.
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
