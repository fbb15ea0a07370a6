"""What is read off rows of logits: `node_features` and `token_ranks` against float64,
`sample_tokens` against its definition in Python's own integers and floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS
from specctl.kernels.dispatch import wanted_backend
from specctl.kernels.node_features import NodeFeatures, best_and_entropy, node_features
from specctl.kernels.sample_tokens import sample_tokens
from specctl.kernels.token_ranks import token_ranks
from specctl.noise import noise_keys, signed_seed
from specctl.runtime import sampling
from tests.kernels.conftest import FUSED
from tests.kernels.helpers import poisoned

INF = math.inf


def _tied(draw: torch.Generator) -> Tensor:
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


LOGITS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "odd": lambda g: 4 * torch.randn(2, 1, 257, generator=g),
    "flat": lambda g: 1e-3 * torch.randn(2, 2049, generator=g),
    "shifted": lambda g: 1e4 + torch.randn(2, 512, generator=g),
    "one token": lambda g: torch.randn(3, 1, generator=g),
    "few tokens": lambda g: torch.randn(2, 5, generator=g),
    "ties": _tied,
    "all equal": lambda _: torch.zeros(1, 4097),
    # All below 0: nodes and leaves behind the last one must not count as 0.
    "all negative": lambda g: -3 - torch.rand(2, 2100, generator=g),
    "masked": _masked,
    "largest": _largest,
}


def check_features(logits: Tensor, top_k: int, entropy_top_k: int) -> NodeFeatures:
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
    with poisoned():
        logp, entropy = best_and_entropy(logits)
    assert torch.equal(logp, found.top_logp[..., 0]), "the same to the last bit"
    assert torch.equal(entropy, found.entropy), "the same to the last bit"
    return found


def _close(found: Tensor, wanted: Tensor, rtol: float = 0.0, atol: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=atol)


def _entropy(logp: Tensor) -> Tensor:
    return -torch.where(logp > -INF, logp.exp() * logp, 0.0).sum(-1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("regime", LOGITS)
def test_features_equal_float64(
    regime: str, dtype: torch.dtype, device: torch.device, *, is_quick: bool
) -> None:
    if not is_quick and dtype != torch.float32 and regime not in ("ties", "largest"):
        pytest.skip("too slow as Python")
    logits = LOGITS[regime](torch.Generator().manual_seed(3)).to(device, dtype)
    check_features(logits, min(8, logits.shape[-1]), 10)


@pytest.mark.parametrize("num_values", [2, 40, 1000])
@pytest.mark.parametrize("top_k", [1, 9, 60])
def test_ties_go_to_the_lower_id(
    top_k: int, num_values: int, device: torch.device, *, is_quick: bool
) -> None:
    """Ties within the list, at its end, and more of them than the reference looks at first."""
    draw = torch.Generator().manual_seed(num_values)
    if top_k > 32 and wanted_backend() == "fused":
        pytest.skip("the fused kernel keeps 32")
    if not is_quick and num_values == 1000:
        pytest.skip("too slow as Python")
    x = torch.randint(num_values, (4, 200), generator=draw).float()
    check_features(x.to(device), top_k, 1)


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
    check_features(logits[::2], 3, 4)


def test_a_negative_nan_stays_in_the_vocabulary(device: torch.device) -> None:
    """Bit by bit the lowest of all floats, below the padding behind the vocabulary."""
    x = torch.tensor([[1.0, 0.0, 2.0]], device=device)
    x.view(torch.int32)[0, 1] = -1
    assert x[0, 1].isnan()
    assert node_features(x, 3, 3).top_ids.sort().values.tolist() == [[0, 1, 2]]


def test_rows_of_wider_rows_and_none(device: torch.device) -> None:
    wide = torch.randn(3, 2, 900, generator=torch.Generator().manual_seed(2)).to(device)
    check_features(wide[:, :, 100:801], 4, 5)
    check_features(wide[..., ::2], 4, 5)
    assert node_features(wide[:0], 4, 5).top_ids.shape == (0, 2, 4)


@FUSED
def test_every_cut_of_a_row(backend: str, device: torch.device) -> None:
    """Vocabularies of one node of 256, 1,024 and 4,096 logits, few rows and many."""
    sizes = (
        [(1, 70_000)] if backend == "interpreter" else [(1, 128_256), (600, 32_000), (2, 300_000)]
    )
    for num_rows, vocab_size in sizes:
        draw = torch.Generator().manual_seed(vocab_size)
        check_features(torch.randn(num_rows, vocab_size, generator=draw).to(device), 10, 10)


# --------------------------------------------------------------------------- ranks of tokens


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


RANKED: dict[str, Callable[[], Rows]] = {
    "odd": lambda: random_rows(1001, 7),
    "one token": lambda: random_rows(1, 1),
    "no token": lambda: random_rows(9, 0),
    "steps": lambda: random_rows(4097, 10),
    "widest": lambda: random_rows(1300, 32),
    "ties": _ties,
    "cut": _cut,
    "shifted": _shifted,
}


def check_ranks(rows: Rows) -> None:
    """Runs the op on poisoned memory and compares with the definition; counts are exact."""
    with poisoned():
        found = token_ranks(*rows)
    wanted = ranks(*(tensor.cpu() for tensor in rows))
    for name, mine, theirs in zip(found._fields, found, wanted, strict=True):
        exact = {"rtol": 1e-6, "atol": 1e-5} if name == "log_sum_exp" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(mine.cpu(), theirs.to(mine.dtype), msg=name, **exact)


def ranks(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
@pytest.mark.parametrize("regime", RANKED)
def test_ranks_equal_their_definition(
    regime: str, dtype: torch.dtype, device: torch.device
) -> None:
    rows = RANKED[regime]()
    check_ranks(Rows(rows.logits.to(device, dtype), rows.tokens.to(device)))


# --------------------------------------------------------------------------- draws

MASK = 2**64 - 1


def score_of(key: int, token: int) -> float:
    """The Gumbel number of a token: one output of SplitMix64, the middle of its cell."""
    x = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return -math.log(-math.log(((x >> 12) + 0.5) / 2**52))


def looped(logits: Tensor, keys: Tensor, greedy: Tensor) -> list[int]:
    """The docstring."""
    found = []
    for row, key, is_greedy in zip(logits.double().tolist(), keys.tolist(), greedy, strict=True):
        score = row if is_greedy else [x + score_of(key % 2**64, v) for v, x in enumerate(row)]
        found.append(max(range(len(row)), key=lambda v: (score[v], -v)))
    return found


def drawn_rows(
    seed: int, num_rows: int, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, keys of all 64 bits, and every third row greedy; row 1 is cut by top-p, row 2 has one
    token left, row 3 ties throughout."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_rows, vocab_size, generator=draw)
    logits[1, torch.rand(vocab_size, generator=draw) < 0.9] = -INF
    logits[2] = -INF
    logits[2, vocab_size - 1] = -3.0
    logits[3] = 1.5
    words = torch.randint(-(2**62), 2**62, (2, num_rows), generator=draw)
    keys = words[0] * 2 + words[1]
    return logits.to(dtype), keys, torch.arange(num_rows) % 3 == 0


def check_draws(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows that are slices of wider ones, behind poisoned outputs."""
    logits, keys, greedy = drawn_rows(vocab_size, num_rows, vocab_size, dtype)
    wide = torch.cat([logits, torch.full((num_rows, 3), 99.0, dtype=dtype)], 1).to(device)
    with poisoned():
        found = sample_tokens(wide[:, :vocab_size], keys.to(device), greedy.to(device))
    assert found.dtype == torch.int64
    assert found.tolist() == looped(logits, keys, greedy)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 1300, 5000])
def test_draws_equal_their_definition(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_draws(9, vocab_size, dtype, device)


def test_it_draws_what_the_runtime_draws() -> None:
    """The runtime draws from noise of its own making where the kernel does not run."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(21, 900, generator=generator)
    positions = torch.randint(1, 5, (21,), generator=generator)
    seeds = torch.tensor([signed_seed(seed) for seed in (0, 17, 2**64 - 1)]).repeat(7)
    drawn = sampling.gumbel_draw(logits, seeds, positions)
    never = torch.zeros(21, dtype=torch.bool)
    assert torch.equal(sample_tokens(logits, noise_keys(seeds, positions), never), drawn)
