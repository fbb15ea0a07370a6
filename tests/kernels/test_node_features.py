"""`node_features` against loops in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS
from specctl.kernels.dispatch import wanted_backend
from specctl.kernels.node_features import NodeFeatures, node_features
from tests.kernels.helpers import poisoned

INF = float("inf")


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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_float64(regime: str, dtype: torch.dtype, device: torch.device) -> None:
    logits = REGIMES[regime](torch.Generator().manual_seed(3)).to(device, dtype)
    check(logits, min(8, logits.shape[-1]), 10)


@pytest.mark.parametrize("num_values", [2, 40, 1000])
@pytest.mark.parametrize("top_k", [1, 9, 60])
def test_ties_go_to_the_lower_id(top_k: int, num_values: int, device: torch.device) -> None:
    """Ties within the list, at its end, and more of them than the reference looks at first."""
    draw = torch.Generator().manual_seed(num_values)
    if top_k > 32 and wanted_backend() == "fused":
        pytest.skip("the fused kernel keeps 32")
    x = torch.randint(num_values, (4, 200), generator=draw).float()
    check(x.to(device), top_k, 1)


@pytest.mark.filterwarnings("ignore:invalid value")  # inf - inf, as Python
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_spoilt_rows(value: float, device: torch.device) -> None:
    """NaN and +inf spoil their own row's numbers, its ids stay in the vocabulary."""
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1)).to(device)
    logits[1, 11] = value
    with poisoned():
        found = NodeFeatures(*(field.cpu() for field in node_features(logits, 3, 4)))
    for values in (found.top_logp, found.entropy, found.topk_entropy, found.log_sum_exp):
        assert values[1].isnan().all()
        assert values[::2].isfinite().all()
    assert bool(((found.top_ids >= 0) & (found.top_ids < 700)).all())
    check(logits[::2], 3, 4)


def test_a_negative_nan_stays_in_the_vocabulary(device: torch.device) -> None:
    """Bit by bit the lowest of all floats, below the padding behind the vocabulary."""
    x = torch.tensor([[1.0, 0.0, 2.0]], device=device)
    x.view(torch.int32)[0, 1] = -1
    assert x[0, 1].isnan()
    assert node_features(x, 3, 3).top_ids.sort().values.tolist() == [[0, 1, 2]]


def test_rows_of_wider_rows_and_none(device: torch.device) -> None:
    wide = torch.randn(3, 2, 900, generator=torch.Generator().manual_seed(2)).to(device)
    check(wide[:, :, 100:801], 4, 5)
    check(wide[..., ::2], 4, 5)
    assert node_features(wide[:0], 4, 5).top_ids.shape == (0, 2, 4)


def test_every_cut_of_a_row(backend: str, device: torch.device) -> None:
    """Vocabularies of one node of 256, 1,024 and 4,096 logits, few rows and many."""
    if backend == "reference":
        pytest.skip("one cut")
    sizes = (
        [(1, 70_000)] if backend == "interpreter" else [(1, 128_256), (600, 32_000), (2, 300_000)]
    )
    for num_rows, vocab_size in sizes:
        draw = torch.Generator().manual_seed(vocab_size)
        check(torch.randn(num_rows, vocab_size, generator=draw).to(device), 10, 10)


def test_margin_and_ratio() -> None:
    logits = torch.tensor([[4.0, 1.0, 3.0], [2.0, -1.0, -3.0], [-1.0, -3.0, -2.0], [0.0, 0.0, 0.0]])
    found = node_features(logits, 1, 1)
    assert found.margin.tolist() == [1, 3, 1, 0]
    never = float("-inf")  # a ratio of 2 in the third row would pass any threshold
    assert found.ratio.tolist() == [0.75, never, never, never]
    alone = node_features(torch.tensor([[3.0]]), 1, 1)
    assert (alone.margin.item(), alone.ratio.item()) == (float("inf"), never)
