"""EAGLE-2's tree, written plainly, to measure acceptance of a head on known greedy text.

The target is deterministic here, so a round accepts exactly the tree's longest path that agrees
with the target's own text; no verification pass is needed to know it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specctl.runtime.eagle3 import Eagle3Head

NUM_LEVELS, TOP_K, NUM_NODES = 6, 8, 48  # the root is one of the nodes


@dataclass
class Prefix:
    """What the head knows of B texts: keys and values `[B, Hkv, T, D]`, outputs `[B, T, H]`."""

    keys: Tensor
    values: Tensor
    outputs: Tensor


@torch.no_grad()
def read_prefix(head: Eagle3Head, token_ids: Tensor, features: Tensor) -> Prefix:
    """One causal pass over token ids `[B, T]` and the target's features `[B, T, 3 H]`."""
    kept = {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept.update(keys=key, values=value)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    positions = torch.arange(token_ids.shape[1] - 1)[None].expand(len(token_ids), -1)
    outputs = head.block(
        head.embed(token_ids[:, 1:]), head.fuse(features[:, :-1]), positions, attend
    )
    return Prefix(kept["keys"], kept["values"], outputs)


class Tree:
    """One round's tree for B roots; root b is token `root[b]` of its text."""

    def __init__(self, head: Eagle3Head, prefix: Prefix, root: Tensor) -> None:
        self.head, self.prefix, self.root = head, prefix, root
        rows = torch.arange(len(root))
        self.hidden = prefix.outputs[rows, root - 1][:, None]  # [B, W, H]
        self.keys = self.values = prefix.keys[:, :, :0]  # of tree nodes
        self.seen = torch.zeros(len(root), 1, 0, dtype=torch.bool)  # [B, W, M]
        self.joint_logp = torch.zeros(len(root), 1)

    def children(self) -> tuple[Tensor, Tensor]:
        """Target ids and joint log-probabilities `[B, W, K]` of the frontier's best children."""
        logp, ids = self.head.logits(self.hidden).log_softmax(-1).topk(TOP_K)
        return self.head.to_target_ids(ids), logp + self.joint_logp[..., None]

    def descend(self, level: int, parent: Tensor, token_ids: Tensor, joint_logp: Tensor) -> None:
        """Evaluates the next frontier `[B, W]`, children of frontier nodes `parent`."""
        rows, width = token_ids.shape
        own = torch.eye(width, dtype=torch.bool).expand(rows, -1, -1)
        self.seen = torch.cat([_pick(self.seen, parent), own], 2)
        positions = (self.root + level - 1)[:, None].expand(-1, width)
        embeds = self.head.embed(token_ids)
        self.hidden = self.head.block(embeds, _pick(self.hidden, parent), positions, self._attend)
        self.joint_logp = joint_logp

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, key], 2)
        self.values = torch.cat([self.values, value], 2)
        keys = torch.cat([self.prefix.keys, self.keys], 2)
        values = torch.cat([self.prefix.values, self.values], 2)
        before = torch.arange(self.prefix.keys.shape[2]) < self.root[:, None]
        before = before[:, None].expand(-1, self.seen.shape[1], -1)
        mask = torch.cat([before, self.seen], 2)[:, None]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Rows `index` `[B, W]` of `values` `[B, *, X]`."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))


@torch.no_grad()
def accepted_lengths(head: Eagle3Head, prefix: Prefix, token_ids: Tensor, root: Tensor) -> Tensor:
    """Accepted draft tokens `[B]` of one round at `root` `[B]`, the texts `[B, T]` being greedy."""
    tree, rows = Tree(head, prefix, root), torch.arange(len(root))[:, None]
    on_path = torch.ones(len(root), 1, dtype=torch.bool)
    all_logp, all_on_path = [], []
    for level in range(1, NUM_LEVELS + 1):
        ids, joint = tree.children()
        truth = token_ids[rows[:, 0], root + level][:, None, None]
        on_path = ((ids == truth) & on_path[..., None]).flatten(1)
        joint, ids = joint.flatten(1), ids.flatten(1)
        all_logp.append(joint)
        all_on_path.append(on_path)
        best = joint.topk(TOP_K).indices
        on_path = on_path[rows, best]
        if level < NUM_LEVELS:
            tree.descend(level, best // TOP_K, ids[rows, best], joint[rows, best])
    chosen = torch.cat(all_logp, 1).topk(NUM_NODES - 1).indices
    return torch.cat(all_on_path, 1)[rows, chosen].sum(1)


@torch.no_grad()
def walk(
    head: Eagle3Head, token_ids: Tensor, features: Tensor, first: list[int], end: list[int]
) -> list[list[int]]:
    """Accepted lengths of every round of each text, from its first generated token to `end`.

    Args:
        token_ids: `[B, T]`, T at least `max(end) + NUM_LEVELS`, padded with -1 where unknown.
    """
    known = token_ids.clamp(min=0)
    prefix = read_prefix(head, known, features)
    root, rounds = torch.tensor(first), [[] for _ in first]
    while True:
        active = [i for i, stop in enumerate(end) if int(root[i]) < stop - 1]
        if not active:
            return rounds
        part = Prefix(prefix.keys[active], prefix.values[active], prefix.outputs[active])
        accepted = accepted_lengths(head, part, token_ids[active], root[active])
        for i, count in zip(active, accepted.tolist(), strict=True):
            rounds[i].append(count)
        root[active] += accepted + 1
