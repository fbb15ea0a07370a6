"""The target's token at a node: argmax, or by Gumbel noise.

A sampled token is the argmax of log p plus standard Gumbel numbers, which has exactly the
target's distribution (Yellott, J. Math. Psychol. 15, 1977; Maddison, Tarlow and Minka, NeurIPS
2014). The noise is a function of the request's seed, the output position and the token
(`specctl.noise`), so a text depends on its seed and the target alone, and not on policy, tree,
rounds or batch. Logits that round differently in another batch change a draw only if the two best
are within that rounding of each other.

Drawing the target's token and following the child that matches *is* point-mass verification
(design.md, section 3): the text follows the target's distribution for any tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.sample_tokens import sample_tokens
from specctl.noise import TOKEN_STREAM, gumbels, noise_keys, signed_seed
from specctl.runtime.requests import Sampling

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Draws tokens `[T]` from processed logits `[T, V]`, by seeds and output positions, `[T]` int64
each. Nodes of one level share a position, which is sound, as at most one of them is reached."""


@dataclass(frozen=True)
class SamplingTable:
    """Sampling settings of B requests, on the host and as tensors."""

    choices: tuple[Sampling, ...]
    seeds: Tensor  # `[B]` int64; the highest bit is the sign
    top_k: Tensor  # `[B]` int64
    greedy: Tensor  # `[B]` bool
    temperature: Tensor  # `[B]` float64, 1 in greedy rows
    top_p: Tensor  # `[B]` float64

    @classmethod
    def of(cls, choices: Sequence[Sampling], device: torch.device | str) -> SamplingTable:
        integers = [[signed_seed(s.seed), s.top_k, int(s.greedy)] for s in choices]
        numbers = [[1.0 if s.greedy else s.temperature, s.top_p] for s in choices]
        seeds, top_k, greedy = torch.tensor(integers, device=device).view(-1, 3).T
        numbers_at = torch.tensor(numbers, dtype=torch.float64, device=device).view(-1, 2).T
        return cls(tuple(choices), seeds, top_k, greedy.bool(), *numbers_at)

    @property
    def is_greedy(self) -> bool:
        return all(choice.greedy for choice in self.choices)

    def process(self, logits: Tensor, row: Tensor) -> Tensor:
        """Applies temperature, then top-k, then top-p; rows of greedy requests stay unchanged.

        Order and rules are those of transformers' logits processors: top-k keeps ties, top-p keeps
        the smallest set of likeliest tokens whose mass reaches p.

        Args:
            logits: `[T, V]`. row: `[T]` int64, the request of each.

        Returns:
            `[T, V]` float32, -inf where excluded; `logits` itself if all requests are greedy.
        """
        if self.is_greedy:
            return logits
        logits, size = logits.float() / self.temperature[row, None].float(), logits.shape[-1]
        if all(c.greedy or (c.top_k == 0 and c.top_p == 1.0) for c in self.choices):
            return logits
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        top_k, top_p = self.top_k[row, None], self.top_p[row, None]
        last = torch.where((top_k > 0) & (top_k < size), top_k, size) - 1
        ordered = ordered.masked_fill(ordered < ordered.gather(-1, last), float("-inf"))
        mass = ordered.softmax(-1, dtype=torch.float64).cumsum(-1)
        before = torch.nn.functional.pad(mass[..., :-1], (1, 0))
        outside = (ordered == float("-inf")) | ((before >= top_p) & (top_p < 1.0))
        excluded = torch.zeros_like(outside).scatter_(-1, index, outside)
        return logits.masked_fill_(excluded & ~self.greedy[row, None], float("-inf"))

    def draw(
        self, processed: Tensor, best: Tensor, row: Tensor, positions: Tensor, by: Draw
    ) -> Tensor:
        """`[T]` int64: the target's token after each node.

        Args:
            processed: `[T, V]`, of `process`. best: `[T]`, its argmax, which greedy requests take.
            positions: `[T]` int64, output position of each token.
        """
        if self.is_greedy:
            return best
        return torch.where(self.greedy[row], best, by(processed, self.seeds[row], positions))


def gumbel_draw(
    processed: Tensor, seeds: Tensor, positions: Tensor, stream: int = TOKEN_STREAM
) -> Tensor:
    """Draws tokens by Gumbel noise of a stream, in float64, which has no ties; see `Draw`."""
    keys = noise_keys(seeds, positions, stream)
    if runs_fused("sample_tokens", processed, keys):
        return sample_tokens(processed, keys, torch.zeros_like(keys, dtype=torch.bool))
    needed, place = keys.unique(return_inverse=True)  # noise is made once a position
    return gumbels(needed, processed.shape[-1])[place].add_(processed).argmax(-1)


def process_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[T, V]`: processed logits of one request; `logits` itself if it is greedy."""
    table = SamplingTable.of([sampling], logits.device)
    return table.process(logits, torch.zeros_like(logits[:, 0], dtype=torch.int64))
