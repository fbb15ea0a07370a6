"""The contract of acceptances: the target's outputs, and a rule's decisions on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import Acceptance, AcceptanceFamily
from specctl.tree import DraftPool, TokenTree


@dataclass(frozen=True)
class DraftDistribution:
    """The drafter's distributions from which submitted nodes were drafted."""

    logits: Tensor  # `[B, N, Vd]` float32, processed; arbitrary at the root
    target_ids: Tensor  # `[Vd]` int64, target id of each draft id


@dataclass(frozen=True)
class Verification:
    """The inputs of an acceptance."""

    tree: TokenTree  # submitted nodes, `[B, N]`
    target_ids: Tensor  # `[B, N]` int64, the target's own token after each node, drawn or argmax
    logits: Tensor  # `[B, N, V]`, raw, after each node
    processed: Tensor
    """`[B, N, V]` logits after temperature, top-k and top-p; `logits` itself if all rows are
    greedy."""
    greedy: Tensor  # `[B]` bool
    seeds: Tensor  # `[B]` int64, of each request's stream
    positions: Tensor  # `[B, N]` int64, output position of the token in `target_ids`
    memory: Tensor  # `[B, M]` float64, the acceptance's memory of each request
    drafted_from: DraftDistribution | None = None  # if the rule needs it


@dataclass(frozen=True)
class Judgement:
    """An acceptance's decision on a verification."""

    admitted: Tensor  # `[B, N]` bool, the node may follow its parent; at most one child per node
    target_ids: Tensor
    """`[B, N]` int64, token emitted if the node is the last admitted one: the target's own, unless
    the rule draws another."""
    evidence: Tensor | None = None  # `[B, N]` float32, the rule's measurements, for `observe`


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round of B requests."""

    pool: DraftPool  # all candidates, `[B, P]`
    submitted: Tensor  # `[B, N]` int64, pool index of every verified node, root first, -1 padded
    tree: TokenTree  # the verified nodes, `[B, N]`
    path: Tensor  # `[B, D + 1]` int64, tree indices of root and accepted nodes, -1 padded
    target_ids: Tensor  # as in `Judgement`
    evidence: Tensor | None = None  # as in `Judgement`

    @property
    def num_accepted(self) -> Tensor:
        """`[B]` int64: draft tokens that verification admitted."""
        return (self.path >= 0).sum(1) - 1


class AcceptanceRule(Protocol):
    """The rule that admits draft tokens."""

    memory_size: int  # as in `ShapeRule`
    needs_draft_distribution: bool  # it reads `Verification.drafted_from`
    samples_drafts: bool  # draft tokens must be drawn from the drafter

    def judge(self, given: Verification) -> Judgement:
        """Decides which nodes may follow their parents."""
        ...

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        """Updates the requests' memory `[B, M]` by a round."""
        ...


class Strict(Acceptance):
    """Point-mass verification: follow the child that equals the target's token. Lossless."""

    kind: Literal["strict"] = "strict"


def of_parent(values: Tensor, tree: TokenTree) -> Tensor:
    """`[B, N]`: the value of each node's parent, or of node 0 for nodes without a parent."""
    return values.gather(1, tree.parent.clamp(min=0))


def follows(tree: TokenTree, wanted: Tensor) -> Tensor:
    """`[B, N]` bool: the node's token equals its parent's entry in `wanted` `[B, N]`."""
    return (tree.token_ids == of_parent(wanted, tree)) & (tree.parent >= 0)


def has_child(tree: TokenTree, marked: Tensor) -> Tensor:
    """`[B, N]` bool: some child of the node is marked."""
    counts = torch.zeros_like(tree.parent)
    counts.scatter_add_(1, tree.parent.clamp(min=0), (marked & (tree.parent >= 0)).long())
    return counts > 0


def earlier_siblings(tree: TokenTree) -> Tensor:
    """`[B, N, N]` bool: node j is an earlier sibling of node i."""
    slots = torch.arange(tree.num_slots, device=tree.parent.device)
    same = (tree.parent[:, :, None] == tree.parent[:, None, :]) & (tree.parent >= 0)[:, None, :]
    return same & (slots[None, :] < slots[:, None])


def denied_ids(listed: Iterable[int], eos_ids: Collection[int], device: Device) -> Tensor:
    """`[K]` int64: tokens that no relaxation may accept or replace, `eos_ids` included."""
    return torch.tensor(sorted({*listed, *eos_ids}), dtype=torch.int64, device=device)


class StrictAcceptance:
    """Admits the child that holds the target's own token."""

    memory_size = 0
    needs_draft_distribution = False
    samples_drafts = False

    def judge(self, given: Verification) -> Judgement:
        return Judgement(follows(given.tree, given.target_ids), given.target_ids)

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        del outcome
        return memory


def strict_acceptance(record: Strict, device: Device, eos_ids: Collection[int]) -> StrictAcceptance:
    del record, device, eos_ids
    return StrictAcceptance()


STRICT = AcceptanceFamily(record=Strict, rule=strict_acceptance, is_lossless=True)
