"""Torch implementation of `tree_build`."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.tree_attention import pack_ancestors
from specctl.kernels.tree_build import Best, BuiltTree
from specctl.tree import PAD, ROOT, Children, DraftPool

NOTHING = float("-inf")


def append_level(
    pool: DraftPool,
    frontier: Tensor,
    keep: Tensor,
    children: Children,
    start: int,
    depth: int,
    num_best: int,
) -> Best:
    assert pool.path_entropy is not None
    width, top_k = children.token_ids.shape[1:]
    place = slice(start, start + width * top_k)
    exists = keep[..., None].expand_as(children.token_ids)
    if children.known is not None:
        exists = exists & children.known
    exists = exists.flatten(1)
    joint = (pool.joint_logp.gather(1, frontier)[..., None] + children.logp).flatten(1)
    above = pool.path_entropy.gather(1, frontier).repeat_interleave(top_k, 1)
    doubt = children.topk_entropy.repeat_interleave(top_k, 1)
    parents = frontier.repeat_interleave(top_k, 1)
    pool.token_ids[:, place] = children.token_ids.flatten(1)
    pool.parent[:, place] = parents.masked_fill(~exists, PAD)
    pool.depth[:, place] = depth
    pool.draft_logp[:, place] = children.logp.flatten(1)
    pool.joint_logp[:, place] = joint.masked_fill(~exists, NOTHING)
    pool.entropy[:, place] = children.entropy.repeat_interleave(top_k, 1)
    pool.topk_entropy[:, place] = doubt
    pool.path_entropy[:, place] = doubt + above.masked_fill(~exists, 0.0)
    pool.sibling_rank[:, place] = torch.arange(top_k, device=keep.device).repeat(width)
    pool.expanded[:, place] = False
    pool.expanded.scatter_(1, frontier, keep)
    return best_of(pool.joint_logp[:, place], start, num_best)


def best_of(scores: Tensor, start: int, num_best: int) -> Best:
    """The best of `[B, C]` scores, whose first stands in slot `start`."""
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    return Best(order[:, :num_best] + start, ranked[:, :num_best])


def select_nodes(
    scores: Tensor, num_tokens: int, limit: Tensor | None, min_score: Tensor | None
) -> Tensor:
    alive = scores > NOTHING
    if min_score is not None:
        alive = alive & (scores >= min_score)
    ranked = scores.masked_fill(~alive, NOTHING)
    order = ranked.sort(dim=1, descending=True, stable=True).indices[:, :num_tokens]
    empty = ~alive.gather(1, order)
    if limit is not None:
        empty = empty | (torch.arange(order.shape[1], device=order.device) >= limit[:, None])
    end = scores.shape[1]
    ordered = order.masked_fill(empty, end).sort(1).values
    ordered = ordered.masked_fill(ordered == end, -1)
    return torch.nn.functional.pad(ordered, (0, num_tokens - ordered.shape[1]), value=-1)


def link_tree(
    pool: DraftPool, submitted: Tensor, max_depth: int, positions: Tensor | None
) -> BuiltTree:
    (rows, end), device = submitted.shape, submitted.device
    slots, exists, chosen = torch.arange(end, device=device), submitted >= 0, submitted.clamp(min=0)
    above = pool.parent.gather(1, chosen)
    is_root, spare = above == ROOT, pool.parent.shape[1]
    # Index of each pool slot among the submitted; `end` if it is not submitted.
    place = submitted.new_full((rows, spare + 1), end)
    place.scatter_(1, submitted.where(exists, spare), slots.expand_as(submitted))[:, spare] = end
    parent = place.gather(1, above.where(above >= 0, spare))
    # Parents, where the root is its own; a path that misses the root stays at `end`.
    up = torch.nn.functional.pad(torch.where(is_root, slots, parent), (0, 1), value=end)
    current = slots.expand_as(submitted)
    itself = seen = slots[:, None] == slots
    for _ in range(max_depth):
        current = up.gather(1, current)
        seen = seen | (current[..., None] == slots)
    empty = ~(exists & (current == 0) & is_root[:, :1])
    depth = pool.depth.gather(1, chosen).masked_fill_(empty, 0)
    return BuiltTree(
        submitted=submitted.masked_fill(empty, -1),
        token_ids=pool.token_ids.gather(1, chosen).masked_fill_(empty, 0),
        parent=parent.masked_fill_(is_root, ROOT).masked_fill_(empty, PAD),
        depth=depth,
        draft_logp=pool.draft_logp.gather(1, chosen).masked_fill_(empty, 0),
        position_ids=depth + (0 if positions is None else positions[:, None]),
        valid=~empty,
        num_nodes=end - empty.sum(1),
        ancestor_bits=pack_ancestors(torch.where(empty[..., None], itself, seen)),
    )
