"""Cuts of the Φ axis: CART as scikit-learn makes it, the optimum as brute force finds it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from specctl.records import floor_float32
from specctl.train.cart import bins_of
from specctl.train.partition import aggregate, cart_edges, exact_edges, fit_tree


def squared_error(phi: np.ndarray, label: np.ndarray, edges: list[float]) -> float:
    bins = bins_of(phi, edges)
    return sum(
        float(((p := label[bins == b]) - p.mean()).__pow__(2).sum()) for b in np.unique(bins)
    )


def brute_force(phi: np.ndarray, label: np.ndarray, num_bins: int, min_rows: int = 1) -> float:
    """Least squared error over every partition into at most `num_bins` intervals."""
    values = np.unique(phi)
    cuts = ((values[1:].astype(float) + values[:-1]) / 2).tolist()
    best = np.inf
    for count in range(num_bins):
        for edges in combinations(cuts, count):
            if np.bincount(bins_of(phi, list(edges)), minlength=count + 1).min() >= min_rows:
                best = min(best, squared_error(phi, label, list(edges)))
    return best


@pytest.mark.parametrize("value", [0.1, 0.2, 1 / 3, 5.0, 7.000000001, -0.1, 0.0])
def test_floor_is_the_largest_float32_not_above(value: float) -> None:
    floored = floor_float32(value)
    assert float(np.float32(floored)) == floored <= value
    assert float(np.nextafter(np.float32(floored), np.float32(np.inf))) > value
    assert floor_float32(floored) == floored


def test_by_hand_three_plateaus_are_cut_between_them() -> None:
    #  Φ      1    2  |   3    4  |   5    6
    #  label  1    1  |   5    5  |   2    2        error 0 with three bins
    phi = np.float32([1, 2, 3, 4, 5, 6])
    label = np.array([1.0, 1, 5, 5, 2, 2])
    assert exact_edges(phi, label, num_bins=8, min_rows=1) == [2.5, 4.5]
    assert cart_edges(phi, label, depth=3, min_rows=1, seed=0) == [2.5, 4.5]


def test_by_hand_greedy_cart_misses_the_optimum() -> None:
    #  Φ      1    2    3    4 .. 8     the best four bins are {1} {2} {3} {4..8}, error 0.
    #  label  0    6    0    6 .. 6     CART first cuts after 3 (error 24, the least), then may
    #                                   cut {1 2 3} only once: one bin keeps a 0 and a 6, error 18.
    phi = np.arange(1, 9, dtype=np.float32)
    label = np.array([0.0, 6, 0, 6, 6, 6, 6, 6])
    greedy = cart_edges(phi, label, depth=2, min_rows=1, seed=0)
    exact = exact_edges(phi, label, num_bins=4, min_rows=1)
    assert 3.5 in greedy
    assert squared_error(phi, label, greedy) == pytest.approx(18.0)
    assert exact == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("min_rows", [1, 3])
def test_exact_equals_brute_force(seed: int, min_rows: int) -> None:
    rng = np.random.default_rng(seed)
    phi = rng.integers(0, 11, 25).astype(np.float32) / 7
    label = rng.integers(1, 9, 25).astype(float)
    for num_bins in (2, 3, 4):
        edges = exact_edges(phi, label, num_bins=num_bins, min_rows=min_rows)
        wanted = brute_force(phi, label, num_bins, min_rows)
        assert squared_error(phi, label, edges) == pytest.approx(wanted, abs=1e-9)
        assert np.bincount(bins_of(phi, edges)).min() >= min_rows


@pytest.mark.parametrize("seed", range(5))
def test_exact_is_never_worse_than_cart_on_its_own_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    phi = rng.gamma(2, 2.5, 800).astype(np.float32)
    label = phi + rng.normal(0, 2, 800)
    greedy = cart_edges(phi, label, depth=3, min_rows=5, seed=0)
    exact = exact_edges(phi, label, num_bins=8, min_rows=5)
    assert squared_error(phi, label, exact) <= squared_error(phi, label, greedy) + 1e-9


@pytest.mark.parametrize("spread", [10.0, 1e-3], ids=["apart", "neighbouring float32"])
def test_floored_edges_keep_every_decision_of_scikit_learn(spread: float) -> None:
    rng = np.random.default_rng(3)
    phi = (20.0 + spread * rng.random(5000)).astype(np.float32)
    label = np.sin(phi * 40 / spread) + rng.normal(0, 0.1, 5000)
    edges = cart_edges(phi, label, depth=5, min_rows=2, seed=0)
    leaves = fit_tree(phi, label, depth=5, min_rows=2, seed=0).apply(phi[:, None])
    pairs = set(zip(leaves.tolist(), bins_of(phi, edges).tolist(), strict=True))
    assert len(edges) == 31
    assert len(pairs) == len(set(leaves)) == 32
    assert edges == [floor_float32(edge) for edge in edges] == sorted(set(edges))


@pytest.mark.parametrize("steps", [0, 1], ids=["even mantissa", "odd mantissa"])
def test_neighbouring_float32_are_cut_between(steps: int) -> None:
    # rounding the midpoint to nearest would go up for an odd mantissa, and part nothing
    low = np.float32(5.0 + steps * 2.0**-21)
    high = np.nextafter(low, np.float32(np.inf))
    phi, label = np.array([low, high]), np.array([0.0, 1.0])
    edges = exact_edges(phi, label, num_bins=2, min_rows=1)
    assert edges == [float(low)]
    assert bins_of(phi, edges).tolist() == [0, 1]


def test_useless_cuts_are_not_made() -> None:
    phi = np.float32([1, 2, 3, 4])
    assert exact_edges(phi, np.ones(4), num_bins=4, min_rows=1) == []
    assert exact_edges(np.ones(4, np.float32), np.arange(4.0), num_bins=4, min_rows=1) == []
    assert exact_edges(phi, np.arange(4.0), num_bins=4, min_rows=5) == []
    assert exact_edges(phi, np.array([0.0, 0, 1, 1]), num_bins=4, min_rows=1) == [2.5]


def test_cells_keep_the_statistics_and_part_no_equal_values() -> None:
    rng = np.random.default_rng(0)
    phi = rng.integers(0, 500, 4000).astype(np.float32)
    label = rng.random(4000)
    cells = aggregate(phi, label, max_cells=40)
    centred = label - label.mean()
    assert len(cells.num_rows) <= 40
    assert cells.num_rows.sum() == 4000
    assert cells.num_rows.max() < 2 * 4000 / 40 + 20
    assert (cells.last[:-1] < cells.first[1:]).all()
    for first, last, total in zip(cells.first, cells.last, cells.label_sum, strict=True):
        assert total == pytest.approx(centred[(phi >= first) & (phi <= last)].sum())
    few = aggregate(np.float32([3, 1, 3, 2]), np.array([1.0, 2, 3, 4]))
    assert few.first.tolist() == few.last.tolist() == [1, 2, 3]
    assert few.num_rows.tolist() == [1, 1, 2]
