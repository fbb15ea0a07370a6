"""From samples to grids: medians, monotone laws, held-out error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.isotonic import isotonic_regression

from specctl.errors import InvariantError
from specctl.replay.config import ProfileGrid
from specctl.replay.cost.model import HeldOut
from specctl.replay.cost.probe import Samples, probed_tree, tree_capacity
from specctl.replay.cost.profile import (
    fit_grid,
    held_out_error,
    is_noisy,
    isotonic,
    monotone,
    render,
    tree_shapes,
)
from tests.replay.costs import VERIFY, table_model

PLANES = st.integers(2, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.floats(1, 1000), min_size=width, max_size=width), min_size=1, max_size=4
    )
)


def test_pool_adjacent_violators_by_hand() -> None:
    assert isotonic(np.array([1.0, 5.0, 3.0, 4.0, 10.0])).tolist() == [1, 4, 4, 4, 10]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 6).map(float), min_size=1, max_size=12))
def test_the_formula_is_scikit_learns_regression(values: list[float]) -> None:
    """Small whole numbers, so that pools tie and meet."""
    wanted = isotonic_regression(values)
    assert isotonic(np.array(values)) == pytest.approx(wanted, rel=1e-12)


def test_medians_and_spread_by_hand() -> None:
    fitted = fit_grid({(1, 8, 1): [5, 1, 3], (1, 8, 4): [9, 9, 100, 9]})
    assert (fitted.batch_sizes, fitted.context_tokens, fitted.sizes) == ((1,), (8,), (1, 4))
    assert fitted.us == (((3.0, 9.0),),)
    assert fitted.iqr_us == (((2.0, 22.75),),)  # quartiles 2 and 4; 9 and 31.75


def test_a_fall_in_size_is_pooled_and_one_in_context_is_levelled() -> None:
    raw = {(1, 8, 1): [10.0], (1, 8, 2): [8.0], (1, 8, 4): [20.0]}
    raw |= {(1, 64, 1): [7.0], (1, 64, 2): [9.0], (1, 64, 4): [26.0]}
    # At 8: [9, 9, 20]. What 64 adds to the raw times is [-3, 1, 6].
    assert fit_grid(raw).us == (((9.0, 9.0, 20.0), (9.0, 10.0, 26.0)),)


@settings(max_examples=100, deadline=None)
@given(PLANES)
def test_fits_are_sorted_along_both_axes_and_beyond(rows: list[list[float]]) -> None:
    plane = np.array(rows)
    contexts, sizes = range(10, 10 + len(plane)), range(1, 1 + plane.shape[1])
    raw = {(1, c, s): [plane[i, j]] for i, c in enumerate(contexts) for j, s in enumerate(sizes)}
    fitted = fit_grid(raw)
    found = fitted.read(np.arange(1, 12), 1, np.arange(8, 30)[:, None])
    slack = 1e-3 + 1e-9 * found.max()  # grids are rounded to a tenth of a nanosecond
    assert (found > 0).all()
    assert (np.diff(found, axis=0) >= -slack).all()
    assert (np.diff(found, axis=1) >= -slack).all()


def test_what_is_already_sorted_is_kept() -> None:
    plane = np.array([[1.0, 2.0, 4.0], [1.5, 3.0, 6.0]])
    assert monotone(plane).tolist() == plane.tolist()


def test_held_out_error_by_hand() -> None:
    samples = Samples()
    for size in (1, 2, 3, 4):
        samples.add("verify", (1, 8, size), 10.0 * size)
    kept, held = samples.at("verify", (1, 4)), samples.at("verify", (2, 3))
    assert (set(kept), set(held)) == ({(1, 8, 1), (1, 8, 4)}, {(1, 8, 2), (1, 8, 3)})
    held[1, 8, 2] = [16.0]  # the line says 20
    error = held_out_error(fit_grid(kept), held)
    assert (error.num_points, error.mape, error.worst) == (2, 0.125, 0.25)


def test_a_grid_with_a_hole_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="4 points"):
        fit_grid({(1, 8, 1): [1.0], (1, 8, 2): [1.0], (1, 64, 1): [1.0]})


def test_held_out_sizes_lie_between_fitted_ones() -> None:
    for axis, held in (((1, 2, 5, 8, 16, 32, 64), (3, 12, 48)), ((1, 2, 3), ()), ((7,), ())):
        assert ProfileGrid(tokens=axis).held("tokens") == held


def test_trees_meet_every_size_and_every_width() -> None:
    shapes = tree_shapes((1, 2, 5, 48, 64), (1, 4, 10))
    assert {shape.num_tokens for shape in shapes} == {2, 5, 48, 64}
    assert {shape.top_k for shape in shapes if shape.num_tokens == 5} == {1, 4, 10}
    assert all(shape.num_tokens <= tree_capacity(shape.top_k) for shape in shapes)
    assert [tree_capacity(width) for width in (1, 2, 4)] == [5, 15, 53]
    assert probed_tree(1, 3).depth == 2


@pytest.mark.parametrize("axis", [(), (0, 1), (2, 1), (1, 1), (-1,), (1, 9999999)])
def test_axes_increase_from_one_on(axis: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="tokens"):
        ProfileGrid(tokens=axis)


def test_a_profile_whose_points_contradict_each_other_is_called_noisy() -> None:
    quiet = HeldOut(num_points=4, mape=0.05, worst=0.2)
    loud = HeldOut(num_points=4, mape=0.15, worst=0.2)
    assert not is_noisy(table_model(held_out={"verify": quiet}))
    assert is_noisy(table_model(held_out={"verify": quiet, "prefill": loud}))
    spread_out = VERIFY.model_copy(
        update={"iqr_us": tuple(tuple(tuple(0.3 * us for us in r) for r in p) for p in VERIFY.us)}
    )
    assert is_noisy(table_model(verify=spread_out))
    lines = "\n".join(
        map(str, render(table_model(held_out={"verify": loud}), Path("c")).renderables)
    )
    assert "measure again on a quiet machine" in lines
