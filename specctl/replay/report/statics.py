"""The Pareto front of static settings: verified tokens per output token against τ.

Counts only, so it holds on any hardware: what a verified token costs is the cost model's question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specctl.logs.positions import Floats, Longs
from specctl.logs.tree_log import DenseLog, Support
from specctl.replay.summary import Summary, static_accepted, static_verified, summarise
from specctl.replay.walk import walk
from specctl.results import MARKED_BELOW
from specctl.stats import Interval, Resamples, sums_by

TOP_KS = (1, 2, 4, 8, 10)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 11)
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Nodes submitted, root counted."""
GROUP_POSITIONS = 1 << 15
"""Positions summarised together, about a kilobyte each."""
COLUMNS = ("calls", "accepted", "tokens", "verified", "missing")


@dataclass(frozen=True)
class StaticPoint:
    """One static setting over the whole log.

    Attributes:
        support: share of its rounds in which the log holds every expansion that it asked for.
        verified_per_token: verified tokens per output token. tau: tokens per call.
        on_front: no supported setting verifies as little with a larger τ.
    """

    top_k: int
    depth: int
    num_tokens: int
    calls: int
    support: float
    verified_per_token: Interval
    tau: Interval
    on_front: bool

    @property
    def label(self) -> str:
        """As a policy is written on the command line."""
        if self.top_k == 1:
            return f"chain:num_draft_tokens={self.depth}"
        return f"eagle2:depth={self.depth}:top_k={self.top_k}:num_tokens={self.num_tokens}"

    @property
    def is_supported(self) -> bool:
        """Whether its figures may stand unmarked."""
        return self.support >= MARKED_BELOW


Setting = tuple[int, int, int]
"""top_k, depth, num_tokens."""


def settings_of(support: Support) -> tuple[Setting, ...]:
    """The grid, within the log: every chain, and trees that fill neither less nor more than they
    can hold."""
    depths = [d for d in DEPTHS if d <= support.depth]
    chains = [(1, d, d + 1) for d in depths]
    trees = [
        (k, d, size)
        for k in TOP_KS[1:]
        for d in depths
        for size in SIZES
        if k <= support.top_k and d < size <= 1 + k + (d - 1) * k * k
    ]
    return (*chains, *trees)


def sweep(
    log: DenseLog,
    resamples: Resamples,
    prompt_ids: Sequence[str],
    on_positions: Callable[[int], None] = lambda _: None,
) -> list[StaticPoint]:
    """Every setting of the grid over every request.

    Args:
        prompt_ids: in the order of the resamples.
        on_positions: called with the positions of each part, once a top_k.
    """
    settings = settings_of(log.support)
    sums = np.zeros((len(settings), len(prompt_ids), len(COLUMNS)))
    place = {name: code for code, name in enumerate(prompt_ids)}
    for group in _groups(log):
        for top_k in sorted({setting[0] for setting in settings}):
            summary = _summary(group, settings, top_k)
            _add(sums, settings, summary, place)
            on_positions(summary.positions.num_rows)
    points = [_point(s, sums[i], resamples) for i, s in enumerate(settings)]
    front = front_of(points)
    return [replace(point, on_front=index in front) for index, point in enumerate(points)]


def _groups(log: DenseLog) -> Iterator[DenseLog]:
    """The log in parts of whole commits, about `GROUP_POSITIONS` each."""
    import pyarrow.parquet as pq

    held: list[dict[str, Path]] = []
    num_rows = 0
    for files in log.files:
        held.append(files)
        num_rows += pq.read_metadata(files.rounds).num_rows
        if num_rows >= GROUP_POSITIONS:
            yield replace(log, files=tuple(held))
            held, num_rows = [], 0
    if held:
        yield replace(log, files=tuple(held))


def _summary(log: DenseLog, settings: Sequence[Setting], top_k: int) -> Summary:
    mine = [setting for setting in settings if setting[0] == top_k]
    depth, size = max(s[1] for s in mine), max(s[2] for s in mine)
    return summarise(log, top_k=top_k, depth=depth, num_kept=size - 1)


def _add(
    sums: Floats, settings: Sequence[Setting], summary: Summary, place: dict[str, int]
) -> None:
    """Adds what the rounds of each prompt count, in the order of `COLUMNS`."""
    codes = np.array([place[name] for name in summary.positions.prompt_ids])
    prompt = codes[summary.positions.prompt][summary.positions.request]
    for index, (top_k, depth, num_tokens) in enumerate(settings):
        if top_k == summary.top_k:
            rows, values = _rounds(summary, depth, num_tokens)
            sums[index] += sums_by(prompt[rows], sums.shape[1], values)


def _rounds(summary: Summary, depth: int, num_tokens: int) -> tuple[Longs, Floats]:
    """The positions where the setting's rounds start, and their `COLUMNS`."""
    accepted = static_accepted(summary, depth, num_tokens)
    rows = np.flatnonzero(walk(summary.positions, accepted + 1))
    columns = {
        "calls": np.ones(len(rows)),
        "accepted": accepted[rows],
        "tokens": np.minimum(accepted + 1, summary.positions.remaining)[rows],
        "verified": static_verified(summary, depth, num_tokens)[rows],
        "missing": summary.missing[rows, depth - 1],
    }
    return rows, np.stack([columns[name] for name in COLUMNS], 1).astype(np.float64)


def _point(setting: Setting, sums: Floats, resamples: Resamples) -> StaticPoint:
    calls, _, _, _, missing = sums.sum(0)
    return StaticPoint(
        *setting,
        calls=int(calls),
        support=float(1 - missing / calls),
        verified_per_token=resamples.interval(sums, lambda s: s[..., 3] / s[..., 2]),
        tau=resamples.interval(sums, lambda s: 1 + s[..., 1] / s[..., 0]),
        on_front=False,
    )


def front_of(points: Sequence[StaticPoint]) -> set[int]:
    """Indices of the supported settings that no other beats in both figures."""
    order = sorted(
        (index for index, point in enumerate(points) if point.is_supported),
        key=lambda i: (points[i].verified_per_token.value, -points[i].tau.value),
    )
    front, best = set(), -np.inf
    for index in order:
        if points[index].tau.value > best:
            front.add(index)
            best = points[index].tau.value
    return front
