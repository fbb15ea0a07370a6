"""Chains over imported acceptance: a naive walk, the oracle, bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.errors import UsageError
from specctl.replay.imported import replay_chain, replay_oracle
from specctl.replay.score import score
from tests.replay.imports import Text, as_log, by_hand, texts


def naive_walk(text: Text, length: int) -> list[tuple[int, int]]:
    """(position, accepted) of every round of a chain."""
    rounds, position = [], 1
    while position < text.num_tokens:
        accepted = min(length, text.accepted[position - 1])
        rounds.append((position, accepted))
        position += accepted + 1
    return rounds


def test_the_oracle_by_hand() -> None:
    """`a`: 1 (+3), 5 (1). `b`: 1 (0), 2 (1): the tokens verified are those emitted or the bonus."""
    rounds = replay_oracle(by_hand())
    assert rounds.outcomes.verified.tolist() == [4, 2, 1, 2]
    assert rounds.outcomes.accepted.tolist() == [3, 1, 0, 1]
    assert rounds.outcomes.censored.tolist() == [1, 0, 0, 0]


def test_a_chain_longer_than_the_log_is_marked_and_bounded() -> None:
    """At position 1 of `a` all three offered tokens were accepted; five might have been."""
    rounds = replay_chain(by_hand(), 5)
    assert rounds.outcomes.censored.tolist() == [1, 0, 0, 0]
    assert rounds.bounds.calls_low.tolist() == [1, 2]
    assert rounds.bounds.calls_high.tolist() == [2, 2]
    assert score(["chain 5"], [rounds])[0].pooled.is_marked


@settings(max_examples=40)
@given(texts(), st.integers(0, 8))
def test_a_chain_equals_the_naive_walk(found: list[Text], length: int) -> None:
    rounds = replay_chain(as_log(found), length)
    wanted = [step for text in found for step in naive_walk(text, length)]
    assert rounds.outcomes.accepted.tolist() == [accepted for _, accepted in wanted]
    starts = [rounds.context_tokens[i] - r - 1 for i, r in enumerate(rounds.request.tolist())]
    assert starts == [position for position, _ in wanted]
    emitted = np.bincount(rounds.request, rounds.emitted)
    assert emitted.tolist() == [text.num_tokens - 1 for text in found]
    assert set(rounds.outcomes.verified.tolist()) == {length + 1}
    assert np.bincount(rounds.request, rounds.is_last).tolist() == [1] * len(found)


@settings(max_examples=30)
@given(texts())
def test_the_oracle_runs_the_deepest_chain_and_rejects_nothing(found: list[Text]) -> None:
    log = as_log(found)
    oracle, deepest = replay_oracle(log), replay_chain(log, 6)
    assert oracle.outcomes.accepted.tolist() == deepest.outcomes.accepted.tolist()
    assert oracle.outcomes.accepted.tolist() == oracle.outcomes.levels.tolist()
    assert (oracle.outcomes.verified <= deepest.outcomes.verified).all()


@settings(max_examples=30)
@given(texts(), st.integers(1, 5))
def test_bounds_hold_the_truth_of_a_deeper_log(found: list[Text], depth: int) -> None:
    """The log is cut to `depth`; the chain of 6 over the whole log must lie within the bounds."""
    cut = [Text(t.num_tokens, [min(a, depth) for a in t.accepted]) for t in found]
    bounds = replay_chain(as_log(cut, depth), 6).bounds
    calls = np.bincount(replay_chain(as_log(found), 6).request)
    assert (bounds.calls_low <= calls).all()
    assert (calls <= bounds.calls_high).all()


def test_lengths_out_of_range() -> None:
    for length in (-1, 65):
        with pytest.raises(UsageError, match="0 to 64"):
            replay_chain(by_hand(), length)
