"""The Jensen-Shannon distance against its definition, term by term in Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.errors import UsageError
from specctl.kernels.js_distance import js_distance
from tests.kernels.cases_js_distance import DTYPES, REGIMES, check, check_nan, moved


def divergence_bits(p: list[float], q: list[float]) -> float:
    """The definition: half the sum of both relative entropies to the middle."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        middle = (a + b) / 2
        total += a * math.log2(a / middle) / 2 if a else 0.0
        total += b * math.log2(b / middle) / 2 if b else 0.0
    return total


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 12), cut=st.booleans())
def test_definition(seed: int, size: int, *, cut: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(2, 12, generator=draw)
    draft = 3 * torch.randn(2, size, generator=draw)
    if cut:  # as top-k leaves it
        target[:, 5:] = float("-inf")
        draft[:, (size + 1) // 2 :] = float("-inf")
    ids = torch.randperm(12, generator=draw)[:size]
    found = js_distance(draft.log_softmax(-1), target.log_softmax(-1), ids)
    for row in range(2):
        q = [0.0] * 12
        for token, value in zip(ids.tolist(), draft[row].double().softmax(0).tolist(), strict=True):
            q[token] = value
        wanted = divergence_bits(target[row].double().softmax(0).tolist(), q)
        # A float32 sum of terms up to 1 is good to 1e-6; the root of that is the floor near 0.
        assert found[row].item() ** 2 == pytest.approx(wanted, abs=1e-6)


def test_ends_of_the_scale() -> None:
    law = torch.tensor([[0.5, 0.25, 0.25]]).log()
    every = torch.arange(3)
    assert js_distance(law, law, every).item() == pytest.approx(0, abs=1e-3)
    one, other = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.0, 1.0]]).log()
    assert js_distance(one, other, torch.arange(2)).item() == pytest.approx(1)


def test_hand_worked() -> None:
    # p = (1/2, 1/2, 0), q = (1/2, 0, 1/2): JSD = 1/2 bit, as half of the mass is shared.
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.5, 0.0, 0.5]]).log()
    assert js_distance(q, p, torch.arange(3)).item() == pytest.approx(math.sqrt(0.5))


def test_what_the_drafter_cannot_say_counts_as_disjoint() -> None:
    # p gives half its mass to a token outside the draft vocabulary: 1/4 · log2(2) of p's side,
    # and q = 1 against p = 1/2: m = 3/4.
    wanted = (0.5 * math.log2(2) + 0.5 * math.log2(0.5 / 0.75) + math.log2(1 / 0.75)) / 2
    found = js_distance(torch.tensor([[0.0]]), torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1]))
    assert found.item() == pytest.approx(math.sqrt(wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_logits_of_every_dtype(regime: str, dtype: torch.dtype) -> None:
    check(moved(REGIMES[regime](), torch.device("cpu"), dtype))


@pytest.mark.parametrize("side", ["draft", "target"])
def test_nan_spoils_its_row(side: str) -> None:
    check_nan(torch.device("cpu"), side)


def test_bad_input_is_refused() -> None:
    x, ids = torch.zeros(2, 3), torch.arange(3)
    with pytest.raises(UsageError, match=r"target_logits: .* of 2 x any, found float32 of 1 x 3"):
        js_distance(x, x[:1], ids)
    with pytest.raises(UsageError, match="target_ids: expected int64 of 3, found int64 of 2"):
        js_distance(x, x, ids[:2])
    with pytest.raises(UsageError, match="draft_logits: expected float32 or float16 or bfloat16"):
        js_distance(x.double(), x, ids)
