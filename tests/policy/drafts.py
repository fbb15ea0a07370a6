"""Drafters given by a function of the path, and the shapes grown from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.collect.dense.trees import DenseSource
from specctl.features import DraftPool
from specctl.policy.growing import grow_tree
from specctl.policy.rules import Plan, RoundStart, ShapeRule, fresh_start
from specctl.runtime.metrics import Stopwatch
from specctl.tree import TokenTree, check_tree, take

Probabilities = Callable[[tuple[int, ...]], list[float]]


class PathDrafter:
    """A drafter whose distribution after a path is looked up; rows may differ."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, rows: list[Probabilities]) -> None:
        self.rows = rows
        self.vocab_size = len(rows[0](()))
        self.paths: list[list[tuple[int, ...]]] = []
        self.num_expansions = 0

    def begin_round(self, num_rows: int) -> Tensor:
        self.paths = [[()] for _ in range(num_rows)]
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

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


class Round(NamedTuple):
    """A round up to the budget."""

    plan: Plan
    pool: DraftPool
    submitted: Tensor
    drafter: PathDrafter

    @property
    def tree(self) -> TokenTree:
        """The submitted tree, checked."""
        tree = take(self.pool.tree, self.submitted)
        check_tree(tree)
        return tree


def play(rule: ShapeRule, rows: list[Probabilities], memory: Tensor | None = None) -> Round:
    """A round of requests that remember so much; nothing by default."""
    start = fresh_start(len(rows), rule.memory_size)
    plan = rule.begin(start if memory is None else RoundStart(len(rows), memory))
    drafter, root = PathDrafter(rows), torch.full((len(rows),), 99)
    pool = grow_tree(rule, plan, DenseSource(drafter), root, Stopwatch())
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
