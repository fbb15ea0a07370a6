"""Growing a draft tree: level by level, the policy choosing what to expand.

Children come from a *source*: the drafter at run time, a dense log in replay. The pool holds
every candidate, level by level, at fixed places: level 1 in slots 1..k, level d + 1 in the
W · k slots behind level d, child j of frontier node i at W-major position i·k + j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from specctl.features import ENTROPY_TOP_K, DraftPool
from specctl.kernels.node_features import node_features
from specctl.policy.rules import Frontier, Level, Plan, ShapeRule
from specctl.runtime.metrics import Stopwatch
from specctl.tree import PAD, ROOT, TokenTree

if TYPE_CHECKING:  # brings transformers along, which replay does without
    from specctl.runtime.drafter import Drafter


@dataclass
class PoolBuffers:
    """The columns of a growing pool, `[A, P]` each; `view` is what has been written so far.

    `size` slots are written; the last level among them starts at `level_start`.
    """

    token_ids: Tensor
    parent: Tensor
    depth: Tensor
    draft_logp: Tensor
    joint_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    sibling_rank: Tensor
    expanded: Tensor
    recent: Tensor | None = None
    size: int = 1
    level_start: int = 0

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
            self.recent,
        )


def new_pool(root_ids: Tensor, capacity: int, recent: Tensor | None = None) -> PoolBuffers:
    """Buffers of `capacity` slots with the root written; fresh every round, so that observers
    may keep them."""
    rows, device = len(root_ids), root_ids.device
    integers = torch.zeros(4, rows, capacity, dtype=torch.int64, device=device)
    floats = torch.zeros(4, rows, capacity, device=device)
    token_ids, parent, depth, sibling_rank = integers
    token_ids[:, 0], parent[:, 0] = root_ids, ROOT
    expanded = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
    return PoolBuffers(token_ids, parent, depth, *floats, sibling_rank, expanded, recent)


def pool_capacity(rule: ShapeRule) -> int:
    """Slots of the largest pool: root, k children, then W · k candidates a level."""
    if rule.max_depth == 0:
        return 1
    return 1 + rule.top_k + (rule.max_depth - 1) * rule.width * rule.top_k


class Children(NamedTuple):
    """What a source says below W frontier nodes of A rows.

    Attributes:
        token_ids: `[A, W, K]` int64, likeliest first, target vocabulary.
        logp: `[A, W, K]` float32, given the parent, at most 0.
        entropy, topk_entropy: `[A, W]` float32, nats, of the distribution they come from.
        known: `[A, W, K]` bool, false for a child that the source cannot tell; None: all.
    """

    token_ids: Tensor
    logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    known: Tensor | None = None


class ChildSource(Protocol):
    """Where children come from."""

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        """The `top_k` likeliest children of each frontier node, kept or not.

        Called once a level, the root's children first; the frontier stands in the last level
        of the pool.
        """
        ...


class DrafterSource:
    """Children from one drafter forward a level.

    Args:
        keep_logits: keep what the drafter said at every node, for `parent_logits`.
    """

    def __init__(self, drafter: Drafter, *, keep_logits: bool = False) -> None:
        self.drafter, self.keep_logits = drafter, keep_logits
        self._kept: list[Tensor] = []
        self._slot_column: list[Tensor] = []

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        logits = self._logits(pool, frontier, top_k)
        if self.keep_logits:
            self._keep(logits, top_k)
        found = node_features(logits, top_k, ENTROPY_TOP_K)
        token_ids = self.drafter.to_target_ids(found.top_ids)
        return Children(token_ids, found.top_logp, found.entropy, found.topk_entropy)

    def parent_logits(self, slots: Tensor) -> Tensor:
        """What the drafter said where pool slots were drawn: `[A, N, Vd]` of slots `[A, N]`.

        The root, and an empty slot, get those of the root's children.
        """
        logits = torch.cat(self._kept, 1)
        column = torch.cat([torch.zeros_like(self._slot_column[0][:1]), *self._slot_column])
        index = column[slots.clamp(min=0)][..., None]
        return logits.gather(1, index.expand(-1, -1, logits.shape[2]))

    def _keep(self, logits: Tensor, top_k: int) -> None:
        before = sum(kept.shape[1] for kept in self._kept)
        columns = torch.arange(logits.shape[1], device=logits.device) + before
        self._kept.append(logits)
        self._slot_column.append(columns.repeat_interleave(top_k))

    def _logits(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Tensor:
        if pool.level_start == 0:
            return self.drafter.begin_round(len(frontier.index))[:, None]
        below_root = pool.level_start == 1
        columns = (frontier.index - pool.level_start) // top_k
        parent_slot = torch.zeros_like(columns) if below_root else columns
        return self.drafter.expand(pool.token_ids.gather(1, frontier.index), parent_slot)


def grow_tree(
    rule: ShapeRule,
    plan: Plan,
    source: ChildSource,
    root_ids: Tensor,
    watch: Stopwatch,
    recent: Tensor | None = None,
) -> DraftPool:
    """Drafts until the policy stops or the deepest level is reached.

    Args:
        source: of the children; where it is a drafter, its rows have read up to the roots.
        root_ids: `[A]` int64.
        recent: see `DraftPool`.

    Returns:
        All candidates, `[A, P]`; rows that stopped early have empty slots at deeper levels.
    """
    pool = new_pool(root_ids, pool_capacity(rule), recent)
    root = torch.zeros_like(root_ids[:, None])
    frontier = Frontier(root, torch.ones_like(root, dtype=torch.bool))
    for depth in range(1, rule.max_depth + 1):
        append_level(pool, depth, frontier, source.children(pool, frontier, rule.top_k))
        watch.lap("draft")
        if depth == rule.max_depth:
            break
        frontier = rule.grow(plan, Level(depth, pool.view(), pool.level_start))
        going_on = bool(frontier.keep.any())
        watch.lap("policy")
        if not going_on:
            break
    return pool.view()


def append_level(pool: PoolBuffers, depth: int, frontier: Frontier, children: Children) -> None:
    """Writes the children of the frontier behind the pool.

    What the frontier does not keep gets empty slots: it was drafted for other rows' sake. So
    does a child that the source does not know.
    """
    width, top_k = children.token_ids.shape[1:]
    place = slice(pool.size, pool.size + width * top_k)
    exists = frontier.keep[..., None].expand_as(children.token_ids)
    if children.known is not None:
        exists = exists & children.known
    exists, parents = exists.flatten(1), frontier.index.repeat_interleave(top_k, 1)
    before = pool.joint_logp.gather(1, frontier.index)
    joint = (before[..., None] + children.logp).flatten(1)
    pool.token_ids[:, place] = children.token_ids.flatten(1)
    pool.parent[:, place] = parents.masked_fill(~exists, PAD)
    pool.depth[:, place] = depth
    pool.draft_logp[:, place] = children.logp.flatten(1)
    pool.joint_logp[:, place] = joint.masked_fill(~exists, float("-inf"))
    pool.entropy[:, place] = children.entropy.repeat_interleave(top_k, 1)
    pool.topk_entropy[:, place] = children.topk_entropy.repeat_interleave(top_k, 1)
    pool.sibling_rank[:, place] = torch.arange(top_k, device=exists.device).repeat(width)
    pool.expanded.scatter_(1, frontier.index, frontier.keep)
    pool.level_start, pool.size = place.start, place.stop
