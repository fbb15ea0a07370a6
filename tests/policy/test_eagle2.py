"""EAGLE-2's tree: a drawing checked by hand, and an independent telling of the algorithm."""

from __future__ import annotations

import math

import pytest

from specctl.policy import Chain, RootOnly, StaticTree, build_shape
from tests.policy.drafts import (
    NAMES,
    A,
    Probabilities,
    certain_law,
    grow,
    hand_law,
    paths_of,
    random_law,
    uniform_law,
)
from tests.trees import draw


def test_tree_equals_the_drawing() -> None:
    rule = build_shape(StaticTree(depth=3, top_k=2, num_tokens=7))
    _, tree, _ = grow(rule, [hand_law])
    # The six best candidates: a .6, aa .36, b .3, ba .24, aaa .216, bab .192.
    assert draw(tree, label=NAMES.__getitem__) == (
        "root\n├─ a\n│  └─ a\n│     └─ a\n└─ b\n   └─ a\n      └─ b"
    )


def test_chain_follows_the_likeliest_token() -> None:
    _, tree, drafter = grow(build_shape(Chain(num_draft_tokens=3)), [hand_law])
    assert paths_of(tree) == [(), (A,), (A, A), (A, A, A)]
    assert drafter.num_expansions == 2, "level 1 comes from the root's logits"


def test_root_only_drafts_nothing() -> None:
    rule = build_shape(RootOnly())
    assert (rule.max_depth, rule.max_tokens) == (0, 1)


def eagle2_by_the_book(
    law: Probabilities, depth: int, top_k: int, num_tokens: int
) -> set[tuple[int, ...]]:
    """Expand and rerank as notes/engines.md 1.1 words it, with plain Python containers."""

    def children(path: tuple[int, ...]) -> list[tuple[int, ...]]:
        ranked = sorted(range(12), key=lambda token: -law(path)[token])
        return [(*path, token) for token in ranked[:top_k]]

    def score(path: tuple[int, ...]) -> float:
        return sum(math.log(law(path[:i])[path[i]]) for i in range(len(path)))

    pool = children(())
    frontier = pool
    for _ in range(depth - 1):
        proposed = [child for node in frontier for child in children(node)]
        pool = pool + proposed
        frontier = sorted(proposed, key=score, reverse=True)[:top_k]
    return {(), *sorted(pool, key=score, reverse=True)[: num_tokens - 1]}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("depth", "top_k", "num_tokens"), [(1, 3, 3), (4, 3, 9), (5, 4, 30)])
def test_tree_equals_the_algorithm(seed: int, depth: int, top_k: int, num_tokens: int) -> None:
    rule = build_shape(StaticTree(depth=depth, top_k=top_k, num_tokens=num_tokens))
    law = random_law(seed)
    _, tree, _ = grow(rule, [law])
    assert set(paths_of(tree)) == eagle2_by_the_book(law, depth, top_k, num_tokens)


def test_ties_keep_ancestors() -> None:
    rule = build_shape(StaticTree(depth=5, top_k=1, num_tokens=6))
    assert paths_of(grow(rule, [certain_law])[1]) == [(A,) * length for length in range(6)]


def test_equal_scores_prefer_shallow_then_early_nodes() -> None:
    rule = build_shape(StaticTree(depth=3, top_k=2, num_tokens=4))
    _, tree, _ = grow(rule, [uniform_law])
    assert [len(path) for path in paths_of(tree)] == [0, 1, 1, 2]
