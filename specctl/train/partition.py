"""Cuts the Φ axis so that a label varies little within each bin.

`cart_edges` is the greedy regression tree that the paper names, `printed_edges` the tree of its
Eq. 2 as printed, `exact_edges` the optimum that both approximate. All return thresholds t with
`Φ <= t` to the left, floored to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.records import floor_float32
from specctl.stats import Floats
from specctl.train.configs import CartConfig

Phis = NDArray[np.float32]
MAX_CELLS = 4096
"""Cells of the exact search, which takes O(bins · cells²): half a second. With more distinct Φ than
cells the optimum is over cuts at 4096 quantiles."""


def cart_edges(phi: Phis, label: Floats, *, depth: int, min_rows: int, seed: int) -> list[float]:
    """Thresholds of scikit-learn's CART of at most `depth` levels, ascending, nats."""
    tree = fit_tree(phi, label, depth=depth, min_rows=min_rows, seed=seed).tree_
    return sorted(floor_float32(t) for t in tree.threshold[tree.feature == 0])


def fit_tree(phi: Phis, label: Floats, *, depth: int, min_rows: int, seed: int) -> Any:
    """The fitted `DecisionTreeRegressor` itself (scikit-learn is imported here)."""
    from sklearn.tree import DecisionTreeRegressor

    tree = DecisionTreeRegressor(max_depth=depth, min_samples_leaf=min_rows, random_state=seed)
    return tree.fit(phi[:, None], label)


def find_edges(phi: Phis, label: Floats, leaf_depth: int, config: CartConfig) -> list[float]:
    """Thresholds by the configured method, at most 2^leaf_depth - 1 of them."""
    if config.algorithm == "exact":
        return exact_edges(phi, label, num_bins=2**leaf_depth, min_rows=config.min_rows)
    if config.algorithm == "printed":
        return sorted(printed_edges(phi, label, depth=leaf_depth, min_rows=config.min_rows))
    return cart_edges(phi, label, depth=leaf_depth, min_rows=config.min_rows, seed=config.seed)


def printed_edges(phi: Phis, label: Floats, *, depth: int, min_rows: int) -> list[float]:
    """Thresholds of a greedy tree that minimises HeteroSpec's Eq. 2 as printed (arXiv:2505.13254).

    The loss of a side is its share of the rows times its *summed* squared error, n_j/n · SSE_j,
    where regression trees take SSE_j: it favours a small error on the larger side. Every node that
    can be cut is cut; of equal cuts the lowest is taken. Thresholds are not sorted.
    """
    order = np.argsort(phi, kind="stable")
    values, centred = phi[order], (label - label.mean())[order]
    size = len(values)
    left = np.arange(1, size)
    fits = (values[1:] > values[:-1]) & (left >= min_rows) & (size - left >= min_rows)
    if not depth or not fits.any() or np.ptp(centred) == 0:
        return []
    sums, squares = np.cumsum(centred), np.cumsum(centred**2)
    of_left = squares[:-1] - sums[:-1] ** 2 / left
    of_right = squares[-1] - squares[:-1] - (sums[-1] - sums[:-1]) ** 2 / (size - left)
    loss = (left * of_left + (size - left) * of_right) / size
    cut = int(np.where(fits, loss, np.inf).argmin()) + 1
    below = printed_edges(values[:cut], centred[:cut], depth=depth - 1, min_rows=min_rows)
    above = printed_edges(values[cut:], centred[cut:], depth=depth - 1, min_rows=min_rows)
    return [*below, _between(values[cut - 1], values[cut]), *above]


def exact_edges(phi: Phis, label: Floats, *, num_bins: int, min_rows: int) -> list[float]:
    """Thresholds of the least-squares partition into at most `num_bins` intervals.

    Of partitions with equal error it takes the one with the fewest bins.
    """
    cells = aggregate(phi, label)
    errors, cuts = _best_cuts(cells, num_bins, min_rows)
    if not np.isfinite(errors).any():
        return []
    tolerance = 1e-12 * max(float(cells.label_squares.sum()), 1.0)
    chosen = int(np.flatnonzero(errors <= errors.min() + tolerance)[0])
    return [_between(cells.last[cut - 1], cells.first[cut]) for cut in cuts[chosen]]


@dataclass(frozen=True)
class Cells:
    """Sufficient statistics of neighbouring Φ, ascending; labels are centred on their mean."""

    first: Phis  # smallest Φ of each cell, nats
    last: Phis  # largest
    num_rows: Floats
    label_sum: Floats
    label_squares: Floats


def aggregate(phi: Phis, label: Floats, max_cells: int = MAX_CELLS) -> Cells:
    """At most `max_cells` cells of about equal size; equal Φ always share a cell."""
    values, of_value, counts = np.unique(phi, return_inverse=True, return_counts=True)
    cell_of_value = np.arange(len(values))
    if len(values) > max_cells:
        rows_before = np.cumsum(counts) - counts
        cell_of_value = np.unique(rows_before * max_cells // len(phi), return_inverse=True)[1]
    starts = np.flatnonzero(np.diff(cell_of_value, prepend=-1))
    cell, centred = cell_of_value[of_value], label - label.mean()
    return Cells(
        first=values[starts],
        last=values[np.append(starts[1:], len(values)) - 1],
        num_rows=np.bincount(cell).astype(np.float64),
        label_sum=np.bincount(cell, centred).astype(np.float64),
        label_squares=np.bincount(cell, centred**2).astype(np.float64),
    )


def _best_cuts(cells: Cells, num_bins: int, min_rows: int) -> tuple[Floats, list[list[int]]]:
    """Least squared error for 1..num_bins bins, and the cells before which each cuts.

    Dynamic programming over ends: best(b, j) = min over i of best(b - 1, i) + error(i, j). The
    shortcuts of 1-D k-means do not hold, since the label is not sorted along Φ.
    """
    size = len(cells.num_rows)
    rows, sums, squares = (
        np.append(0.0, np.cumsum(c)) for c in (cells.num_rows, cells.label_sum, cells.label_squares)
    )
    best = np.full((num_bins + 1, size + 1), np.inf)
    best[0, 0] = 0.0
    start = np.zeros((num_bins + 1, size + 1), dtype=np.int64)
    for end in range(1, size + 1):
        # Squared error around the mean of cells i..end-1, for every i < end.
        count = rows[end] - rows[:end]
        error = squares[end] - squares[:end] - (sums[end] - sums[:end]) ** 2 / count
        totals = best[:-1, :end] + np.where(count >= min_rows, np.maximum(error, 0.0), np.inf)
        start[1:, end], best[1:, end] = totals.argmin(1), totals.min(1)
    cuts: list[list[int]] = []
    for bins in range(1, num_bins + 1):
        ends = [size]
        for used in range(bins, 1, -1):
            ends.append(int(start[used, ends[-1]]))
        cuts.append(ends[:0:-1])
    return best[1:, size], cuts


def _between(low: np.float32, high: np.float32) -> float:
    """The midpoint, floored to float32: never below `low`, always below `high`."""
    return floor_float32((float(low) + float(high)) / 2)
