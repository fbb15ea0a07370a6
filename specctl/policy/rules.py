"""The contract of deciding code: the calls of a round to a shape and a budget.

Everything is batched and stays on the device: a batch is the requests of a round at run time, and
the positions of a log in replay.

The round calls, in order: `begin`, then `grow` after every drafted level, `select` once, the
budget's `share`, the acceptance's `judge` on the target's answer, `observe` on the outcome.

Rules hold parameters and no state. What a rule wants to remember of a request from round to
round is a row of numbers, its *memory*, which the runtime keeps by slot, replay
by request. It is zero in a request's first round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from specctl.lazy import Tensor, torch
from specctl.policy.verification import Outcome
from specctl.tree import DraftPool


@dataclass(frozen=True)
class RoundStart:
    """The state of B requests when a round begins."""

    num_rows: int
    memory: Tensor  # `[B, M]` float64, what the shape noted of each request in its earlier rounds
    batch_size: int = 1
    """Requests that decode together. Not `num_rows` in replay, whose rows are positions of a log,
    each of a request by itself."""


def fresh_start(
    num_rows: int, memory_size: int = 0, device: torch.device | str = "cpu"
) -> RoundStart:
    """The first round of B requests."""
    memory = torch.zeros(num_rows, memory_size, dtype=torch.float64, device=device)
    return RoundStart(num_rows, memory)


@dataclass
class Plan:
    """A shape's memory within one round."""

    num_rows: int
    max_depth: Tensor
    """`[B]` int64, levels this round drafts for each row; deeper ones are drafted only where
    another row of the batch wants them, and are never submitted."""
    bins: Tensor | None = None
    """`[B]` int64 or None, the regime that a shape chose, -1 while unknown."""
    stopped_at: Tensor | None = None
    """`[B]` int64 or None, the level where a gate closed, 0 for none: its nodes are there for a
    budget that has some to spare."""
    deepest: int | None = None
    """The deepest level of any row, where the host knows it; None: the rule's own."""


@dataclass(frozen=True)
class Level:
    """The candidates of one drafted level, 1 for the root's children: those of the pool so far,
    `[B, P']`, from index `start` on."""

    depth: int
    pool: DraftPool
    start: int

    @property
    def joint_logp(self) -> Tensor:
        """`[B, C]` scores of this level's candidates."""
        return self.pool.joint_logp[:, self.start :]


@dataclass(frozen=True)
class Frontier:
    """The candidates to expand next."""

    index: Tensor  # `[B, W]` int64 pool indices, likeliest first
    keep: Tensor
    """`[B, W]` bool: expand this one; those that are kept stand first. When none is kept, drafting
    ends; a row without any has stopped."""


class ShapeRule(Protocol):
    """The growth of a tree, and the choice of its submitted nodes."""

    max_depth: int  # levels at most, in any round
    top_k: int  # children per expanded node
    width: int  # nodes expanded per level at most
    max_tokens: int  # nodes submitted at most, root counted
    memory_size: int  # M, numbers that the rule keeps of a request; 0 for most
    needs_text: bool  # it reads features that compare tokens with the recent text

    def begin(self, start: RoundStart) -> Plan:
        """Starts a round of B rows."""
        ...

    def grow(self, plan: Plan, level: Level) -> Frontier:
        """Chooses what to expand after a level. Not called below the deepest level."""
        ...

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        """Nodes to verify: `[B, N]` ascending pool indices, root first, closed, -1 padded."""
        ...

    def unsound(self, plan: Plan) -> Tensor | None:
        """`[B]` bool: the rows where something that it decided by is NaN, after `select`; None
        for a rule that decides by nothing but the draft."""
        ...

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        """Learns from a round: the requests' memory for the next, `[B, M]` both."""
        ...


class BudgetRule(Protocol):
    """The sharing of verification in a batch."""

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        """The nodes that each request of the batch may verify.

        Args:
            plan: the shape's, as drafting left it.
            submitted: `[B, N]` int64, what the shape selected.

        Returns:
            `[B, N']` int64, in each row a closed subset of `submitted`: ascending, root first and
            always kept, -1 padded at the end.
        """
        ...


@dataclass
class BaseShape:
    """Defaults shared by the rules: fixed depth, EAGLE-2 frontier and rerank."""

    max_depth: int
    top_k: int
    width: int
    max_tokens: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory_size: int = 0
    needs_text: bool = False

    def begin(self, start: RoundStart) -> Plan:
        depth = torch.full((start.num_rows,), self.max_depth, device=self.device)
        return Plan(start.num_rows, depth)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        return rows_below(plan, level, best_of_level(level, self.width))

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        return best_nodes(pool, self.max_tokens)

    def unsound(self, plan: Plan) -> Tensor | None:
        del plan
        return None

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        del outcome  # offline policies do not learn from a round
        return memory


def is_fixed(rule: ShapeRule) -> bool:
    """Whether the size of a round is known when it begins: the rule chooses nothing by what is
    drafted but which nodes come first, and a chain leaves no choice."""
    chooses = (type(rule).grow, type(rule).select, type(rule).observe)
    return chooses == (BaseShape.grow, BaseShape.select, BaseShape.observe)


def rows_below(plan: Plan, level: Level, index: Tensor) -> Frontier:
    """A frontier that is kept whole in the rows whose plan goes deeper than this level."""
    return Frontier(index, (plan.max_depth > level.depth)[:, None].expand_as(index))


def stop_rows(plan: Plan, level: Level, stopped: Tensor) -> None:
    """Notes in the plan that the rows `[B]` bool draft no deeper than this level."""
    here = plan.max_depth.clamp(max=level.depth)
    plan.max_depth = torch.where(stopped, here, plan.max_depth)


def rank_order(joint_logp: Tensor) -> Tensor:
    """Indices by falling score, ties broken towards the earlier, hence shallower, node.

    A stable sort: with equal scores a parent still stands before its child, so any prefix of
    the order is a closed tree (EAGLE's top-k may drop the parent).
    """
    return joint_logp.sort(dim=1, descending=True, stable=True).indices


SORTED_WHOLE = 4096
"""Scores below which one stable sort is faster than keys and top-k. On one CPU core, sort against
top-k of 48: 18 and 36 us for 1 x 1011 scores, 58 and 51 us for 16 x 331, 51 and 8 ms for
1024 x 1011."""


def top_order(joint_logp: Tensor, num_best: int) -> Tensor:
    """`rank_order(joint_logp)[:, :num_best]`, exactly, without sorting wide batches whole.

    Args:
        joint_logp: `[B, P]` float32, free of NaN.

    Returns:
        `[B, min(num_best, P)]` int64.
    """
    if joint_logp.shape[1] == 1 and num_best > 0:
        return torch.zeros_like(joint_logp, dtype=torch.int64)
    if joint_logp.numel() < SORTED_WHOLE:
        return rank_order(joint_logp)[:, :num_best]
    last = joint_logp.shape[1] - 1
    best = rank_keys(joint_logp).topk(min(num_best, last + 1), dim=1).values
    return last - (best & 0xFFFF_FFFF)


def rank_keys(joint_logp: Tensor) -> Tensor:
    """`[B, P]` int64, all different in a row, falling in the order of `rank_order`.

    The high half holds the score's bits, made to grow with the score: those of a negative float
    grow with its size, so all but the sign are flipped. The low half prefers the earlier index.
    In place, because fresh memory would take longer than the sums.
    """
    bits = (joint_logp + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two zeros are equal
    bits ^= (bits >> 31) & 0x7FFF_FFFF
    keys = bits.to(torch.int64)
    keys <<= 32
    keys |= torch.arange(joint_logp.shape[1], device=joint_logp.device).flip(0)
    return keys


def best_of_level(level: Level, width: int) -> Tensor:
    """The `width` best candidates of a level, best first, as pool indices `[B, W]`."""
    return top_order(level.joint_logp, width) + level.start


def best_nodes(pool: DraftPool, num_tokens: int, limit: Tensor | None = None) -> Tensor:
    """The nodes of highest joint probability, in pool order (EAGLE-2's rerank).

    Args:
        num_tokens: N, root counted.
        limit: `[B]` int64, smaller sizes per row, root counted.

    Returns:
        `[B, N]` int64 pool indices, root first, -1 padded at the end.
    """
    chosen = top_order(pool.joint_logp, num_tokens)
    slots = torch.arange(chosen.shape[1], device=chosen.device)
    empty = pool.joint_logp.gather(1, chosen) == float("-inf")
    if limit is not None:
        empty = empty | (slots >= limit[:, None])
    return in_pool_order(chosen, ~empty)


def in_pool_order(index: Tensor, keep: Tensor) -> Tensor:
    """`[B, N]` int64: the kept pool indices in ascending order, -1 padded at the end."""
    last = torch.iinfo(index.dtype).max
    ordered = index.masked_fill(~keep, last).sort(1).values
    return ordered.masked_fill(ordered == last, -1)
