"""Reading a grid of timings between and beyond its points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specctl.errors import UsageError
from specctl.replay.cost.records import Grid

Floats = NDArray[np.float64]


def read_grid(
    grid: Grid, sizes: ArrayLike, batch_sizes: ArrayLike, context_tokens: ArrayLike
) -> Floats:
    """Times at points of `[batch, context, size]`, multilinear between measured ones.

    Below an axis' first point the time there holds. Beyond the last context and size it goes on
    along the line through the middle and the last point (a single noisy last step must not set
    the slope). A larger batch than any measured is refused, never guessed.

    Returns:
        us, float64, of the arguments' common shape.

    Raises:
        UsageError: a batch beyond the grid.
    """
    _check_batch(grid, np.asarray(batch_sizes))
    points = np.broadcast_arrays(batch_sizes, context_tokens, sizes)
    axes = (grid.batch_sizes, grid.context_tokens, grid.sizes)
    corners = [_corners(np.asarray(a, float), p) for a, p in zip(axes, points, strict=True)]
    table, total = np.array(grid.us), np.zeros(points[0].shape)
    for batch, batch_weight in corners[0]:
        for context, context_weight in corners[1]:
            for size, size_weight in corners[2]:
                weight = batch_weight * context_weight * size_weight
                total = total + weight * table[batch, context, size]
    return total


def next_size(grid: Grid, sizes: Floats) -> Floats:
    """Each size rounded up to the grid's next; beyond the last it stays."""
    return next_above(grid.sizes, sizes)


def next_above(steps: Sequence[int], values: Floats) -> Floats:
    """Each value rounded up to the next of increasing steps; beyond the last it stays."""
    axis = np.asarray(steps, np.float64)
    index = np.searchsorted(axis, values)
    return np.where(index < len(axis), axis[np.minimum(index, len(axis) - 1)], values)


def _corners(axis: Floats, points: Any) -> list[tuple[Any, Floats]]:
    """Two indices into an axis, and weights such that `Σ weight · value` is the value there."""
    last = len(axis) - 1
    if last == 0:
        return [(np.zeros(points.shape, np.int64), np.ones(points.shape))]
    at = np.maximum(points, axis[0])
    beyond = at > axis[last]
    low = np.where(beyond, last // 2, np.clip(np.searchsorted(axis, at, "right") - 1, 0, last - 1))
    high = np.where(beyond, last, low + 1)
    share = (at - axis[low]) / (axis[high] - axis[low])
    return [(low, 1.0 - share), (high, share)]


def _check_batch(grid: Grid, batch: Any) -> None:
    largest = grid.batch_sizes[-1]
    if np.any(batch > largest):
        found = int(np.max(batch))
        raise UsageError(
            "batch size of the cost model",
            expected=f"at most {largest}, the largest that was measured",
            found=str(found),
            fix=f"measure it too: specctl profile --batch-sizes ...,{found}",
        )
