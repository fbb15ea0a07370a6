"""Noise that depends on its purpose alone.

A number is named by four words: a stream (its purpose), a request's seed, an output position, a
token id. Its bits come from integer arithmetic alone, so that every device makes the same ones, in
any order, for any batch, and only where they are needed.

Each word is one step of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): earlier words are the generator's state, and the word is the index of the
output that becomes the next state. The numbers of one position are thus a stretch of a SplitMix64
stream, token by token, which starts at a hashed state. Two stretches of V tokens overlap with a
probability of V / 2^63.
"""

from __future__ import annotations

from specctl.lazy import Tensor, torch

TOKEN_STREAM = 0
"""Stream of the draws of the target's tokens."""
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
UNIFORM_BITS = 52


def noise_keys(seeds: Tensor, positions: Tensor, stream: int = TOKEN_STREAM) -> Tensor:
    """One key for each seed and position.

    Args:
        seeds, positions: int64, of shapes that broadcast; a seed is any 64 bits.

    Returns:
        int64 of the common shape.
    """
    start = torch.zeros((), dtype=torch.int64, device=seeds.device)
    return _step(_step(_step(start, start + stream), seeds), positions)


def uniforms(keys: Tensor, num_tokens: int) -> Tensor:
    """`[..., V]` float64: the numbers of tokens 0 .. V - 1 under each key `[...]`.

    They are the midpoints of 2^52 cells, hence never 0 or 1: the least is 2^-53.
    """
    tokens = torch.arange(num_tokens, device=keys.device)
    return midpoints(_step(keys[..., None], tokens))


def midpoints(bits: Tensor) -> Tensor:
    """The middle of the cell that the highest bits name."""
    cells = _shifted(bits, 64 - UNIFORM_BITS)
    return cells.double().add_(0.5).mul_(2.0**-UNIFORM_BITS)


def gumbels(keys: Tensor, num_tokens: int) -> Tensor:
    """`[..., V]` float64: standard Gumbel numbers, -log(-log u), of the uniforms u.

    The bits of u are the same on every device; the logarithms agree to their last bit or so.
    """
    return uniforms(keys, num_tokens).log_().neg_().log_().neg_()


def _step(state: Tensor, word: Tensor) -> Tensor:
    """Output number `word`, from 0 on, of the SplitMix64 generator in this state."""
    x = state + (word + 1) * GOLDEN
    x = x ^ _shifted(x, 30)
    x *= FIRST
    x ^= _shifted(x, 27)
    x *= SECOND
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """A logical shift to the right; torch's own copies the sign bit."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def signed_seed(seed: int) -> int:
    """A seed of 64 bits as torch holds it: the highest bit is the sign."""
    return (seed + 2**63) % 2**64 - 2**63
