"""The contract of rules: the calls of a round to a shape and a budget.

Everything is batched and stays on the device. The rows of a batch are requests at run time, and
positions of a log in replay.

A round calls, in order: `begin`, `grow` after every drafted level, `select` once, the budget's
`share`, the acceptance's `judge` on the target's outputs, and `observe` on the outcome.

Rules hold parameters and no state. The *memory* of a request is a row of numbers that a rule
updates from round to round, stored by slot at run time and by request in replay. It is zero in a
request's first round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specctl.lazy import Device, Tensor, torch
from specctl.policy.verification import Outcome
from specctl.tree import DraftPool


@dataclass(frozen=True)
class RoundStart:
    """The state of B requests when a round begins."""

    num_rows: int  # B
    memory: Tensor  # `[B, M]` float64, the shape's memory of each request
    batch_size: int = 1  # requests that decode together; in replay each row is decoded alone


def fresh_start(num_rows: int, memory_size: int = 0, device: Device = "cpu") -> RoundStart:
    """The first round of B requests."""
    memory = torch.zeros(num_rows, memory_size, dtype=torch.float64, device=device)
    return RoundStart(num_rows, memory)


@dataclass
class Plan:
    """A shape's state within one round."""

    num_rows: int  # B
    max_depth: Tensor
    """`[B]` int64, levels drafted for each row; deeper levels, drafted for other rows, are never
    submitted."""
    bins: Tensor | None = None  # `[B]` int64, the bin of HeteroSpec, once chosen
    stopped_at: Tensor | None = None
    """`[B]` int64, the level whose gate closed, 0 for none; a budget may spend spare tokens on its
    nodes."""
    deepest: int | None = None  # deepest level of any row, if known on the host


@dataclass(frozen=True)
class Level:
    """The candidates of one drafted level."""

    depth: int  # 1 for the root's children
    pool: DraftPool  # `[B, P']`, up to this level
    start: int  # index of the level's first candidate

    @property
    def joint_logp(self) -> Tensor:
        """`[B, C]`: scores of the level's candidates."""
        return self.pool.joint_logp[:, self.start :]


@dataclass(frozen=True)
class Frontier:
    """The candidates to expand next."""

    index: Tensor  # `[B, W]` int64 pool indices, likeliest first
    keep: Tensor
    """`[B, W]` bool, whether to expand; kept nodes are first. A row without kept nodes has stopped,
    and drafting ends when all rows have."""


class ShapeRule(Protocol):
    """The growth of a tree, and the choice of its submitted nodes."""

    max_depth: int  # levels at most, in any round
    top_k: int  # children per expanded node
    width: int  # nodes expanded per level at most
    max_tokens: int  # nodes submitted at most, root counted
    memory_size: int  # M, numbers in a request's memory; mostly 0
    needs_text: bool  # reads features that compare tokens with the recent text

    def begin(self, start: RoundStart) -> Plan:
        """Starts a round."""
        ...

    def grow(self, plan: Plan, level: Level) -> Frontier:
        """Chooses the nodes to expand after a level; not called after the deepest."""
        ...

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        """The nodes to verify, a tree: `[B, N]` ascending pool indices, root first, -1 padded."""
        ...

    def unsound(self, plan: Plan) -> Tensor | None:
        """`[B]` bool: rows with NaN scores, after `select`; None without learned scores."""
        ...

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        """Updates the requests' memory `[B, M]` by a round."""
        ...


class BudgetRule(Protocol):
    """The sharing of verification in a batch."""

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        """The nodes that each request of the batch may verify.

        Args:
            plan: of the shape, after drafting.
            submitted: `[B, N]` int64, selected by the shape.

        Returns:
            `[B, N']` int64, in each row a subset of `submitted` that is a tree with the root:
            ascending, -1 padded.
        """
        ...


@dataclass
class BaseShape(ShapeRule):
    """Defaults of rules: fixed depth, EAGLE-2's frontier and rerank."""

    max_depth: int  # see `ShapeRule`, as of the next three
    top_k: int  # children per expanded node
    width: int  # nodes expanded per level at most
    max_tokens: int  # nodes submitted at most, root counted
    device: Device = "cpu"  # of the tensors that it makes
    memory_size: int = 0  # numbers in a request's memory
    needs_text: bool = False  # reads features of the text

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
        del outcome  # most rules have no memory
        return memory


def is_fixed(rule: ShapeRule) -> bool:
    """Whether the size of a round is known when it begins: the draft changes only the ranking of
    nodes, which for a chain is fixed too."""
    chooses = (type(rule).grow, type(rule).select, type(rule).observe)
    return chooses == (BaseShape.grow, BaseShape.select, BaseShape.observe)


def rows_below(plan: Plan, level: Level, index: Tensor) -> Frontier:
    """A frontier kept whole in the rows that draft deeper than this level."""
    return Frontier(index, (plan.max_depth > level.depth)[:, None].expand_as(index))


def stop_rows(plan: Plan, level: Level, stopped: Tensor) -> None:
    """Ends drafting at this level in rows `[B]` bool."""
    here = plan.max_depth.clamp(max=level.depth)
    plan.max_depth = torch.where(stopped, here, plan.max_depth)


def rank_order(joint_logp: Tensor) -> Tensor:
    """Indices by falling score; of ties the earlier, hence shallower, node comes first.

    The sort is stable: with equal scores a parent precedes its child, so that every prefix of the
    order is a tree (EAGLE's top-k may drop the parent).
    """
    return joint_logp.sort(dim=1, descending=True, stable=True).indices


SORTED_WHOLE = 4096
"""Scores below which one stable sort is faster than keys and top-k. On one CPU core, sort against
top-k of 48: 18 and 36 us for 1 x 1011 scores, 58 and 51 us for 16 x 331, 51 and 8 ms for
1024 x 1011."""


def top_order(joint_logp: Tensor, num_best: int) -> Tensor:
    """Exactly `rank_order(joint_logp)[:, :num_best]`, without sorting wide batches whole.

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
    """`[B, P]` int64, distinct in a row, falling in the order of `rank_order`.

    The high half holds the score's bits, made monotone: those of a negative float grow with its
    magnitude, so all but the sign are flipped. The low half prefers the earlier index. Computed in
    place, as fresh memory would take longer than the arithmetic.
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
        limit: `[B]` int64, smaller sizes of rows, root counted.

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


def is_closed(submitted: Tensor, parent: Tensor, max_tokens: int) -> bool:
    """Whether rows `[B, N]` of pool indices are trees: ascending, root first, parents present."""
    valid, index = submitted >= 0, submitted.clamp(min=0)
    is_in = torch.zeros_like(parent, dtype=torch.bool).scatter(1, index, True)
    above = parent.gather(1, submitted.clamp(min=1))
    has_parent = is_in.gather(1, above.clamp(min=0)) | ~valid | (submitted == 0)
    ascends = (submitted[:, 1:] > submitted[:, :-1]) | ~valid[:, 1:]
    sound = [submitted[:, 0] == 0, has_parent.all(1), ascends.all(1), valid.sum(1) <= max_tokens]
    return bool(torch.stack(sound).all())
