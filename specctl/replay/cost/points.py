"""Where a pair is measured: the points of a profile, and the ones that are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise

from specctl.errors import UsageError
from specctl.policy.base import MAX_TOKENS, MAX_TOP_K
from specctl.replay.cost.graphed import WARM_UPS
from specctl.replay.cost.probe import PROBE_DEPTH, TreeShape, tree_capacity
from specctl.runtime.load import Pair

MAX_AXIS_VALUE = 1 << 20
"""Beyond any context, batch or tree: a larger number is a slip of the keyboard."""
GRAPH_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Sizes whose totals are tiers of captured rounds in every batch of a power of two requests."""
GRAPH_READS = (TreeShape(width=1, num_tokens=2, depth=1), TreeShape(width=1, num_tokens=9, depth=8))
"""A captured round reads as many tokens as its tree is deep and one more: near and far points."""
NUM_LOOP_STEPS = 4
"""Rounds that the loop of captured rounds is timed at, at least, in one pass."""


@dataclass(frozen=True)
class ProfileGrid:
    """Points of a profile; sizes count per request.

    Attributes:
        batch_sizes: requests a round. context_tokens: text before the root.
        tokens: verified, 1 first. widths: nodes a level, 1 first. read: tokens that the drafter
            reads back after a round. prompt_tokens: lengths of prompts.
        num_passes: over the whole grid. Many passes of few rounds: drift hits every point alike,
            and a burst of other work on the machine only some samples of each.
        num_rounds: timed at a point in one pass. loop_tokens: emitted in each run of the loop.
        capture_limit_tokens: see `records.TableCost`.
    """

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    context_tokens: tuple[int, ...] = (64, 256)
    tokens: tuple[int, ...] = (1, 2, 5, 8, 16, 32, 64)
    widths: tuple[int, ...] = (1, 4, 10)
    read: tuple[int, ...] = (1, 2, 5)
    prompt_tokens: tuple[int, ...] = (16, 64, 256)
    num_passes: int = 5
    num_rounds: int = 2
    loop_tokens: int = 16
    capture_limit_tokens: int = 0

    @property
    def held_tokens(self) -> tuple[int, ...]:
        """Sizes that are measured but not fitted."""
        return held_between(self.tokens)

    @property
    def held_widths(self) -> tuple[int, ...]:
        return held_between(self.widths)

    @property
    def held_prompts(self) -> tuple[int, ...]:
        return held_between(self.prompt_tokens)

    @property
    def num_steps(self) -> int:
        """Measurements, each of which moves the progress bar by one."""
        points = len(self.batch_sizes) * (len(self.context_tokens) + 1)
        return self.num_passes * (points + len(self.prompt_tokens + self.held_prompts))

    def for_graphs(self) -> ProfileGrid:
        """The same with texts long enough to warm up, capture and time the loop's rounds."""
        least = (WARM_UPS + NUM_LOOP_STEPS) * (PROBE_DEPTH + 1) + 1
        return replace(self, loop_tokens=max(self.loop_tokens, least))

    def quick(self) -> ProfileGrid:
        """One pass instead of several: the same points, medians of fewer rounds."""
        return replace(self, num_passes=1, num_rounds=3)


def held_between(axis: Sequence[int]) -> tuple[int, ...]:
    """Midpoints of every second gap of an axis, from the top, where a whole number fits."""
    gaps = list(pairwise(axis))[::-1][::2]
    return tuple(sorted((low + high) // 2 for low, high in gaps if high - low > 1))


def parse_axis(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from a comma-separated list, strictly increasing, 1 or more.

    Raises:
        UsageError: anything else, naming the option.
    """
    words = [word.strip() for word in text.split(",")]
    values = tuple(int(word) for word in words if word.isascii() and word.isdigit())
    is_sorted = all(low < high for low, high in pairwise((0, *values)))
    if len(values) < len(words) or not is_sorted or values[-1] > MAX_AXIS_VALUE:
        raise UsageError(
            option,
            expected=f"increasing whole numbers, 1 to {MAX_AXIS_VALUE}, separated by commas",
            found=repr(text),
            fix="correct the list",
        )
    return values


def check_grid(pair: Pair, grid: ProfileGrid) -> None:
    """Refuses a grid beyond the model's context, or trees beyond the probe's.

    Raises:
        UsageError: naming the option.
    """
    largest, widest = grid.tokens[-1], grid.widths[-1]
    room = pair.target.model.context_tokens - largest
    most = min(tree_capacity(min(widest, MAX_TOP_K)), MAX_TOKENS)
    longest = max(grid.context_tokens[-1], grid.prompt_tokens[-1] + grid.loop_tokens)
    for option, holds, law, found in (
        ("--batch-sizes", grid.batch_sizes[0] == 1, "1 first", grid.batch_sizes),
        ("--tokens", grid.tokens[0] == 1, "1 first, a plain round", grid.tokens),
        ("--widths", grid.widths[0] == 1, "1 first, a chain", grid.widths),
        ("--widths", widest <= MAX_TOP_K, f"at most {MAX_TOP_K}", widest),
        ("--tokens", largest <= most, f"at most {most} at these widths", largest),
        ("--contexts", longest <= room, f"at most {room}, the model's room", longest),
    ):
        if not holds:
            raise UsageError(option, expected=law, found=str(found), fix="change it")


def tree_shapes(tokens: Sequence[int], widths: Sequence[int]) -> list[TreeShape]:
    """Trees that meet every size and every width, the sizes dealt to the widths in turn."""
    turn = cycle(sorted(widths))
    shapes = [TreeShape(_next_fitting(turn, size), size) for size in sorted(tokens) if size > 1]
    return shapes + [TreeShape(width, PROBE_DEPTH + 1) for width in sorted(widths)]


def _next_fitting(turn: Iterator[int], size: int) -> int:
    """The next width in turn whose tree can hold `size` nodes."""
    return next(width for width in turn if tree_capacity(width) >= size)
