"""Where each entry of an acceptance list belongs, and how misfits are counted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.logs.acceptance_lists import KINDS, align

LISTS = st.lists(st.integers(0, 12), max_size=20)


def aligned(entries: list[int], num_generated: int, predicts: str = "same") -> list[int]:
    return align(np.array(entries, np.int64), num_generated, predicts).accepted.tolist()


def kinds(entries: list[int], num_generated: int, predicts: str = "same") -> dict[str, int]:
    return dict(align(np.array(entries, np.int64), num_generated, predicts).misaligned)


def test_entry_zero_is_the_prefill_and_entry_p_the_round_after_p_tokens() -> None:
    """Text of 5 tokens: rounds may start at positions 1, 2, 3, 4 with 4, 3, 2, 1 left."""
    assert aligned([1, 3, 2, 1, 2], 5) == [2, 1, 0, 1]
    assert kinds([1, 3, 2, 1, 2], 5) == {}


def test_the_published_simulator_reads_one_entry_earlier() -> None:
    assert aligned([3, 2, 1, 2, 1], 5, "next") == [2, 1, 0, 1]
    assert kinds([3, 2, 1, 2, 1], 5, "next") == {}
    assert kinds([3, 2, 1, 2], 5, "next") == {}  # the last entry has nothing to draft


@pytest.mark.parametrize(
    ("entries", "num_generated", "accepted", "found"),
    [
        ([1, 3, 2], 5, [2, 1], {"missing": 2}),
        ([1, 3, 2, 1, 2, 1, 1], 5, [2, 1, 0, 1], {"surplus": 2}),
        ([1, 3, 0, 2, 0], 5, [2], {"below_one": 2, "behind_below_one": 1}),
        ([1, 9, 2, 1, 3], 5, [4, 1, 0, 1], {"beyond_end": 2}),
        ([4, 3, 2, 1, 2], 5, [2, 1, 0, 1], {"first_not_one": 1}),
        ([], 5, [], {"missing": 5}),
        ([], 0, [], {}),
        ([1], 1, [], {}),
        ([1, 1], 0, [], {"surplus": 2}),
        ([0, 0], 2, [], {"below_one": 1, "first_not_one": 1}),
    ],
)
def test_misfits(
    entries: list[int], num_generated: int, accepted: list[int], found: dict[str, int]
) -> None:
    assert aligned(entries, num_generated) == accepted
    assert kinds(entries, num_generated) == found


@given(LISTS, st.integers(0, 15), st.sampled_from(["same", "next"]))
def test_what_is_kept_is_within_the_text_and_what_is_not_is_counted(
    entries: list[int], num_generated: int, predicts: str
) -> None:
    found = align(np.array(entries, np.int64), num_generated, predicts)
    kept = found.accepted
    remaining = num_generated - np.arange(1, len(kept) + 1)
    assert ((kept >= 0) & (kept <= remaining)).all()
    assert set(found.misaligned) <= set(KINDS)
    assert found.misaligned == +Counter(found.misaligned)
    assert sum(found.misaligned.values()) <= found.num_entries + found.misaligned["first_not_one"]
    lost = max(num_generated - 1, 0) - len(kept)
    counted = ("missing", "below_one", "behind_below_one")
    assert lost <= sum(found.misaligned[kind] for kind in counted)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20))
def test_a_fitting_list_is_kept_whole(steps: list[int]) -> None:
    size = len(steps)
    entries = [1] + [min(step, size - p + 1) for p, step in enumerate(steps[1:], start=1)]
    assert kinds(entries, size) == {}
    assert aligned(entries, size) == [entry - 1 for entry in entries[1:]]
