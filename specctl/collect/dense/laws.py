"""The target over one text: its states, and its laws in a window that moves with the roots.

The logits of a long text over a large vocabulary would fill the memory, so only those that the
trees of one chunk of roots can ask for stand at a time: `READ_TOKENS` at most are made at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specctl.collect.dense.drafters import READ_TOKENS
from specctl.runtime.attention import causal_inner
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.observe import Sampling
from specctl.runtime.round import check_finite
from specctl.runtime.sampling import warp_logits


@dataclass(frozen=True)
class Laws:
    """The target's next-token laws after Q tokens of the text, the first of them `first`.

    Attributes:
        logits: `[Q, V]` float32, raw. ordered: the same, each row ascending.
        logp: `[Q, V]` float32, of the law that is drawn from (after temperature, top-k, top-p).
        entropy: `[Q]` float32, nats, of that law.
    """

    first: int
    logits: Tensor
    ordered: Tensor
    logp: Tensor
    entropy: Tensor


def laws_of(first: int, logits: Tensor, sampling: Sampling) -> Laws:
    """The laws that rows of raw logits `[Q, V]` mean."""
    logits = logits.float()
    check_finite(logits.amax(-1))
    logp = warped_logp(logits, sampling)
    return Laws(first, logits, ascending(logits), logp, entropy_of(logp))


def ascending(logits: Tensor) -> Tensor:
    """Each row sorted; numpy's vectorised sort is six times torch's on a CPU."""
    if logits.is_cuda:
        return logits.sort(-1).values
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1))


def warped_logp(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[R, V]` float32: log of the law drawn from; -inf where top-k or top-p cut it."""
    return warp_logits(logits[None], [sampling])[0].float().log_softmax(-1)


def entropy_of(logp: Tensor) -> Tensor:
    """`[R]` nats; what has no probability adds nothing."""
    entropy: Tensor = torch.special.entr(logp.exp()).sum(-1)
    return entropy


class TargetText:
    """Reads one text with the target, in order.

    Args:
        token_ids: `[T]`, prompt and response. num_prompt: tokens of the prompt, whose laws are
            not asked for.

    Attributes:
        features: `[T', ·]` captured states of what was read, or None.
    """

    def __init__(
        self, model: CachedModel, token_ids: Tensor, num_prompt: int, sampling: Sampling
    ) -> None:
        model.allocate(1, len(token_ids))
        self._model, self._text, self._sampling = model, token_ids, sampling
        self._num_read, self._first = 0, num_prompt
        self._states: list[Tensor] = []
        self._logits = torch.empty(0, 0)
        for start in range(0, num_prompt, READ_TOKENS):
            self._read(min(start + READ_TOKENS, num_prompt), last_only=True)

    @property
    def features(self) -> Tensor | None:
        if not self._states:
            return None
        self._states = [torch.cat(self._states)]
        return self._states[0]

    def laws(self, first: int, end: int) -> Laws:
        """The laws after tokens `first` .. `end - 1`; later windows never go back."""
        kept = [self._logits[first - self._first :]] if len(self._logits) else []
        while self._num_read < end:
            kept.append(self._read(min(self._num_read + READ_TOKENS, end), last_only=False))
        self._logits, self._first = torch.cat(kept), first
        return laws_of(first, self._logits, self._sampling)

    def _read(self, end: int, *, last_only: bool) -> Tensor:
        places = torch.arange(self._num_read, end, device=self._model.device)
        result = self._model.forward(
            0,
            [self._num_read],
            self._text[places][None],
            places[None],
            causal_inner(len(places), self._model.device),
            last_only=last_only,
        )
        self._num_read = end
        if result.features is not None:
            self._states.append(result.features[0])
        return result.logits[0]
