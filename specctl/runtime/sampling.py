"""How the target's token is drawn at a node: argmax, or inversion of one uniform a position.

A request owns a stream of uniforms, one per output position, so its text depends on its seed
and on the target alone: not on the policy, the tree, the round boundaries or who shares its
batch, up to the rounding of its logits. Drawing the target's token and following the child that
matches *is* point-mass verification (design.md, section 2): the text follows the target's law
for any tree.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specctl.runtime.observe import Sampling


def uniforms(sampling: Sampling, count: int) -> Tensor:
    """The first `count` uniforms of a request's stream: `[count]` float64 in [0, 1).

    Philox is counter-based: the stream is a function of the seed and nothing else.
    """
    generator = np.random.Generator(np.random.Philox(sampling.seed))
    return torch.from_numpy(generator.random(count))


def warp_logits(logits: Tensor, samplings: list[Sampling]) -> Tensor:
    """Temperature, then top-k, then top-p, per row; greedy rows are returned as they are.

    The order and the rules are those of transformers' logits processors: top-k keeps ties,
    top-p keeps the smallest set of likeliest tokens whose mass reaches p.

    Args:
        logits: `[B, N, V]`.

    Returns:
        `[B, N, V]` float32, -inf where excluded; `logits` itself if all rows are greedy.
    """
    if all(sampling.greedy for sampling in samplings):
        return logits
    rows = [_warp_row(row, s) for row, s in zip(logits.float(), samplings, strict=True)]
    return torch.stack(rows)


def _warp_row(logits: Tensor, sampling: Sampling) -> Tensor:
    if sampling.greedy:
        return logits
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        weakest = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < weakest, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1, dtype=torch.float64).cumsum(-1)
        before = torch.nn.functional.pad(mass[..., :-1], (1, 0))
        excluded = torch.zeros_like(ordered, dtype=torch.bool)
        excluded.scatter_(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(excluded, float("-inf"))
    return logits


def draw(warped: Tensor, coins: Tensor, samplings: list[Sampling]) -> Tensor:
    """The target's token after every node.

    Args:
        warped: `[B, N, V]` from `warp_logits`.
        coins: `[B, N]` float64 uniforms, the coin of each node's *output position*: nodes of
            one level share it, which is sound because at most one of them is reached.

    Returns:
        `[B, N]` int64; argmax in greedy rows, where coins are ignored.
    """
    choice = warped.argmax(-1)
    for row, sampling in enumerate(samplings):
        if not sampling.greedy:
            choice[row] = invert(warped[row], coins[row])
    return choice


def invert(logits: Tensor, coins: Tensor) -> Tensor:
    """`[N]` int64: the token whose cumulative-probability interval holds the coin.

    Token v owns [F(v - 1), F(v)) in vocabulary order. float64, so that 10^5 terms add up to
    better than any coin can tell; a token of probability 0 owns an empty interval.
    """
    mass = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    total = mass[:, -1:]
    # Rounding must not lift a coin just below 1 to the total, beyond the last owner.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum(coins[:, None] * total, below_total)
    return torch.searchsorted(mass, wanted, right=True)[:, 0]
