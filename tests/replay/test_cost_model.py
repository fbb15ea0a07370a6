"""The arithmetic of cost models, by hand and by law, and how samples become grids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import isotonic_regression

from specctl.errors import RecordError, UsageError
from specctl.policy.budgets import StepCost
from specctl.replay.config import ProfileGrid
from specctl.replay.cost import profile
from specctl.replay.cost.model import Steps, require_slope
from specctl.replay.cost.probe import Samples
from specctl.runtime.capture import bucket_of, token_tiers
from tests.replay.costs import LINEAR, grid, table_model

TABLE = table_model()


@pytest.mark.parametrize(
    ("limit", "tokens", "batch", "context", "us"),
    [
        (0, 4, 1, 64, 20),  # a measured point
        (0, 6, 1, 64, 25),  # half-way from 4 to 8 tokens
        (0, 6, 1, 96, 28.5),  # half-way from 25 to 32 in context as well
        (0, 6, 1, 16, 25),  # below the first context
        (0, 12, 1, 64, 40),  # beyond: on from 30 by the 2.5 a token of 4 to 8
        (0, 4, 1, 192, 28),  # beyond the last context: on from 24 by 4 in 64 tokens
        (0, 12, 3, 64, 40),  # three requests of 4 tokens
        (0, 8, 2, 64, 30),  # two of 4: half-way from one to three requests
        # A staircase up to the capture limit, lines above it.
        *((8, n, 1, 64, us) for n, us in ((1, 10), (2, 20), (3, 20), (5, 30), (8, 30), (9, 32.5))),
        # Two tokens each of three requests: padded to four, if twelve are captured.
        *((limit, 6, 3, 64, us) for limit, us in ((12, 40), (11, 20 + 20 / 3))),
    ],
)
def test_table_by_hand(limit: int, tokens: int, batch: int, context: int, us: float) -> None:
    model = table_model(capture_limit_tokens=limit)
    assert model.verify_us(tokens, batch, context) == pytest.approx(us)


def test_a_flat_last_step_does_not_end_the_slope() -> None:
    table = grid([[[10, 20, 30, 30]]], sizes=(1, 2, 3, 4))
    assert table.read(6, 1, 1) == pytest.approx(30 + 2 * 5)  # (30 - 20) / (4 - 2) a token


def test_round_is_the_sum_of_its_parts() -> None:
    # root 3, two levels of 3 nodes at 3 each, select 0.5, extend 2 tokens 7, verify 20, loop 1.5
    steps = Steps(1, 4, 64, levels=3, level_width=3, num_emitted=2)
    assert TABLE.round_us(steps) == pytest.approx(3 + 2 * 3 + 0.5 + 7 + 20 + 1.5)
    ended = Steps(1, 4, 64, levels=3, level_width=3, num_emitted=0)
    assert TABLE.round_us(steps) - TABLE.round_us(ended) == pytest.approx(7)


def test_rounds_that_draft_nothing_pay_for_nothing_else() -> None:
    steps = Steps(
        np.array([1, 1, 3]), np.array([1, 4, 12]), 64, np.array([0, 1, 0]), 1, np.array([1, 1, 1])
    )
    assert TABLE.draft_us(steps).tolist() == [0.0, 3 + 0.5 + 6, 0.0]
    assert TABLE.loop_us(steps).tolist() == [1.0, 1.5, 2.0]
    assert TABLE.round_us(steps).tolist() == [11.0, 9.5 + 20 + 1.5, 42.0]


def test_prefill_with_and_without_the_drafter() -> None:
    assert TABLE.prefill_us([10, 20], drafts=False).tolist() == [90, 180]
    assert TABLE.prefill_us([10, 20], drafts=True).tolist() == [100, 200]


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch size 3; 4 is larger.*--batch-sizes"):
        TABLE.verify_us(8, 4, 64)
    alone = table_model(draft=None)
    assert alone.round_us(Steps(1, 1, 64, 0, 0, 1)) == pytest.approx(11)
    with pytest.raises(UsageError, match="timings of a drafter"):
        alone.round_us(Steps(1, 4, 64, 3, 1, 1))


def drafts(levels: int, width: int, num_tokens: int) -> Any:
    return SimpleNamespace(max_depth=levels, width=width, max_tokens=num_tokens)


@settings(max_examples=60)
@given(st.integers(0, 30), st.integers(1, 3), st.floats(1, 400), st.integers(2, 40))
def test_step_costs_are_the_models_rounds(
    limit: int, batch: int, context: float, num_tokens: int
) -> None:
    model, most = table_model(capture_limit_tokens=limit), batch * num_tokens
    cost = model.step_cost(drafts(3, 2, num_tokens), batch, context)
    sizes = np.arange(batch, most + 1)
    wanted = model.round_us(Steps(batch, sizes, context, 3, 2, 1))
    if cost.step_us[0] < cost.step_us[-1]:
        table = cost.step_table(most)
        np.testing.assert_allclose(table[batch:].numpy(), wanted, rtol=1e-12)
        assert bool((table.diff() >= 0).all())
    else:  # all sizes padded to one: there is nothing to decide
        with pytest.raises(UsageError, match="flat"):
            cost.step_table(most)


def test_step_cost_keeps_a_staircase_short() -> None:
    model = table_model(capture_limit_tokens=8)
    cost = model.step_cost(drafts(1, 1, 8), 1, 64)
    around = 3 + 0.5 + 6 + 1.5
    assert cost.token_counts == (1, 4, 8)
    assert cost.step_us == pytest.approx((10 + around, 20 + around, 30 + around))


SLOPE = grid([[[10, 74]], [[20, 84]], [[40, 104]]], batch=(1, 2, 4), sizes=(1, 65))
"""One us a token of a request, ten a request."""
GRAPHS = table_model(rounds="graphs", token_tiers=token_tiers(2048, 8), verify=SLOPE)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [5, 10, 23])
def test_rounds_are_padded_as_the_runtime_pads(batch: int, most: int) -> None:
    """Against the runtime's own tiers and buckets, for every size that a batch can ask for."""
    bucket = bucket_of(batch, 4)
    tiers = np.array(token_tiers(bucket * most, 8))
    tokens = np.arange(batch, batch * most + 1)
    wanted = GRAPHS.verify_us(tiers[np.searchsorted(tiers, tokens)], bucket, 1)
    assert GRAPHS.verify_us(tokens, batch, 1, most) == pytest.approx(wanted)


def test_what_is_always_verified_whole_is_not_padded() -> None:
    assert GRAPHS.verify_us([5, 9, 40], 1, 1) == pytest.approx([14, 18, 49])
    assert table_model(verify=SLOPE).verify_us([5, 9], 1, 1, 60) == pytest.approx([14, 18])


def test_a_budget_still_sees_a_slope_below_the_smallest_tier() -> None:
    cost = GRAPHS.step_cost(drafts(1, 1, 13), 1, 1)
    around = 3 + 0.5 + 7 + 1.5  # what else a round takes; two tokens are read
    assert cost.token_counts == (1, 2, 3, 4, 5, 6, 7, 8, 13)
    own = [10, 11, 12, 13, 14, 15, 16, 17, 22]
    assert cost.step_us == pytest.approx([us + around for us in own])


def test_decisions_refuse_a_missing_or_flat_model() -> None:
    flat = table_model(verify=grid([[[10, 10]]], sizes=(1, 4)))
    single = table_model(verify=grid([[[10]]]))
    free = LINEAR.model_copy(update={"verify_token_us": 0.0})
    assert require_slope(TABLE) is TABLE
    assert require_slope(LINEAR) is LINEAR
    for model in (None, flat, single, free):
        with pytest.raises(UsageError, match=r"time rises with the tokens.*specctl profile"):
            require_slope(model)
    with pytest.raises(UsageError, match="rises"):
        flat.step_cost(drafts(1, 1, 8), 1, 64)


@pytest.mark.parametrize(
    ("counts", "times", "words"),
    [
        ((2, 1), (1.0, 2.0), "strictly increase"),
        ((1, 2, 4), (1.0, 3.0, 2.0), r"index \[2\]"),
        ((1, 2), (1.0,), "2 token counts, 1 step_us"),
        ((1,), (1.0,), "at least 2"),
    ],
)
def test_step_cost_refuses(counts: tuple[int, ...], times: tuple[float, ...], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        StepCost(token_counts=counts, step_us=times)


PLANES = st.integers(2, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.floats(1, 1000), min_size=width, max_size=width), min_size=1, max_size=4
    )
)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 6).map(float), min_size=1, max_size=12))
def test_the_formula_is_scikit_learns_regression(values: list[float]) -> None:
    """Small whole numbers, so that pools tie and meet."""
    wanted = isotonic_regression(values)
    assert profile.isotonic(np.array(values)) == pytest.approx(wanted, rel=1e-12)


def test_medians_and_spread_by_hand() -> None:
    fitted = profile.fit_grid({(1, 8, 1): [5, 1, 3], (1, 8, 4): [9, 9, 100, 9]})
    assert (fitted.batch_sizes, fitted.context_tokens, fitted.sizes) == ((1,), (8,), (1, 4))
    assert fitted.us == (((3.0, 9.0),),)
    assert fitted.iqr_us == (((2.0, 22.75),),)  # quartiles 2 and 4; 9 and 31.75


def test_a_fall_in_size_is_pooled_and_one_in_context_is_levelled() -> None:
    raw = {(1, 8, 1): [10.0], (1, 8, 2): [8.0], (1, 8, 4): [20.0]}
    raw |= {(1, 64, 1): [7.0], (1, 64, 2): [9.0], (1, 64, 4): [26.0]}
    # At 8: [9, 9, 20]. What 64 adds to the raw times is [-3, 1, 6].
    assert profile.fit_grid(raw).us == (((9.0, 9.0, 20.0), (9.0, 10.0, 26.0)),)


@settings(max_examples=100)
@given(PLANES)
def test_fits_are_sorted_along_both_axes_and_beyond(rows: list[list[float]]) -> None:
    plane = np.array(rows)
    contexts, sizes = range(10, 10 + len(plane)), range(1, 1 + plane.shape[1])
    raw = {(1, c, s): [plane[i, j]] for i, c in enumerate(contexts) for j, s in enumerate(sizes)}
    fitted = profile.fit_grid(raw)
    found = fitted.read(np.arange(1, 12), 1, np.arange(8, 30)[:, None])
    slack = 1e-3 + 1e-9 * found.max()  # grids are rounded to a tenth of a nanosecond
    assert (found > 0).all()
    assert (np.diff(found, axis=0) >= -slack).all()
    assert (np.diff(found, axis=1) >= -slack).all()


def test_held_out_error_by_hand() -> None:
    samples = Samples()
    for size in (1, 2, 3, 4):
        samples.add("verify", (1, 8, size), 10.0 * size)
    kept, held = samples.at("verify", (1, 4)), samples.at("verify", (2, 3))
    assert (set(kept), set(held)) == ({(1, 8, 1), (1, 8, 4)}, {(1, 8, 2), (1, 8, 3)})
    held[1, 8, 2] = [16.0]  # the line says 20
    error = profile.held_out_error(profile.fit_grid(kept), held)
    assert (error.num_points, error.mape, error.worst) == (2, 0.125, 0.25)


@pytest.mark.parametrize("axis", [(), (0, 1), (2, 1), (1, 1), (-1,), (1, 9999999)])
def test_axes_increase_from_one_on(axis: tuple[int, ...]) -> None:
    with pytest.raises(RecordError, match="tokens"):
        ProfileGrid(tokens=axis)
