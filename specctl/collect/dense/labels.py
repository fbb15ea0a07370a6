"""The target's distributions along a text, and the labels that the text gives to drafted trees.

    text  a b c ■      tree of a  ┬ b ─ c ─ d     b, c: on the path; d: the text ended, unknown
                                  └ x ─ c         x: off the path, hence its c too

Greedy or sampled, the text is the target's draw, so the label of a node is whether its path is a
prefix of the continuation (replay by coupling). Logits of a long text over a large vocabulary would
fill the memory: they are made `READ_TOKENS` at a time and kept for one chunk of roots.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np
import torch
from torch import Tensor

from specctl.collect.dense.drafters import READ_TOKENS
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.requests import Sampling
from specctl.runtime.round import check_finite
from specctl.runtime.sampling import process_logits
from specctl.tree import DraftPool, TokenTree, gather

NO_TOKEN = -1
"""Stands after the end of the text."""


@dataclass(frozen=True)
class Labels:
    """Labels of the nodes of P trees, `[P, N]` bool; false in empty slots."""

    on_path: Tensor  # the path from the root to the node is a prefix of the continuation
    unknown: Tensor  # the text followed the path and ended before this node
    judged: Tensor  # the parent is on the path: the target has a distribution over the node
    continued: Tensor  # judged, and the text goes on there

    @property
    def num_accepted(self) -> Tensor:
        """`[P]` int64: length of the longest path that the text takes."""
        return self.on_path.sum(1) - 1


def continuations(text: Tensor, roots: range, depth: int) -> Tensor:
    """`[P, D]` int64: the tokens after each root, `NO_TOKEN` beyond the text `[T]`."""
    padded = torch.nn.functional.pad(text, (0, depth), value=NO_TOKEN)
    return padded.unfold(0, depth, 1)[roots.start + 1 : roots.stop + 1]


def label_paths(tree: DraftPool | TokenTree, continuation: Tensor) -> Labels:
    """Follows the text down every tree, level by level.

    Args:
        tree: `[P, N]`, level by level, all rows with the same levels (empty slots included).
        continuation: `[P, D]`, see `continuations`.
    """
    names = ("on_path", "unknown", "judged", "continued")
    labels = Labels(*(torch.zeros_like(tree.valid) for _ in names))
    labels.on_path[:, 0] = True
    ends = torch.bincount(tree.depth[0]).cumsum(0).tolist()  # of each level's slots, ascending
    for depth, level in enumerate(starmap(slice, pairwise(ends))):
        wanted = continuation[:, depth, None]
        parent = tree.parent[:, level]
        judged = gather(labels.on_path, parent, 0)
        labels.judged[:, level] = judged
        labels.continued[:, level] = judged & (wanted != NO_TOKEN)
        labels.on_path[:, level] = judged & (tree.token_ids[:, level] == wanted)
        ended = judged & (wanted == NO_TOKEN)
        labels.unknown[:, level] = ended | gather(labels.unknown, parent, 0)
    return labels


# --------------------------------------------------------------------------- the target


@dataclass(frozen=True)
class TargetDistributions:
    """The target's next-token distributions after Q tokens of the text, from token `first` on."""

    first: int
    logits: Tensor  # `[Q, V]` float32, raw
    ordered: Tensor  # the logits, each row ascending
    logp: Tensor  # `[Q, V]` float32, after temperature, top-k and top-p
    entropy: Tensor  # `[Q]` float32, nats, of `logp`


def target_distributions(first: int, logits: Tensor, sampling: Sampling) -> TargetDistributions:
    """The distributions of raw logits `[Q, V]`."""
    logits = logits.float()
    check_finite(logits.amax(-1))
    # Of the sampled distribution: -inf where top-k or top-p cut.
    logp = process_logits(logits, sampling).float().log_softmax(-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)  # tokens without probability add nothing
    if logits.device.type == "cpu":  # numpy's vectorised sort is six times as fast
        ordered = torch.from_numpy(np.sort(logits.numpy(), axis=-1))
    else:
        ordered = logits.sort(-1).values
    return TargetDistributions(first, logits, ordered, logp, entropy)


class TargetText:
    """Reads one text with the target, in order.

    Args:
        token_ids: `[T]`, prompt and response.
        num_prompt: tokens of the prompt; their distributions are not kept.
    """

    def __init__(
        self, model: CachedModel, token_ids: Tensor, num_prompt: int, sampling: Sampling
    ) -> None:
        model.allocate(1, len(token_ids))
        self._model, self._text, self.sampling = model, token_ids, sampling
        self._num_read, self._first = 0, num_prompt
        self._states: list[Tensor] = []
        self._logits = torch.empty(0, 0)
        for start in range(0, num_prompt, READ_TOKENS):
            self._read(min(start + READ_TOKENS, num_prompt), last_only=True)

    @property
    def features(self) -> Tensor | None:
        """`[T', ·]` captured states of the tokens read, if the model captures any."""
        if not self._states:
            return None
        self._states = [torch.cat(self._states)]
        return self._states[0]

    def distributions(self, first: int, end: int) -> TargetDistributions:
        """The distributions after tokens `first` .. `end - 1`; `first` never decreases."""
        kept = [self._logits[first - self._first :]] if len(self._logits) else []
        while self._num_read < end:
            kept.append(self._read(min(self._num_read + READ_TOKENS, end), last_only=False))
        self._logits, self._first = torch.cat(kept), first
        return target_distributions(first, self._logits, self.sampling)

    def _read(self, end: int, *, last_only: bool) -> Tensor:
        token_ids = self._text[None, self._num_read : end]
        result = self._model.extend(0, self._num_read, token_ids, last_only=last_only)
        self._num_read = end
        if result.features is not None:
            self._states.append(result.features)
        return result.logits
