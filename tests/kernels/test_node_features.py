"""`node_features` against float64, on the rows that break kernels."""

from __future__ import annotations

import pytest
import torch

from specctl.kernels.node_features import node_features

REGIMES = {
    "spread": lambda g: 4 * torch.randn(3, 5, 257, generator=g),
    "flat": lambda g: 1e-3 * torch.randn(2, 2, 4096, generator=g),
    "saturated": lambda g: 60 * torch.randn(2, 3, 1000, generator=g),
    "shifted": lambda g: 1e4 + torch.randn(1, 2, 512, generator=g),
    "one_hot": lambda g: torch.full((1, 1, 64), float("-inf")).index_fill(
        2, torch.tensor([5]), 0.0
    ),
    "masked": lambda g: torch.randn(2, 2, 128, generator=g).index_fill(
        2, torch.arange(0, 128, 3), float("-inf")
    ),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_float64(regime: str, dtype: torch.dtype) -> None:
    logits = REGIMES[regime](torch.Generator().manual_seed(0)).to(dtype)
    found = node_features(logits, top_k=8, entropy_top_k=10)
    exact = logits.double().log_softmax(-1)
    mass = exact.exp()
    entropy = -torch.where(mass > 0, mass * exact, 0.0).sum(-1)
    # float32 sums of up to 4096 terms: relative rounding of some 1e-6, nats near 10.
    torch.testing.assert_close(found.entropy.double(), entropy, atol=2e-5, rtol=1e-5)
    best = exact.gather(-1, found.top_ids)
    torch.testing.assert_close(found.top_logp.double(), best, atol=1e-5, rtol=1e-5)
    assert torch.equal(best, exact.sort(-1, descending=True).values[..., :8])
    top = logits.double().topk(10, -1).values.log_softmax(-1)
    topk = -torch.where(top > -1e300, top.exp() * top.clamp(min=-1e300), 0.0).sum(-1)
    torch.testing.assert_close(found.topk_entropy.double(), topk, atol=1e-5, rtol=1e-5)


def test_log_probabilities_are_at_most_zero() -> None:
    logits = torch.tensor([[100.0, -100.0, -100.0], [0.0, 0.0, 0.0]])
    found = node_features(logits, top_k=2, entropy_top_k=10)
    assert bool((found.top_logp <= 0).all())
    assert found.top_logp[0, 0] == 0.0
    assert float(found.entropy[1]) == pytest.approx(1.0986123)


def test_entropy_top_k_is_clipped_to_the_vocabulary() -> None:
    found = node_features(torch.zeros(1, 4), top_k=4, entropy_top_k=10)
    torch.testing.assert_close(found.entropy, found.topk_entropy)
