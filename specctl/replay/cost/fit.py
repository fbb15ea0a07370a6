"""From samples to a grid: medians, spread, monotone in tokens and context, error held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from specctl.errors import InvariantError
from specctl.replay.cost.grid import Floats, read_grid
from specctl.replay.cost.records import Grid, HeldOut

Point = tuple[int, int, int]
"""Batch size, context, size."""


@dataclass
class Samples:
    """Times of one part by the point they were taken at, us."""

    by_point: dict[Point, list[float]] = field(default_factory=dict)

    def add(self, point: Point, us: float) -> None:
        self.by_point.setdefault(point, []).append(us)

    def at(self, sizes: Sequence[int]) -> Samples:
        """The samples of some sizes, e.g. of those to fit, or of those held out."""
        return Samples({p: times for p, times in self.by_point.items() if p[2] in sizes})


def fit_grid(samples: Samples) -> Grid:
    """A grid over the samples' points, which must form a full one.

    Medians, then isotonic regression: along sizes at the first context, and along sizes of what
    each further context adds, which must not be negative. So times rise with tokens and with
    context, and what a cached token costs rises with the tokens that attend to it; that keeps
    every extrapolation sorted too.
    """
    axes = [sorted(set(axis)) for axis in zip(*samples.by_point, strict=True)]
    medians = _cube(samples.by_point, axes, np.median)
    spreads = _cube(samples.by_point, axes, _iqr)
    return Grid(
        batch_sizes=tuple(axes[0]),
        context_tokens=tuple(axes[1]),
        sizes=tuple(axes[2]),
        us=_tuples(np.stack([monotone(plane) for plane in medians])),
        iqr_us=_tuples(spreads),
    )


def monotone(plane: Floats) -> Floats:
    """`[C, S]` made non-decreasing along both axes, increments along C sorted along S too."""
    rows = [isotonic(plane[0])]
    for before, after in pairwise(plane):
        rows.append(rows[-1] + np.maximum(isotonic(after - before), 0.0))
    return np.maximum.accumulate(np.stack(rows), 1)  # sums may fall by a last digit


def isotonic(values: Floats) -> Floats:
    """The non-decreasing sequence nearest in squares.

    By the max-min formula (Robertson, Wright and Dykstra, 1988): value i is the largest, over
    stretches that start by i, of the smallest mean that such a stretch has when it ends at i or
    later. A dozen values at most; scikit-learn is not there where serving is timed.
    """
    size = len(values)
    means = np.full((size, size), np.inf)
    for start in range(size):
        for end in range(start, size):
            means[start, end] = values[start : end + 1].mean()
    return np.array([means[: i + 1, i:].min(1).max() for i in range(size)])


def held_out_error(grid: Grid, samples: Samples) -> HeldOut:
    """Relative error of a grid at points, one or more, that it was not fitted on."""
    batch, context, sizes = (np.array(axis) for axis in zip(*samples.by_point, strict=True))
    measured = np.array([np.median(times) for times in samples.by_point.values()])
    error = np.abs(read_grid(grid, sizes, batch, context) - measured) / measured
    return HeldOut(num_points=len(error), mape=float(error.mean()), worst=float(error.max()))


def _iqr(times: Sequence[float]) -> float:
    low, high = np.percentile(times, (25, 75))
    return float(high - low)


def _cube(by_point: Mapping[Point, list[float]], axes: list[list[int]], of: Any) -> Floats:
    cube = np.empty([len(axis) for axis in axes])
    if len(by_point) != cube.size:
        raise InvariantError(
            "grid of timings",
            expected=f"{cube.size} points",
            found=f"{len(by_point)}",
            fix="report this grid",
        )
    for point, times in by_point.items():
        place = tuple(axis.index(value) for axis, value in zip(axes, point, strict=True))
        cube[place] = of(times)
    return cube


def _tuples(cube: Floats) -> Any:
    """Nested tuples of plain floats, to a tenth of a nanosecond."""
    return tuple(
        tuple(tuple(round(float(value), 4) for value in row) for row in plane) for plane in cube
    )
