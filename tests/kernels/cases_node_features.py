"""`node_features` against loops in float64, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specctl.kernels.node_features import NodeFeatures, node_features
from tests.kernels.poison import poisoned

INF = float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _ties(draw: torch.Generator) -> Tensor:
    """Lists that end within a tie: of a few values, of zeros of both signs, across leaves.

    In the last row the third best stands twice, behind the second best and behind the best, which
    comes later.
    """
    x = torch.randint(-2, 3, (3, 300), generator=draw).float()
    x[1] = 0.0
    x[1, ::2] = -0.0
    x[2, [200, 201, 10, 11]] = torch.tensor([9.0, 7.0, 8.0, 7.0])
    return x


def _masked(draw: torch.Generator) -> Tensor:
    """Fewer finite logits than are asked for, in the last places, and whole splits without."""
    x = torch.full((2, 3000), -INF)
    x[0, -5:] = torch.randn(5, generator=draw)
    x[1, ::700] = 1.0
    return x


def _largest(draw: torch.Generator) -> Tensor:
    """Beyond the range of exponentials; ±60,000 are finite in float16 too."""
    x = 5e4 * torch.randn(2, 1030, generator=draw).clamp(-1.2, 1.2)
    x[0, 7] = -INF
    return x


REGIMES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "odd": lambda g: 4 * torch.randn(2, 1, 257, generator=g),
    "flat": lambda g: 1e-3 * torch.randn(2, 2049, generator=g),
    "shifted": lambda g: 1e4 + torch.randn(2, 512, generator=g),
    "one token": lambda g: torch.randn(3, 1, generator=g),
    "few tokens": lambda g: torch.randn(2, 5, generator=g),
    "ties": _ties,
    "all equal": lambda _: torch.zeros(1, 4097),
    # All below 0: nodes and leaves behind the last one must not count as 0.
    "all negative": lambda g: -3 - torch.rand(2, 2100, generator=g),
    "masked": _masked,
    "largest": _largest,
}


def check(logits: Tensor, top_k: int, entropy_top_k: int) -> NodeFeatures:
    """Runs the op on poisoned memory and compares every field with float64.

    The ids must be those of a stable sort. A float32 sum of V terms is good to some 1e-6, and a
    log-probability to the rounding of its logit's distance from the best.
    """
    with poisoned():
        found = node_features(logits, top_k, entropy_top_k)
    x = logits.double()
    values, order = x.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.top_ids, order[..., :top_k])
    logp = x.log_softmax(-1)
    _close(found.top_logp, logp.gather(-1, found.top_ids), rtol=3e-7)
    assert bool((found.top_logp <= 0).all())
    _close(found.entropy, _entropy(logp), atol=3e-6)
    _close(found.topk_entropy, _entropy(values[..., :entropy_top_k].log_softmax(-1)), atol=2e-6)
    _close(found.log_sum_exp, x.logsumexp(-1), rtol=3e-7)
    two = torch.cat([values[..., :2], torch.full_like(values[..., :1], -INF)], -1)[..., :2]
    assert torch.equal(found.top_two.double(), two)
    return found


def _close(found: Tensor, wanted: Tensor, rtol: float = 0.0, atol: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=atol)


def _entropy(logp: Tensor) -> Tensor:
    return -torch.where(logp > -INF, logp.exp() * logp, 0.0).sum(-1)


def drawn(regime: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rows of a regime."""
    return REGIMES[regime](torch.Generator().manual_seed(3)).to(device, dtype)


def spoilt_rows(value: float) -> Tensor:
    """The second of three rows holds a value that no row may; the others are sound."""
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    x[1, 11] = value
    return x


def check_spoilt(logits: Tensor) -> None:
    """NaN and +inf spoil their own row's numbers, its ids stay in the vocabulary."""
    with poisoned():
        found = NodeFeatures(*(field.cpu() for field in node_features(logits, 3, 4)))
    for values in (found.top_logp, found.entropy, found.topk_entropy, found.log_sum_exp):
        assert values[1].isnan().all()
        assert values[::2].isfinite().all()
    assert bool(((found.top_ids >= 0) & (found.top_ids < 700)).all())
    check(logits[::2], 3, 4)


def check_negative_nan(device: torch.device) -> None:
    """Bit by bit the lowest of all floats, below what stands for places behind the vocabulary."""
    x = torch.tensor([[1.0, 0.0, 2.0]], device=device)
    x.view(torch.int32)[0, 1] = -1
    assert x[0, 1].isnan()
    assert node_features(x, 3, 3).top_ids.sort().values.tolist() == [[0, 1, 2]]
