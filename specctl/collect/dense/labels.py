"""What the text says of the trees drafted along it: which paths it takes, and where it ends.

    text  a b c ■      tree of a  ┬ b ─ c ─ d     b, c: on the path; d: the text ended, unknown
                                  └ x ─ c         x: off the path, hence its c too

Greedy or sampled, the text is the target's draw, so "this path is a prefix of the continuation"
is the label (notes/state-of-the-art.md, section 3: replay by coupling).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specctl.collect.dense.drafters import DenseDrafter
from specctl.collect.dense.laws import Laws, warped_logp
from specctl.divergence import js_distance
from specctl.runtime.observe import Sampling
from specctl.tree import TokenTree, gather

NO_TOKEN = -1
"""Beyond the end of the text."""


@dataclass(frozen=True)
class Labels:
    """Of every node of P trees, `[P, N]` bool; false in empty slots.

    Attributes:
        on_path: the path from the root to the node is a prefix of the continuation.
        unknown: the text followed the path, and ended before it could tell.
        seen: the parent is on the path, so that the target spoke about the node.
        told: and so did the text.
    """

    on_path: Tensor
    unknown: Tensor
    seen: Tensor
    told: Tensor

    @property
    def num_accepted(self) -> Tensor:
        """`[P]` int64: length of the longest path that the text takes."""
        return self.on_path.sum(1) - 1


def continuations(text: Tensor, roots: range, depth: int) -> Tensor:
    """`[P, D]` int64: the tokens after each root, `NO_TOKEN` beyond the text `[T]`."""
    padded = torch.nn.functional.pad(text, (0, depth), value=NO_TOKEN)
    return padded.unfold(0, depth, 1)[roots.start + 1 : roots.stop + 1]


def label_paths(tree: TokenTree, continuation: Tensor) -> Labels:
    """Follows the text down every tree, a level at a time.

    Args:
        tree: `[P, N]`, level by level, all rows with the same levels (empty slots included).
        continuation: `[P, D]`, see `continuations`.
    """
    names = ("on_path", "unknown", "seen", "told")
    labels = Labels(*(torch.zeros_like(tree.valid) for _ in names))
    labels.on_path[:, 0] = True
    for depth, level in _levels(tree.depth[0]):
        wanted = continuation[:, depth - 1, None]
        parent = tree.parent[:, level]
        seen = gather(labels.on_path, parent, 0)
        labels.seen[:, level] = seen
        labels.told[:, level] = seen & (wanted != NO_TOKEN)
        labels.on_path[:, level] = seen & (tree.token_ids[:, level] == wanted)
        ended = seen & (wanted == NO_TOKEN)
        labels.unknown[:, level] = ended | gather(labels.unknown, parent, 0)
    return labels


def _levels(depth: Tensor) -> Iterator[tuple[int, slice]]:
    """Each drafted level's slots, given the depth of every slot, ascending."""
    starts = torch.bincount(depth).cumsum(0).tolist()
    return ((level, slice(*ends)) for level, ends in enumerate(pairwise(starts), start=1))


class PathObserver:
    """A drafter that looks, wherever the text takes a drafted path, how far the laws are apart.

    Args:
        roots: indices of the P roots in the text.

    Attributes:
        js_distance: `[P, D]` float32: at the node on the path at each depth, NaN where none was
            expanded.
    """

    def __init__(
        self,
        drafter: DenseDrafter,
        laws: Laws,
        sampling: Sampling,
        roots: range,
        continuation: Tensor,
    ) -> None:
        self._drafter, self._laws, self._sampling = drafter, laws, sampling
        self._continuation, self._level = continuation, 0
        device = continuation.device
        self._at = torch.arange(roots.start, roots.stop, device=device) - laws.first
        self._target_ids = drafter.to_target_ids(torch.arange(drafter.vocab_size, device=device))
        self._column = torch.zeros_like(self._at)  # of the node on the path; -1: there is none
        self.js_distance = torch.full(continuation.shape, float("nan"), device=device)
        self.to_target_ids = drafter.to_target_ids

    def begin_round(self, num_rows: int) -> Tensor:
        logits = self._drafter.begin_round(num_rows)
        self._observe(logits[:, None])
        return logits

    def expand(self, token_ids: Tensor, parent_slot: Tensor) -> Tensor:
        follows = parent_slot == self._column[:, None]
        follows &= token_ids == self._continuation[:, self._level - 1, None]
        found, column = follows.to(torch.int8).max(1)
        self._column = column.masked_fill(found == 0, -1)
        logits = self._drafter.expand(token_ids, parent_slot)
        self._observe(logits)
        return logits

    def _observe(self, logits: Tensor) -> None:
        """Compares the laws after the nodes on the path; `[P, W, V]` logits of a level."""
        [rows] = (self._column >= 0).nonzero(as_tuple=True)
        draft_logp = warped_logp(logits[rows, self._column[rows]].float(), self._sampling)
        target_logp = self._laws.logp[self._at[rows] + self._level]
        draft_logp, target_logp = draft_logp.log_softmax(-1), target_logp.float().log_softmax(-1)
        distance = js_distance(draft_logp, target_logp, self._target_ids)
        self.js_distance[rows, self._level] = distance
        self._level += 1
