"""Growing a draft tree: one drafter forward a level, the policy choosing what to expand.

The pool holds every candidate, level by level, at fixed places: level 1 in slots 1..k, level
d + 1 in the W · k slots behind level d, child j of frontier node i at W-major position i·k + j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.features import ENTROPY_TOP_K, DraftPool
from specctl.kernels.node_features import NodeFeatures, node_features
from specctl.policy.rules import Frontier, Level, Plan, ShapeRule
from specctl.runtime.drafter import Drafter
from specctl.runtime.metrics import Stopwatch
from specctl.tree import PAD, ROOT, TokenTree


@dataclass
class PoolBuffers:
    """The columns of a growing pool, `[A, P]` each; `view` is what has been written so far."""

    token_ids: Tensor
    parent: Tensor
    depth: Tensor
    draft_logp: Tensor
    joint_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    sibling_rank: Tensor
    expanded: Tensor
    size: int = 1

    def view(self) -> DraftPool:
        """The pool up to the last level written."""
        end = self.size
        tree = TokenTree(
            self.token_ids[:, :end],
            self.parent[:, :end],
            self.depth[:, :end],
            self.draft_logp[:, :end],
        )
        return DraftPool(
            tree,
            self.joint_logp[:, :end],
            self.entropy[:, :end],
            self.topk_entropy[:, :end],
            self.sibling_rank[:, :end],
            self.expanded[:, :end],
        )


def new_pool(root_ids: Tensor, capacity: int) -> PoolBuffers:
    """Buffers of `capacity` slots with the root written; fresh every round, so that observers
    may keep them."""
    rows, device = len(root_ids), root_ids.device
    integers = torch.zeros(4, rows, capacity, dtype=torch.int64, device=device)
    floats = torch.zeros(4, rows, capacity, device=device)
    token_ids, parent, depth, sibling_rank = integers
    token_ids[:, 0], parent[:, 0] = root_ids, ROOT
    expanded = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
    return PoolBuffers(token_ids, parent, depth, *floats, sibling_rank, expanded)


def pool_capacity(rule: ShapeRule) -> int:
    """Slots of the largest pool: root, k children, then W · k candidates a level."""
    if rule.max_depth == 0:
        return 1
    return 1 + rule.top_k + (rule.max_depth - 1) * rule.width * rule.top_k


def grow_tree(
    rule: ShapeRule,
    plan: Plan,
    drafter: Drafter,
    root_ids: Tensor,
    watch: Stopwatch,
) -> DraftPool:
    """Drafts until the policy stops or the deepest level is reached.

    Args:
        root_ids: `[A]` int64, the drafter's rows having read up to and with them.

    Returns:
        All candidates, `[A, P]`; rows that stopped early have empty slots at deeper levels.
    """
    pool = new_pool(root_ids, pool_capacity(rule))
    root = torch.zeros_like(root_ids[:, None])
    frontier = Frontier(root, torch.ones_like(root, dtype=torch.bool))
    logits = drafter.begin_round(len(root_ids))[:, None]
    for depth in range(1, rule.max_depth + 1):
        found = node_features(logits, rule.top_k, ENTROPY_TOP_K)
        start = pool.size
        append_level(pool, depth, frontier, found, drafter.to_target_ids(found.top_ids))
        watch.lap("draft")
        if depth == rule.max_depth:
            break
        frontier = rule.grow(plan, Level(depth, pool.view(), start))
        going_on = bool(frontier.keep.any())
        watch.lap("policy")
        if not going_on:
            break
        parent_slot = parent_columns(frontier, start, rule.top_k, first_level=depth == 1)
        logits = drafter.expand(pool.token_ids.gather(1, frontier.index), parent_slot)
        watch.lap("draft")
    return pool.view()


def parent_columns(frontier: Frontier, start: int, top_k: int, *, first_level: bool) -> Tensor:
    """`[A, W]`: for each frontier node, the column of its parent in the frontier before."""
    if first_level:
        return torch.zeros_like(frontier.index)
    return (frontier.index - start) // top_k


def append_level(
    pool: PoolBuffers, depth: int, frontier: Frontier, found: NodeFeatures, token_ids: Tensor
) -> None:
    """Writes the children of the frontier behind the pool.

    What the frontier does not keep gets empty slots: it was drafted for other rows' sake.

    Args:
        found: statistics of the frontier's logits, `[A, W, ...]`.
        token_ids: `[A, W, k]` children in the target vocabulary.
    """
    width, top_k = token_ids.shape[1:]
    place = slice(pool.size, pool.size + width * top_k)
    parents = torch.where(frontier.keep, frontier.index, PAD)
    before = pool.joint_logp.gather(1, frontier.index)
    before = before.masked_fill(~frontier.keep, float("-inf"))
    joint = before[..., None] + found.top_logp
    pool.token_ids[:, place] = token_ids.flatten(1)
    pool.parent[:, place] = parents.repeat_interleave(top_k, 1)
    pool.depth[:, place] = depth
    pool.draft_logp[:, place] = found.top_logp.flatten(1)
    pool.joint_logp[:, place] = joint.flatten(1)
    pool.entropy[:, place] = found.entropy.repeat_interleave(top_k, 1)
    pool.topk_entropy[:, place] = found.topk_entropy.repeat_interleave(top_k, 1)
    ranks = torch.arange(top_k, device=token_ids.device).repeat(width)
    pool.sibling_rank[:, place] = ranks
    pool.expanded.scatter_(1, frontier.index, frontier.keep)
    pool.size = place.stop
