"""The full tree contains what smaller static trees draft, and all of it is submitted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.policy import Chain, FullTree, StaticTree, build_shape
from specctl.policy.growing import pool_capacity
from specctl.tree import TokenTree
from tests.policy.drafts import Probabilities, grow, paths_of, random_law
from tests.trees import check_tree, joint_logp

ALL = 1024
"""Nodes that a static tree may submit: more than it drafts here."""


def tied_law(seed: int, vocab: int) -> Probabilities:
    """A law of few distinct values: ties must be broken alike in both trees."""
    exact = random_law(seed, vocab)

    def law(path: tuple[int, ...]) -> list[float]:
        steps = [1 + round(3 * value) for value in exact(path)]
        return [step / sum(steps) for step in steps]

    return law


def scores(tree: TokenTree, row: int) -> dict[tuple[int, ...], float]:
    """Joint log-probability of every path of a tree."""
    return dict(zip(paths_of(tree, row), joint_logp(tree)[row].tolist(), strict=False))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 4),
    depth=st.integers(1, 4),
    width=st.one_of(st.none(), st.integers(1, 6)),
    tied=st.booleans(),
)
def test_every_smaller_static_tree_is_contained(
    seed: int, top_k: int, depth: int, width: int | None, *, tied: bool
) -> None:
    laws = [(tied_law if tied else random_law)(seed + row, 8) for row in range(2)]
    _, full, _ = grow(build_shape(FullTree(depth=depth, top_k=top_k, width=width)), laws)
    check_tree(full)
    for small in range(1, top_k + 1):
        shape = StaticTree(depth=depth, top_k=small, num_tokens=ALL)
        chain = Chain(num_draft_tokens=depth)
        for contained in (shape, chain):
            _, tree, _ = grow(build_shape(contained), laws)
            for row in range(2):
                assert scores(tree, row).items() <= scores(full, row).items()


def test_a_narrow_tree_may_expand_what_a_wide_level_does_not() -> None:
    """The example of `policy.full`: c's children beat b's first, which tree 2 expands."""
    children = {(): [0.4, 0.31, 0.29, 0.0], (0,): [0.9, 0.05, 0.05, 0.0]}
    children |= {(1,): [0.4, 0.3, 0.2, 0.1], (2,): [0.51, 0.49, 0.0, 0.0]}

    def law(path: tuple[int, ...]) -> list[float]:
        return children.get(path, [0.7, 0.1, 0.1, 0.1])

    wide = FullTree(depth=3, top_k=3, nested=False)
    _, tree, _ = grow(build_shape(wide), [law])
    assert (1, 0, 0) not in paths_of(tree)  # best three: (0, 0), (2, 0), (2, 1)
    _, nested, _ = grow(build_shape(wide.model_copy(update={"nested": True})), [law])
    assert (1, 0, 0) in paths_of(nested)
    _, narrow, _ = grow(build_shape(StaticTree(depth=3, top_k=2, num_tokens=ALL)), [law])
    assert (1, 0, 0) in paths_of(narrow)


@pytest.mark.parametrize("width", [None, 2, 5])
def test_without_nesting_it_is_the_static_tree_of_that_width(width: int | None) -> None:
    laws = [random_law(3), random_law(4)]
    shape = FullTree(depth=4, top_k=3, width=width, nested=False)
    pool, tree, _ = grow(build_shape(shape), laws)
    assert tree.num_slots == pool.tree.num_slots  # all of the pool is submitted
    expanded = [int((pool.expanded & (pool.tree.depth == d))[0].sum()) for d in range(4)]
    best = width or 3
    assert expanded == [1, min(best, 3), best, best]


def test_the_pool_fits_its_capacity() -> None:
    rule = build_shape(FullTree(depth=5, top_k=4, width=7))
    pool, tree, _ = grow(rule, [random_law(seed, sharpness=0.1) for seed in range(8)])
    assert pool.tree.num_slots <= pool_capacity(rule) == rule.max_tokens
    assert bool((tree.num_nodes == pool.tree.num_nodes).all())


def test_a_candidate_without_probability_is_not_expanded() -> None:
    pool, _, _ = grow(build_shape(FullTree(depth=3, top_k=3)), [lambda _: [0.75, 0.25, 0.0, 0.0]])
    impossible = pool.joint_logp == float("-inf")
    assert bool(impossible.any())
    assert not bool((impossible & pool.expanded).any())
