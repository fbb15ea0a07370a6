"""Growing a draft tree: level by level, the policy choosing what to expand.

Children come from a *source*: the drafter at run time, a dense log in replay, a table in the
self-test of an artifact. The pool holds every candidate, level by level, at fixed places: level 1
in slots 1..k, level d + 1 in the W · k slots behind level d, child j of frontier node i at W-major
position i·k + j.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from specctl.features import Copy, DraftPool, copy_of
from specctl.lazy import Tensor, torch
from specctl.policy.rules import Frontier, Level, Plan, ShapeRule
from specctl.tree import PAD, ROOT, TokenTree


class Laps(Protocol):
    """A stopwatch of the parts of a round."""

    def lap(self, phase: str, /) -> None:
        """The time since the last call was spent in this phase."""
        ...


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
    copied: Tensor | None = None
    copy: Copy | None = None
    size: int = 1
    level_start: int = 0

    def view(self) -> DraftPool:
        """The pool up to the last level written."""
        end = self.size
        of_tree = (self.token_ids, self.parent, self.depth, self.draft_logp)
        scores = (self.joint_logp, self.entropy, self.topk_entropy)
        tree = TokenTree(*(column[:, :end] for column in of_tree))
        joint, entropy, topk_entropy = (column[:, :end] for column in scores)
        rank, expanded = self.sibling_rank[:, :end], self.expanded[:, :end]
        copied = None if self.copied is None else self.copied[:, :end]
        return DraftPool(tree, joint, entropy, topk_entropy, rank, expanded, copied)

    def pick(self, rows: Tensor) -> PoolBuffers:
        """Some rows, `[R]` int64, of what has been written."""
        picked: Any = {name: one[rows] for name, one in vars(self).items() if torch.is_tensor(one)}
        copy = None if self.copy is None else Copy(*(one[rows] for one in self.copy))
        return replace(self, **picked, copy=copy)


def new_pool(root_ids: Tensor, capacity: int, recent: Tensor | None = None) -> PoolBuffers:
    """Buffers with the root written; fresh every round, so that observers may keep them."""
    rows, device = len(root_ids), root_ids.device
    integers = torch.zeros(4, rows, capacity, dtype=torch.int64, device=device)
    floats = torch.zeros(4, rows, capacity, device=device)
    token_ids, parent, depth, sibling_rank = integers
    token_ids[:, 0], parent[:, 0] = root_ids, ROOT
    expanded = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
    own, joint, entropy, topk_entropy = floats
    scores = (own, joint, entropy, topk_entropy)
    buffers = PoolBuffers(token_ids, parent, depth, *scores, sibling_rank, expanded)
    if recent is not None:
        buffers.copied = torch.zeros_like(token_ids)
        copy = copy_of(recent)
        if bool(copy.length.any()):  # else no node copies anything
            buffers.copy, buffers.copied[:, 0] = copy, copy.length
    return buffers


def pool_capacity(rule: ShapeRule) -> int:
    """Slots of the largest pool: root, k children, then W · k candidates a level."""
    if rule.max_depth == 0:
        return 1
    return 1 + rule.top_k + (rule.max_depth - 1) * rule.width * rule.top_k


class Children(NamedTuple):
    """A source's candidates below W frontier nodes of A rows.

    Attributes:
        token_ids: `[A, W, K]` int64, likeliest first, target vocabulary.
        logp: `[A, W, K]` float32, given the parent, at most 0.
        entropy, topk_entropy: `[A, W]` float32, nats, of the distribution they come from.
        known: `[A, W, K]` bool, false for a child that the source does not know; None: all.
    """

    token_ids: Tensor
    logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    known: Tensor | None = None


class ChildSource(Protocol):
    """Where children come from."""

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        """The `top_k` likeliest children of each frontier node, kept or not; called once a level,
        the root's children first. The frontier stands in the last level of the pool."""
        ...


def grow_tree(
    rule: ShapeRule,
    plan: Plan,
    source: ChildSource,
    root_ids: Tensor,
    watch: Laps,
    recent: Tensor | None = None,
) -> DraftPool:
    """Drafts until the policy stops or the deepest level is reached.

    Args:
        source: of the children; where it is a drafter, its rows have read up to the roots.
        root_ids: `[A]` int64.

    Returns:
        All candidates, `[A, P]`; rows that stopped early have empty slots at deeper levels.
    """
    pool = new_pool(root_ids, pool_capacity(rule), recent)
    root = torch.zeros_like(root_ids[:, None])
    frontier = Frontier(root, torch.ones_like(root, dtype=torch.bool))
    deepest = rule.max_depth if plan.deepest is None else plan.deepest
    for depth in range(1, deepest + 1):
        append_level(pool, depth, frontier, source.children(pool, frontier, rule.top_k))
        watch.lap("draft")
        if depth == deepest:
            break
        frontier = rule.grow(plan, Level(depth, pool.view(), pool.level_start))
        width = int(frontier.keep.sum(1).amax())
        watch.lap("policy")
        if width == 0:
            break
        frontier = Frontier(frontier.index[:, :width], frontier.keep[:, :width])
    return pool.view()


def append_level(pool: PoolBuffers, depth: int, frontier: Frontier, children: Children) -> None:
    """Writes the children of the frontier behind the pool; what the frontier does not keep, drafted
    for other rows' sake, gets empty slots, and so does a child that the source does not know."""
    width, top_k = children.token_ids.shape[1:]
    place = slice(pool.size, pool.size + width * top_k)
    exists = frontier.keep[..., None].expand_as(children.token_ids)
    if children.known is not None:
        exists = exists & children.known
    exists, parents = exists.flatten(1), frontier.index
    entropy, topk_entropy = children.entropy, children.topk_entropy
    if top_k > 1:  # else the calls would cost a chain as much as all others of a level
        ranks = torch.arange(top_k, device=exists.device).expand_as(children.token_ids)
        pool.sibling_rank[:, place] = ranks.flatten(1)
        repeated = (parents, entropy, topk_entropy)
        parents, entropy, topk_entropy = (one.repeat_interleave(top_k, 1) for one in repeated)
    before = pool.joint_logp.gather(1, frontier.index)
    joint = (before[..., None] + children.logp).flatten(1)
    if pool.copied is not None and pool.copy is not None:
        above = pool.copied.gather(1, frontier.index)
        pool.copied[:, place] = pool.copy.of_level(depth, children.token_ids, above).flatten(1)
    pool.token_ids[:, place] = children.token_ids.flatten(1)
    pool.parent[:, place] = parents.masked_fill(~exists, PAD)
    pool.depth[:, place] = depth
    pool.draft_logp[:, place] = children.logp.flatten(1)
    pool.joint_logp[:, place] = joint.masked_fill(~exists, float("-inf"))
    pool.entropy[:, place] = entropy
    pool.topk_entropy[:, place] = topk_entropy
    pool.expanded.scatter_(1, frontier.index, frontier.keep)
    pool.level_start, pool.size = place.start, place.stop
