"""Trees checked, and references of what kernels derive from them."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.tree import ROOT, TokenTree, gather, path_sum


def joint_logp(tree: TokenTree) -> Tensor:
    """`[B, N]` float32: log-probability of the path from the root; -inf in empty slots."""
    total = path_sum(tree.draft_logp, tree.parent, int(tree.depth.max()))
    return total.masked_fill(~tree.valid, float("-inf"))


def ancestor_mask(parent: Tensor, max_depth: int) -> Tensor:
    """`[B, N, N]` bool: `mask[b, i, j]` is true when j is i or an ancestor of i.

    An empty slot sees itself alone, so that attention over it stays finite.
    """
    slots = torch.arange(parent.shape[1], device=parent.device)
    current = slots.expand_as(parent)
    mask = current[..., None] == slots
    for _ in range(max_depth):
        current = gather(parent, current, ROOT)
        mask = mask | (current[..., None] == slots)
    return mask


def pack_bits(mask: Tensor) -> Tensor:
    """Packs the last axis into int64 words, bit j of word w standing for column 64 w + j.

    Args:
        mask: `[..., N]` bool.

    Returns:
        `[..., ceil(N / 64)]` int64.
    """
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 64))
    bits = padded.reshape(*mask.shape[:-1], -1, 64).to(torch.int64)
    words: Tensor = (bits << torch.arange(64, device=mask.device)).sum(-1)
    return words


def check_tree(tree: TokenTree) -> None:
    """Asserts what holds of every tree (see `specctl.tree`)."""
    slots = torch.arange(tree.num_slots, device=tree.parent.device)
    root = tree.parent < 0
    rules = {
        "node 0 is the root": (tree.parent[:, :1] == ROOT) & (tree.depth[:, :1] == 0),
        "there is one root": tree.parent[:, 1:] != ROOT,
        "parents stand before children": root | (tree.parent < slots),
        "depth is the parent's plus one": root
        | (tree.depth == gather(tree.depth, tree.parent, 0) + 1),
        "a parent holds a node": root | gather(tree.valid, tree.parent, 0).bool(),
        "padding stands at the end": tree.valid[:, :-1] | ~tree.valid[:, 1:],
        "log-probabilities are at most 0": ~tree.valid | (tree.draft_logp <= 0),
    }
    for rule, holds in rules.items():
        assert bool(holds.all()), f"{rule}: parent {tree.parent}, depth {tree.depth}"
