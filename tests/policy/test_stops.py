"""Stops by hand: which token triggers, whether it is submitted, and what is still drafted."""

from __future__ import annotations

import math

import pytest
import torch

from specctl.policy import DynamicDepth, SignalStop, StaticTree, build_shape
from specctl.policy.rules import Level, fresh_start, stop_rows
from tests.policy.drafts import Probabilities, chain_law, grow, hand_law, paths_of, random_law


def stop(signal: str, threshold: float, **changes: object) -> SignalStop:
    return SignalStop(**{"signal": signal, "threshold": threshold, "window": 4, **changes})


@pytest.mark.parametrize(
    ("signal", "threshold", "ends_at"),
    [
        ("confidence", 0.4, 3),
        ("survival", 0.7, 3),
        ("entropy", 0.4, 2),
        ("sqrt_entropy", 1.2, 4),
        ("entropy_bound", 0.7, 2),
    ],
)
def test_the_uncertain_token_is_submitted_and_ends_the_chain(
    signal: str, threshold: float, ends_at: int
) -> None:
    _, tree, drafter = grow(build_shape(stop(signal, threshold)), [chain_law])
    assert paths_of(tree) == [(0,) * length for length in range(ends_at + 1)]
    assert drafter.num_expansions == ends_at - 1, "nothing is drafted behind the last token"


def test_the_uncertain_token_may_be_left_out() -> None:
    rule = build_shape(stop("confidence", 0.4, keep_last=False))
    pool, tree, drafter = grow(rule, [chain_law])
    assert paths_of(tree) == [(), (0,), (0, 0)]
    assert drafter.num_expansions == 2, "its level had to be drafted to know"
    assert int(pool.tree.depth.max()) == 3


def test_svip_leaves_the_last_level_out_too() -> None:
    """Uncertain at level 2 of 2: `grow` is not asked there, `select` must still see it."""
    rule = build_shape(stop("sqrt_entropy", 0.6, window=2, keep_last=False))
    assert paths_of(grow(rule, [chain_law])[1]) == [(), (0,)]


def flat_start(path: tuple[int, ...]) -> list[float]:
    return [0.28, 0.24, 0.24, 0.24] if not path else [1.0, 0.0, 0.0, 0.0]


def test_an_uncertain_first_token() -> None:
    kept = build_shape(stop("confidence", 0.4))
    assert paths_of(grow(kept, [flat_start])[1]) == [(), (0,)]
    untested = build_shape(stop("confidence", 0.4, keep_last=False))
    assert len(paths_of(grow(untested, [flat_start])[1])) == 5, "SVIP samples before it tests"


def test_a_certain_drafter_never_stops() -> None:
    for signal in ("entropy", "sqrt_entropy"):
        _, tree, _ = grow(build_shape(stop(signal, 0.0)), [lambda _: [1.0, 0.0, 0.0, 0.0]])
        assert int(tree.num_nodes) == 5


def test_a_value_on_the_threshold_goes_on() -> None:
    pool, _, _ = grow(build_shape(stop("confidence", 0.0)), [chain_law])
    value = pool.tree.draft_logp[0, 2].exp()
    above = float(torch.nextafter(value, torch.tensor(2.0)))
    entropy = pool.entropy[0, 2]
    below = float(torch.nextafter(entropy, torch.tensor(0.0)))
    on_and_off = (("confidence", float(value), above), ("entropy", float(entropy), below))
    for signal, on, off in on_and_off:
        for threshold, size in ((on, 4), (off, 3)):
            tree = grow(build_shape(stop(signal, threshold)), [chain_law])[1]
            assert int(tree.num_nodes) == size


def length_by_the_book(law: Probabilities, record: SignalStop) -> int:
    """Draft tokens that are submitted, by a loop over one chain in float64."""
    path: tuple[int, ...] = ()
    joint = 1.0
    for length in range(1, record.window + 1):
        probs = law(path)
        best = max(range(len(probs)), key=probs.__getitem__)
        joint, path = joint * probs[best], (*path, best)
        entropy = -sum(p * math.log(p) for p in probs if p)
        uncertain = {
            "confidence": probs[best] < record.threshold,
            "survival": joint < record.threshold,
            "entropy": entropy > record.threshold,
            "sqrt_entropy": math.sqrt(entropy) > record.threshold,
            "entropy_bound": 1 - math.sqrt(0.2 * entropy) < record.threshold,
        }[record.signal]
        if uncertain and record.keep_last:
            return length
        if uncertain and length > 1:
            return length - 1
    return record.window


THRESHOLDS = {
    "confidence": 0.35,
    "survival": 0.1,
    "entropy": 1.6,
    "sqrt_entropy": 1.27,
    "entropy_bound": 0.43,
}


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("signal", THRESHOLDS)
def test_rows_of_a_batch_stop_on_their_own(signal: str, *, keep_last: bool) -> None:
    record = stop(signal, THRESHOLDS[signal], window=8, keep_last=keep_last)
    laws = [random_law(seed) for seed in range(24)]
    _, tree, _ = grow(build_shape(record), laws)
    expected = [length_by_the_book(law, record) for law in laws]
    assert (tree.num_nodes - 1).tolist() == expected
    assert len(set(expected)) >= 3, "one length only would prove little"


# --------------------------------------------------------------------------- DDD


def ddd(**changes: object) -> DynamicDepth:
    return DynamicDepth(**{"depth": 3, "top_k": 2, "num_tokens": 7, **changes})


@pytest.mark.parametrize(
    ("check_levels", "min_beam_logp", "depth"),
    [
        # Beam of level 1: a .6, b .3, so H = log .9 = -.105.
        # Beam of level 2: aa .36, ba .24, so H = log .6 = -.511.
        ((1, 2), -0.1, 1),
        ((1, 2), -0.3, 2),
        ((2,), -0.1, 2),
        ((1,), -0.3, 3),
        ((), -0.0, 3),
        ((1, 2), -0.6, 3),
        ((3,), -0.0, 3),
    ],
)
def test_drafting_ends_where_the_beam_lost_too_much(
    check_levels: tuple[int, ...], min_beam_logp: float, depth: int
) -> None:
    rule = build_shape(ddd(check_levels=check_levels, min_beam_logp=min_beam_logp))
    _, tree, drafter = grow(rule, [hand_law])
    _, static, _ = grow(build_shape(StaticTree(depth=depth, top_k=2, num_tokens=7)), [hand_law])
    assert paths_of(tree) == paths_of(static), "what was drafted is ranked as EAGLE-2 does"
    assert drafter.num_expansions == depth - 1


def test_a_beam_on_the_threshold_goes_on() -> None:
    rule = build_shape(ddd(check_levels=(1, 2), min_beam_logp=0.0))
    _, tree, _ = grow(rule, [lambda _: [1.0, 0.0, 0.0, 0.0]])
    assert int(tree.depth.max()) == 3, "it lost nothing"


def test_a_row_stops_once() -> None:
    """What a deeper level, drafted for other rows, says of a stopped row does not count."""
    rule = build_shape(StaticTree(depth=3, top_k=2, num_tokens=7))
    plan = rule.begin(fresh_start(2))
    pool, _, _ = grow(rule, [hand_law, hand_law])
    for depth, stopped in ((1, [True, False]), (2, [True, True]), (3, [True, False])):
        stop_rows(plan, Level(depth, pool, 1), torch.tensor(stopped))
    assert plan.max_depth.tolist() == [1, 2]


def test_defaults_are_the_papers() -> None:
    paper = DynamicDepth()
    assert (paper.depth, paper.top_k, paper.check_levels) == (11, 10, (5, 7, 9))
    assert paper.min_beam_logp == -0.3
