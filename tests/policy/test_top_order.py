"""Keys and top-k order scores exactly as the stable sort does, ties, zeros and -inf included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.policy import rules
from specctl.policy.rules import rank_keys, rank_order, top_order

TINY = float(torch.finfo(torch.float32).smallest_normal)
SCORES = st.sampled_from([0.0, -0.0, -1.0, -1.0000001, -TINY, -TINY / 2, -3e38, float("-inf"), 2.5])
POOLS = st.integers(1, 40).flatmap(
    lambda width: st.lists(st.lists(SCORES, min_size=width, max_size=width), min_size=1, max_size=4)
)


@pytest.fixture(autouse=True)
def _always_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SORTED_WHOLE", 0)


@settings(max_examples=300, deadline=None)
@given(pool=POOLS, num_best=st.integers(1, 50))
def test_order_is_that_of_the_stable_sort(pool: list[list[float]], num_best: int) -> None:
    scores = torch.tensor(pool)
    assert torch.equal(top_order(scores, num_best), rank_order(scores)[:, :num_best])


def test_every_float_keeps_its_place() -> None:
    """All floats of one row, drawn over the whole range of bits, against the sort."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1, 60_000), generator=generator).to(torch.int32)
    scores = bits.view(torch.float32)
    scores = scores[torch.isfinite(scores)][None]
    assert scores.shape[1] > 50_000
    everything = scores.shape[1]
    assert torch.equal(top_order(scores, everything), rank_order(scores))


def test_keys_are_distinct() -> None:
    keys = rank_keys(torch.zeros(2, 500))
    assert all(len(row.unique()) == 500 for row in keys)


def test_narrow_batches_are_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SORTED_WHOLE", 10)
    monkeypatch.setattr(rules, "rank_keys", lambda _: pytest.fail("keys where sorting is faster"))
    assert top_order(torch.tensor([[-1.0, -0.5, -1.0]]), 2).tolist() == [[1, 0]]
