"""`js_distance` against its definition in float64, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.kernels.js_distance import js_distance
from tests.kernels.poison import poisoned

INF = float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Laws:
    """Logits of both models and the target's ids of the draft tokens."""

    draft: Tensor
    target: Tensor
    target_ids: Tensor


def random_laws(draft_size: int, vocab_size: int, num_rows: int = 3, seed: int = 0) -> Laws:
    """Laws that agree a little: the drafter's logits are the target's, with noise."""
    draw = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(num_rows, vocab_size, generator=draw)
    ids = torch.randperm(vocab_size, generator=draw)[:draft_size]
    return Laws(target[:, ids] + torch.randn(num_rows, draft_size, generator=draw), target, ids)


def _cut() -> Laws:
    """As top-k leaves them: different tokens, and one row where nothing is shared."""
    laws = random_laws(40, 97)
    laws.target[:, 50:] = -INF
    laws.draft[:, ::2] = -INF
    laws.target[2, laws.target_ids] = -INF
    return laws


def _late() -> Laws:
    """Whole splits of both vocabularies without a token."""
    laws = random_laws(5000, 9000, num_rows=1)
    laws.draft[:, :4500] = -INF
    laws.target[:, :4200] = -INF
    return laws


def _equal() -> Laws:
    laws = random_laws(300, 300)
    return Laws(laws.target[:, laws.target_ids], laws.target, laws.target_ids)


def _shifted() -> Laws:
    """Softmax does not see a shift; float16 ends at 65,504."""
    laws = random_laws(513, 2047)
    return Laws(laws.draft + 100, laws.target - 2000, laws.target_ids)


REGIMES: dict[str, Callable[[], Laws]] = {
    "odd": lambda: random_laws(257, 1001),
    "one token": lambda: random_laws(1, 5),
    "all tokens": lambda: random_laws(97, 97),
    "splits": lambda: random_laws(4097, 9000),
    "cut": _cut,
    "late": _late,
    "equal": _equal,
    "shifted": _shifted,
}


def check(laws: Laws) -> Tensor:
    """Runs the op on poisoned memory and compares with the definition.

    A float32 sum of terms up to 1 is good to 1e-6, and its root to that near 1.
    """
    with poisoned():
        found = js_distance(laws.draft, laws.target, laws.target_ids).cpu().double()
    wanted = definition(*(x.cpu() for x in (laws.draft, laws.target, laws.target_ids)))
    torch.testing.assert_close(found.square(), wanted, rtol=0, atol=1e-6)
    return found


def definition(draft: Tensor, target: Tensor, target_ids: Tensor) -> Tensor:
    """The square of the distance: half the relative entropies to the middle, in bits."""
    p, q = target.double().softmax(-1), torch.zeros(target.shape, dtype=torch.float64)
    q[:, target_ids] = draft.double().softmax(-1)
    middle = (p + q) / 2
    return (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2


def _relative_entropy(p: Tensor, middle: Tensor) -> Tensor:
    return torch.where(p > 0, p * (p / middle).log2(), 0.0).sum(-1)


def moved(laws: Laws, device: torch.device, dtype: torch.dtype) -> Laws:
    """On a device; both models' logits in one dtype."""
    return Laws(
        laws.draft.to(device, dtype), laws.target.to(device, dtype), laws.target_ids.to(device)
    )


def check_nan(device: torch.device, side: str) -> None:
    """NaN in either model's logits is NaN in its row alone."""
    laws = moved(random_laws(64, 500), device, torch.float32)
    getattr(laws, side)[1, 3] = float("nan")
    found = js_distance(laws.draft, laws.target, laws.target_ids)
    assert found.isnan().tolist() == [False, True, False]
