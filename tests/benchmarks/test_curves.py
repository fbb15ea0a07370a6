"""Readings of curves at equal tau and equal tokens, on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.systems.curves import Curve, Paired, tau, tau_at, tokens_at, tokens_per_call
from specctl.logs.positions import Floats
from specctl.policy import Policy, RootOnly
from specctl.replay.ladder.tally import SUMS


def sums_of(calls: float, accepted: float, verified: float) -> Floats:
    row = np.zeros(len(SUMS))
    for name, value in (("calls", calls), ("accepted", accepted), ("verified", verified)):
        row[SUMS.index(name)] = value
    return row


def curve(*settings: tuple[float, float], prompts: int = 12, seed: int = 0) -> Curve:
    """Settings of (tau, tokens a call); prompts differ in length alone, by a factor of 1 to 9."""
    calls = np.random.default_rng(seed).integers(1, 10, prompts)
    table = [[sums_of(c, c * (t - 1), c * n) for c in calls.tolist()] for t, n in settings]
    policies = (Policy(shape=RootOnly()),) * len(settings)
    return Curve("some", tuple(map(str, settings)), policies, np.array(table))


def test_a_setting_is_read_back() -> None:
    ours = curve((2.0, 4.0), (3.0, 8.0), (3.5, 16.0))
    assert tau(ours.pooled).tolist() == pytest.approx([2.0, 3.0, 3.5])
    assert tokens_per_call(ours.pooled).tolist() == pytest.approx([4.0, 8.0, 16.0])
    assert float(tokens_at(ours.pooled, np.array(3.0))) == pytest.approx(8.0)
    assert float(tau_at(ours.pooled, np.array(8.0))) == pytest.approx(3.0)


def test_between_settings_the_log_of_tokens_is_linear_in_tau() -> None:
    ours = curve((2.0, 4.0), (3.0, 16.0))
    assert float(tokens_at(ours.pooled, np.array(2.5))) == pytest.approx(8.0)
    assert float(tau_at(ours.pooled, np.array(8.0))) == pytest.approx(2.5)


def test_the_order_of_settings_does_not_matter() -> None:
    ours = curve((3.5, 16.0), (2.0, 4.0), (3.0, 8.0))
    assert float(tokens_at(ours.pooled, np.array(3.25))) == pytest.approx(np.sqrt(8 * 16))


def test_a_setting_that_another_undercuts_does_not_count() -> None:
    """20 tokens for a tau of 3 are worth nothing where 8 give 3.5; ties count for the better."""
    ours = curve((2.0, 4.0), (3.0, 20.0), (3.5, 8.0), (3.5, 9.0), (4.0, 16.0))
    assert float(tokens_at(ours.pooled, np.array(3.0))) == pytest.approx(8.0)
    assert float(tokens_at(ours.pooled, np.array(3.5))) == pytest.approx(8.0)
    assert float(tau_at(ours.pooled, np.array(9.0))) == pytest.approx(3.5)


@pytest.mark.parametrize("wanted", [1.9, 3.6])
def test_nothing_is_read_beyond_a_curve(wanted: float) -> None:
    assert np.isnan(tokens_at(curve((2.0, 4.0), (3.5, 16.0)).pooled, np.array(wanted)))


def test_changes_have_the_sign_and_size_of_the_difference() -> None:
    """Ours verifies 3 where theirs verifies 4, at every tau: 25 % fewer."""
    theirs = curve((2.0, 4.0), (3.0, 8.0), (4.0, 16.0))
    ours = curve((2.0, 3.0), (3.0, 6.0), (4.0, 12.0))
    paired = Paired.of(12, seed=0)
    one, other = ours.only(1), theirs.only(1)
    for found in (
        paired.tokens_of(ours, other),
        paired.tokens_against(one, theirs),
        paired.curve_against(ours, theirs, at=other),
    ):
        assert (found.value, found.low, found.high) == pytest.approx((-0.25, -0.25, -0.25))
    # At 6 tokens theirs reads 2 + log2(6 / 4) = 2.585, and ours has 3.
    more = paired.tau_against(one, theirs)
    assert more.value == pytest.approx(3 / (2 + np.log2(1.5)) - 1)


def test_resamples_are_paired() -> None:
    """Prompts of very different tau move both sides alike, so the interval has no width."""
    lengths = np.arange(1.0, 41.0)
    low = np.array([[sums_of(10, 10 * n, 40) for n in lengths]])
    high = np.array([[sums_of(10, 10 * n, 30) for n in lengths]])
    policies = (Policy(shape=RootOnly()),)
    ours, theirs = (Curve("some", ("x",), policies, table) for table in (high, low))
    paired = Paired.of(40, seed=0)
    spread = paired.interval(ours, lambda sums: tau(sums[..., 0, :]))
    assert spread.high - spread.low > 3
    change = paired.change(ours, theirs, "verified")
    assert (change.low, change.high) == pytest.approx((-0.25, -0.25))


def test_several_fits_count_as_their_mean_and_widen_the_interval() -> None:
    """Two fits of tau 2 and 4 against a control of 3: no prompt differs, so the width is theirs."""
    control = curve((3.0, 8.0))
    fits = [curve((2.0, 8.0)), curve((4.0, 8.0))]
    found = Paired.of(12, 0).tau_change(fits, control)
    assert found.by_fit == pytest.approx((-1 / 3, 1 / 3))
    assert found.value == pytest.approx(0.0)
    assert (found.low, found.high) == pytest.approx((-1 / 3, 1 / 3))
    alone = Paired.of(12, 0).tau_change(fits[0], control)
    assert (alone.low, alone.high) == pytest.approx((-1 / 3, -1 / 3))


def test_fits_are_paired_by_prompt() -> None:
    """The same fit twice has the interval of one: drawing fits adds nothing."""
    one, control = curve((2.5, 8.0), seed=1), curve((3.0, 8.0))
    paired = Paired.of(12, 0)
    single, twice = (paired.tokens(fits) for fits in (one, [one, one]))
    assert (twice.low, twice.high) == pytest.approx((single.low, single.high))
    assert paired.change([one, one], control, "calls").by_fit[0] == pytest.approx(
        paired.change(one, control, "calls").value
    )
