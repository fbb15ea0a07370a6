"""`token_ranks` against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS
from specctl.kernels.token_ranks import token_ranks
from tests.kernels.helpers import poisoned

INF = float("inf")


class Rows(NamedTuple):
    """Logits `[R, V]` and the tokens `[R, K]` that are asked for."""

    logits: Tensor
    tokens: Tensor


def random_rows(vocab_size: int, num_tokens: int, num_rows: int = 5, seed: int = 0) -> Rows:
    """A quarter of the places ask for no token, and the second row for none at all."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=draw)
    tokens = torch.randint(vocab_size, (num_rows, num_tokens), generator=draw)
    tokens[torch.rand(tokens.shape, generator=draw) < 0.25] = -1
    tokens[1] = -1
    return Rows(logits, tokens)


def _ties() -> Rows:
    rows = random_rows(700, 8)
    return Rows(rows.logits.round().clamp(-2, 2), rows.tokens)


def _cut() -> Rows:
    """As top-k leaves them: whole steps without a token, and one row with a single one."""
    rows = random_rows(5000, 4)
    rows.logits[:, 40:4800] = -INF
    rows.logits[3] = -INF
    rows.logits[3, 4900] = 2.0
    return rows


def _shifted() -> Rows:
    """A row's shift moves its sum and its logits alike; float16 ends at 65,504."""
    rows = random_rows(1500, 3)
    return Rows(rows.logits - 3000, rows.tokens)


REGIMES: dict[str, Callable[[], Rows]] = {
    "odd": lambda: random_rows(1001, 7),
    "one token": lambda: random_rows(1, 1),
    "no token": lambda: random_rows(9, 0),
    "steps": lambda: random_rows(4097, 10),
    "widest": lambda: random_rows(1300, 32),
    "ties": _ties,
    "cut": _cut,
    "shifted": _shifted,
}


def check(rows: Rows) -> None:
    """Runs the op on poisoned memory and compares with the definition; counts are exact."""
    with poisoned():
        found = token_ranks(*rows)
    wanted = definition(*(tensor.cpu() for tensor in rows))
    for name, mine, theirs in zip(found._fields, found, wanted, strict=True):
        exact = {"rtol": 1e-6, "atol": 1e-5} if name == "log_sum_exp" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(mine.cpu(), theirs.to(mine.dtype), msg=name, **exact)


def definition(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row by row, as the docstring says."""
    (num_rows, _), x = logits.shape, logits.double()
    sums, best = torch.zeros(num_rows).double(), torch.zeros(num_rows, 2).double()
    found, larger = torch.zeros(tokens.shape).double(), torch.zeros_like(tokens)
    for row in range(num_rows):
        if tokens.shape[1] == 0 or int(tokens[row].max()) < 0:
            continue
        sums[row] = x[row].logsumexp(0)
        best[row] = torch.cat([x[row], x.new_tensor([-INF])]).sort(descending=True).values[:2]
        for place, token in enumerate(tokens[row].tolist()):
            if token >= 0:
                found[row, place] = x[row, token]
                larger[row, place] = int((x[row] > x[row, token]).sum())
    return sums, best, found, larger


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_the_definition(regime: str, dtype: torch.dtype, device: torch.device) -> None:
    rows = REGIMES[regime]()
    check(Rows(rows.logits.to(device, dtype), rows.tokens.to(device)))
