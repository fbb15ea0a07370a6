"""Torch implementation of `tree_build`."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.tree_build import PAD, ROOT, WORD_BITS, Best, BuiltTree, Children, Pool

NOTHING = float("-inf")


def append_level(
    pool: Pool,
    frontier: Tensor,
    keep: Tensor,
    children: Children,
    start: int,
    depth: int,
    num_best: int,
) -> Best:
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
    beyond = scores.shape[1]
    ordered = order.masked_fill(empty, beyond).sort(1).values
    ordered = ordered.masked_fill(ordered == beyond, -1)
    return torch.nn.functional.pad(ordered, (0, num_tokens - ordered.shape[1]), value=-1)


def link_tree(pool: Pool, submitted: Tensor, max_depth: int, positions: Tensor | None) -> BuiltTree:
    up, is_root = _renumbered(pool.parent, submitted)
    seen, last = _walked(up, max_depth)
    closed = (submitted >= 0) & (last == 0) & is_root[:, :1]
    parent = up.masked_fill(~closed, PAD)
    itself = torch.eye(up.shape[1], dtype=torch.bool, device=up.device)
    index = submitted.masked_fill(~closed, -1)
    depth = _taken(pool.depth, index)
    return BuiltTree(
        submitted=index,
        token_ids=_taken(pool.token_ids, index),
        parent=parent,
        depth=depth,
        draft_logp=_taken(pool.draft_logp, index),
        position_ids=depth + (0 if positions is None else positions[:, None]),
        valid=closed,
        num_nodes=closed.sum(1),
        ancestor_bits=_packed(torch.where(closed[..., None], seen, itself)),
    )


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """`values` at the nodes of `index`, 0 where there is none."""
    return values.gather(1, index.clamp(min=0)).masked_fill(index < 0, 0)


def _renumbered(parent: Tensor, submitted: Tensor) -> tuple[Tensor, Tensor]:
    """Where each node's parent stands among the submitted, -1 for nowhere; and the roots."""
    above = parent.gather(1, submitted.clamp(min=0)).masked_fill(submitted < 0, PAD)
    slots = torch.arange(submitted.shape[1], device=parent.device).expand_as(submitted)
    spare = parent.shape[1]  # one more column, where padding may write
    place = submitted.new_full((len(submitted), spare + 1), -1)
    place.scatter_(1, submitted.masked_fill(submitted < 0, spare), slots)
    up = place.gather(1, above.clamp(min=0)).masked_fill(above < 0, -1)
    return up, above == ROOT


def _walked(up: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """`[B, N, N]` bool: the nodes on the way up from a node, itself too; `[B, N]`: the last."""
    slots = torch.arange(up.shape[1], device=up.device)
    last = current = slots.expand_as(up)
    seen = current[..., None] == slots
    for _ in range(max_depth):
        current = up.gather(1, current.clamp(min=0)).masked_fill(current < 0, -1)
        seen = seen | (current[..., None] == slots)
        last = torch.where(current >= 0, current, last)
    return seen, last


def _packed(mask: Tensor) -> Tensor:
    """int32 words of the last axis; the highest bit is the sign."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % WORD_BITS))
    bits = padded.unflatten(-1, (-1, WORD_BITS)).to(torch.int64)
    words = (bits << torch.arange(WORD_BITS, device=mask.device)).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
