"""Batches of drafted trees for budgets, and every choice that a budget could make of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch import Tensor

from specctl.features import DraftPool
from specctl.policy import Shape, build_shape
from specctl.policy.rules import BudgetRule, Plan
from specctl.tree import TokenTree
from tests.policy.drafts import Probabilities, play

Choice = tuple[frozenset[int], ...]
"""Pool indices that each request verifies."""


def draft(shape: Shape, laws: list[Probabilities]) -> tuple[DraftPool, Tensor]:
    """The pool of a round and what the shape selected of it."""
    given = play(build_shape(shape), laws)
    return given.pool, given.submitted


def share(rule: BudgetRule, pool: DraftPool, submitted: Tensor) -> Tensor:
    """What a budget leaves of a batch that was drafted to the pool's own depth."""
    depth = pool.tree.depth.masked_fill(~pool.tree.valid, 0).amax(1)
    return rule.share(Plan(len(depth), depth), pool, submitted)


def chosen(kept: Tensor) -> Choice:
    return tuple(frozenset(node for node in row if node >= 0) for row in kept.tolist())


def closed_sets(tree: TokenTree, row: int, nodes: list[int]) -> Iterator[frozenset[int]]:
    """All closed subsets of the nodes of a row that hold the root."""
    parent = tree.parent[row].tolist()
    drafted = [node for node in nodes if node > 0]
    for bits in product((False, True), repeat=len(drafted)):
        kept = {0, *(node for node, bit in zip(drafted, bits, strict=True) if bit)}
        if all(parent[node] in kept for node in kept - {0}):
            yield frozenset(kept)


def all_choices(pool: DraftPool, submitted: Tensor) -> list[Choice]:
    """Everything that a budget may answer."""
    rows = [
        list(closed_sets(pool.tree, row, [node for node in nodes if node >= 0]))
        for row, nodes in enumerate(submitted.tolist())
    ]
    return list(product(*rows))


def expected_tokens(pool: DraftPool, choice: Choice) -> float:
    """Tokens that a choice is expected to emit: every request's own, and path probabilities."""
    prob = pool.joint_logp.double().exp().tolist()
    return sum(prob[row][node] if node else 1.0 for row, kept in enumerate(choice) for node in kept)


def num_tokens(choice: Choice) -> int:
    return sum(len(kept) for kept in choice)
