"""Drafters given by a function of the path, the shapes grown from them, and every choice that a
budget could make of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specctl.collect.dense.drafters import DenseDrafter
from specctl.features import RECENT_TOKENS
from specctl.policy import Shape, build_shape
from specctl.policy.growing import grow_tree
from specctl.policy.rules import BudgetRule, Plan, RoundStart, ShapeRule, fresh_start
from specctl.policy.verification import Verification
from specctl.runtime.requests import Stopwatch
from specctl.tree import DraftPool, TokenTree, take
from tests.trees import check_tree

Probabilities = Callable[[tuple[int, ...]], list[float]]


class PathDrafter(DenseDrafter):
    """A drafter whose distribution after a path is looked up; rows may differ."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, rows: list[Probabilities]) -> None:
        self.rows = rows
        self.vocab_size = len(rows[0](()))
        self.paths: list[list[tuple[int, ...]]] = []
        self.num_expansions = 0

    def begin_round(self) -> Tensor:
        self.paths = [[()] for _ in self.rows]
        return self._logits()[:, 0]

    def expand(self, token_ids: Tensor, parent_slot: Tensor) -> Tensor:
        self.num_expansions += 1
        self.paths = [
            [(*before[slot], token) for token, slot in zip(tokens, slots, strict=True)]
            for before, tokens, slots in zip(
                self.paths, token_ids.tolist(), parent_slot.tolist(), strict=True
            )
        ]
        return self._logits()

    def _logits(self) -> Tensor:
        rows = zip(self.rows, self.paths, strict=True)
        return torch.tensor([[law(path) for path in paths] for law, paths in rows]).log()


class Round(NamedTuple):
    """A round up to the budget."""

    plan: Plan
    pool: DraftPool
    submitted: Tensor
    drafter: PathDrafter

    @property
    def tree(self) -> TokenTree:
        """The submitted tree, checked."""
        tree = take(self.pool, self.submitted)
        check_tree(tree)
        return tree


def play(
    rule: ShapeRule,
    rows: list[Probabilities],
    memory: Tensor | None = None,
    batch_size: int = 1,
) -> Round:
    """A round of requests that remember so much; nothing by default."""
    if memory is None:
        memory = fresh_start(len(rows), rule.memory_size).memory
    plan = rule.begin(RoundStart(len(rows), memory, batch_size))
    drafter, root = PathDrafter(rows), torch.full((len(rows),), 99)
    text = (torch.arange(RECENT_TOKENS) % 3).expand(len(rows), -1)
    recent = text if rule.needs_text else None
    pool = grow_tree(rule, plan, drafter, root, Stopwatch(), recent)
    return Round(plan, pool, rule.select(plan, pool), drafter)


def grow(rule: ShapeRule, rows: list[Probabilities]) -> tuple[DraftPool, TokenTree, PathDrafter]:
    """The pool and the submitted tree of one round."""
    given = play(rule, rows)
    return given.pool, given.tree, given.drafter


def random_law(seed: int, vocab: int = 12, sharpness: float = 2.0) -> Probabilities:
    """A distribution for every path, the same for the same seed."""

    def law(path: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
        return (sharpness * torch.randn(vocab, generator=generator)).softmax(0).tolist()

    return law


def paths_of(tree: TokenTree, row: int = 0) -> list[tuple[int, ...]]:
    """Token path of every node of a row, in tree order, the root's empty."""
    parent, tokens = tree.parent[row].tolist(), tree.token_ids[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.num_nodes[row])):
        paths.append((*paths[parent[node]], tokens[node]))
    return paths


# --------------------------------------------------------------------------- drawn by hand

A, B, C, D = range(4)


def hand_law(path: tuple[int, ...]) -> list[float]:
    """By hand, top_k 2, depth 3. Joint probabilities of all candidates:

    level 1: a .6  b .3
    level 2 (a and b expanded): aa .36  ab .18  | ba .24  bc .03
    level 3 (aa .36 and ba .24 expanded): aaa .216  aad .108  | bab .192  bac .024
    """
    table = {
        (): [0.6, 0.3, 0.06, 0.04],
        (A,): [0.6, 0.3, 0.06, 0.04],
        (B,): [0.8, 0.05, 0.1, 0.05],
        (A, A): [0.6, 0.05, 0.05, 0.3],
        (B, A): [0.05, 0.8, 0.1, 0.05],
    }
    return table[path]


def certain_law(path: tuple[int, ...]) -> list[float]:
    """Probability 1 at every step: all scores tie at 0, the case that breaks EAGLE's top-k."""
    return [1.0, 0.0, 0.0, 0.0]


def uniform_law(path: tuple[int, ...]) -> list[float]:
    return [0.25] * 4


LEVELS = ([0.9, 0.1, 0.0, 0.0], [0.8, 0.2, 0.0, 0.0], [0.3, 0.25, 0.25, 0.2], [0.9, 0.1, 0.0, 0.0])
"""A chain's distributions, level by level; the likeliest token is always the first.

    level                1      2      3      4
    probability         .9     .8     .3     .9
    of the path         .9    .72   .216   .194
    entropy (nats)    .325   .500  1.376   .325
    its square root   .570   .707  1.173   .570
    1 - sqrt(.2 H)    .745   .684   .475   .745
"""


def chain_law(path: tuple[int, ...]) -> list[float]:
    return LEVELS[len(path)]


def sure(path: tuple[int, ...]) -> list[float]:
    return [0.9, 0.1] if not path else [0.8, 0.2]


def unsure(path: tuple[int, ...]) -> list[float]:
    return [0.6, 0.4] if not path else [0.5, 0.5]


# --------------------------------------------------------------------------- batches

Choice = tuple[frozenset[int], ...]
"""DraftPool indices that each request verifies."""


def draft(shape: Shape, laws: list[Probabilities]) -> tuple[DraftPool, Tensor]:
    """The pool of a round and what the shape selected of it."""
    return play(build_shape(shape), laws)[1:3]


def share(rule: BudgetRule, pool: DraftPool, submitted: Tensor) -> Tensor:
    """What a budget leaves of a batch that was drafted to the pool's own depth."""
    depth = pool.depth.masked_fill(~pool.valid, 0).amax(1)
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
        list(closed_sets(pool, row, [node for node in nodes if node >= 0]))
        for row, nodes in enumerate(submitted.tolist())
    ]
    return list(product(*rows))


def expected_tokens(pool: DraftPool, choice: Choice) -> float:
    """Tokens that a choice is expected to emit: every request's own, and path probabilities."""
    prob = pool.joint_logp.double().exp().tolist()
    return sum(prob[row][node] if node else 1.0 for row, kept in enumerate(choice) for node in kept)


def num_tokens(choice: Choice) -> int:
    return sum(len(kept) for kept in choice)


# --------------------------------------------------------------------------- verification


def tree_of_nodes(root: int, *nodes: tuple[int, int], logp: float = -1.0) -> TokenTree:
    """A tree of one row from a root token and (token, parent) of the others."""
    tokens, parents = [root, *(t for t, _ in nodes)], [-1, *(p for _, p in nodes)]
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    draft_logp = torch.full((1, len(tokens)), logp)
    draft_logp[:, 0] = 0
    return TokenTree(*(torch.tensor([c]) for c in (tokens, parents, depth)), draft_logp)


def verification(
    drawn: TokenTree,
    logits: Tensor,
    target_ids: Tensor | None = None,
    processed: Tensor | None = None,
    **more: Any,
) -> Verification:
    """Greedy unless the target's tokens are given; seeds 0, 1, ..."""
    rows = len(drawn.parent)
    given = {
        "tree": drawn,
        "target_ids": logits.argmax(-1) if target_ids is None else target_ids,
        "logits": logits,
        "processed": logits if processed is None else processed,
        "greedy": torch.full((rows,), target_ids is None),
        "seeds": torch.arange(rows),
        "positions": 1 + drawn.depth,
        "memory": torch.zeros(rows, 0, dtype=torch.float64),
    }
    return Verification(**given | more)
