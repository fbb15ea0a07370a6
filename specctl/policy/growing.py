"""Growth of a draft tree, level by level.

Children come from a *source*: the drafter at run time, a dense log in replay, a table in tests. The
pool holds every candidate at a fixed place: level 1 in slots 1..k, level d + 1 in the W · k slots
behind level d, child j of frontier node i at position i·k + j of its level.
"""

from __future__ import annotations

from typing import Protocol

from specctl.features import Copy, copy_of
from specctl.lazy import Tensor, torch
from specctl.policy.rules import Frontier, Level, Plan, ShapeRule
from specctl.tree import PAD, ROOT, Children, DraftPool


class Laps(Protocol):
    """A stopwatch of the parts of a round."""

    def lap(self, phase: str, /) -> None:
        """Books the time since the last call under a phase."""
        ...


class Growth:
    """A growing pool, new every round, so that observers may keep it.

    Args:
        root_ids: `[A]` int64. capacity: slots of a row.
        recent: `[A, RECENT_TOKENS]` int64, the text, for rules that need it.

    Attributes:
        level: the last one, with the pool so far; the root's is 0.
    """

    def __init__(self, root_ids: Tensor, capacity: int, recent: Tensor | None = None) -> None:
        rows, device = len(root_ids), root_ids.device
        integers = torch.zeros(4, rows, capacity, dtype=torch.int64, device=device)
        floats = torch.zeros(4, rows, capacity, device=device)
        token_ids, parent, depth, sibling_rank = integers
        token_ids[:, 0], parent[:, 0] = root_ids, ROOT
        expanded = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
        self._pool = DraftPool(token_ids, parent, depth, *floats, sibling_rank, expanded)  # type: ignore[call-arg]
        self._copy: Copy | None = None
        if recent is not None:
            copied, copy = torch.zeros_like(token_ids), copy_of(recent)
            if bool(copy.length.any()):  # else `copied` stays 0
                self._copy, copied[:, 0] = copy, copy.length
            self._pool = self._pool._replace(copied=copied)
        self.level = Level(0, self._pool.first(1), 0)

    def append(self, frontier: Frontier, children: Children) -> Level:
        """Appends the frontier's children to the pool. Children of nodes that a row dropped, or
        that the source lacks, become empty slots."""
        pool, start, depth = self._pool, self.level.pool.num_slots, self.level.depth + 1
        width, top_k = children.token_ids.shape[1:]
        place = slice(start, start + width * top_k)
        exists = frontier.keep[..., None].expand_as(children.token_ids)
        if children.known is not None:
            exists = exists & children.known
        exists, parents = exists.flatten(1), frontier.index
        entropy, topk_entropy = children.entropy, children.topk_entropy
        if top_k > 1:  # for chains these calls would double the time of a level
            ranks = torch.arange(top_k, device=exists.device).expand_as(children.token_ids)
            pool.sibling_rank[:, place] = ranks.flatten(1)
            repeated = (parents, entropy, topk_entropy)
            parents, entropy, topk_entropy = (one.repeat_interleave(top_k, 1) for one in repeated)
        before = pool.joint_logp.gather(1, frontier.index)
        joint = (before[..., None] + children.logp).flatten(1)
        if pool.copied is not None and self._copy is not None:
            above = pool.copied.gather(1, frontier.index)
            copied = self._copy.of_level(depth, children.token_ids, above)
            pool.copied[:, place] = copied.flatten(1)
        pool.token_ids[:, place] = children.token_ids.flatten(1)
        pool.parent[:, place] = parents.masked_fill(~exists, PAD)
        pool.depth[:, place] = depth
        pool.draft_logp[:, place] = children.logp.flatten(1)
        pool.joint_logp[:, place] = joint.masked_fill(~exists, float("-inf"))
        pool.entropy[:, place] = entropy
        pool.topk_entropy[:, place] = topk_entropy
        pool.expanded.scatter_(1, frontier.index, frontier.keep)
        self.level = Level(depth, pool.first(place.stop), start)
        return self.level


def pool_capacity(rule: ShapeRule) -> int:
    """Slots of the largest pool: root, k children, then W · k candidates a level."""
    if rule.max_depth == 0:
        return 1
    return 1 + rule.top_k + (rule.max_depth - 1) * rule.width * rule.top_k


class ChildSource(Protocol):
    """A source of children."""

    def children(self, level: Level, frontier: Frontier, top_k: int) -> Children:
        """The `top_k` likeliest children of all frontier nodes, dropped ones included; called once
        a level, first for the root."""
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
        source: of the children; a drafter has read its rows up to the roots.
        root_ids: `[A]` int64.

    Returns:
        All candidates, `[A, P]`; rows that stopped early have empty slots at deeper levels.
    """
    growth = Growth(root_ids, pool_capacity(rule), recent)
    root = torch.zeros_like(root_ids[:, None])
    frontier = Frontier(root, torch.ones_like(root, dtype=torch.bool))
    deepest = rule.max_depth if plan.deepest is None else plan.deepest
    for depth in range(1, deepest + 1):
        level = growth.append(frontier, source.children(growth.level, frontier, rule.top_k))
        watch.lap("draft")
        if depth == deepest:
            break
        frontier = rule.grow(plan, level)
        width = int(frontier.keep.sum(1).amax())
        watch.lap("policy")
        if width == 0:
            break
        frontier = Frontier(frontier.index[:, :width], frontier.keep[:, :width])
    return growth.level.pool
