"""How the target's token is drawn at a node: argmax, or an exponential race.

Every token of the vocabulary runs for an exponential time of rate its probability, and the first
to arrive is drawn: argmin of E / p, the same as the argmax of log p plus a Gumbel number. That is
exactly the target's law (Yellott, J. Math. Psychol. 15, 1977; Maddison, Tarlow and Minka, NeurIPS
2014). The noise is keyed by the request's seed, the output position and the token
(`specctl.noise`), so a text depends on its seed and on the target alone: not on the policy, the
tree, the round boundaries or who shares its batch. Logits that round differently in another batch
turn a draw only where the two first arrive within that rounding of each other.

Drawing the target's token and following the child that matches *is* point-mass verification
(design.md, section 2): the text follows the target's law for any tree.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specctl.noise import gumbels, noise_keys, signed_seed
from specctl.runtime.observe import Sampling


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


class Draw(Protocol):
    """How the tokens of one sampled request are drawn; `race` unless a test counts outcomes."""

    def __call__(self, law: Tensor, seed: int, positions: Tensor) -> Tensor:
        """The target's token after every node.

        Args:
            law: `[N, V]` logits after temperature, top-k and top-p.
            seed: the request's own.
            positions: `[N]` int64, output position of each token. Nodes of one level share
                theirs, which is sound because at most one of them is reached.

        Returns:
            `[N]` int64.
        """
        ...


def race(law: Tensor, seed: int, positions: Tensor) -> Tensor:
    """See `Draw`; in float64, where ties do not happen. Noise is made once a position."""
    needed, place = torch.unique(positions, return_inverse=True)
    keys = noise_keys(torch.tensor(signed_seed(seed), device=law.device), needed)
    return gumbels(keys, law.shape[-1]).index_select(0, place).add_(law).argmax(-1)


def draw(
    law: Tensor, likeliest: Tensor, samplings: list[Sampling], positions: Tensor, by: Draw = race
) -> Tensor:
    """The target's token after every node of a batch.

    Args:
        law: `[B, N, V]` from `warp_logits`.
        likeliest: `[B, N]` int64, its argmax, which greedy rows take.
        positions: `[B, N]` int64, output position of each token.
        by: how sampled rows draw.

    Returns:
        `[B, N]` int64.
    """
    rows = [
        best if sampling.greedy else by(logits, sampling.seed, where)
        for logits, best, sampling, where in zip(law, likeliest, samplings, positions, strict=True)
    ]
    return torch.stack(rows)
