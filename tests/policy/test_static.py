"""Full trees contain smaller static ones; schedules; HeteroSpec's bins; how both rank nodes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.errors import UsageError
from specctl.features import phi
from specctl.policy import (
    Chain,
    ChainSchedule,
    EntropyBins,
    FullTree,
    RootOnly,
    StaticTree,
    at_batch_size,
    build_shape,
    rules,
)
from specctl.policy.rules import rank_order, top_order
from specctl.runtime.words import resolve_policy
from specctl.tree import TokenTree
from tests.policy.drafts import Probabilities, grow, hand_law, paths_of, play, random_law
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


@settings(max_examples=30)
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


@pytest.mark.parametrize("width", [None, 2, 5])
def test_without_nesting_it_is_the_static_tree_of_that_width(width: int | None) -> None:
    laws = [random_law(3), random_law(4)]
    shape = FullTree(depth=4, top_k=3, width=width, nested=False)
    pool, tree, _ = grow(build_shape(shape), laws)
    assert tree.num_slots == pool.num_slots  # all of the pool is submitted
    expanded = [int((pool.expanded & (pool.depth == d))[0].sum()) for d in range(4)]
    best = width or 3
    assert expanded == [1, min(best, 3), best, best]


def test_a_candidate_without_probability_is_not_expanded() -> None:
    pool, _, _ = grow(build_shape(FullTree(depth=3, top_k=3)), [lambda _: [0.75, 0.25, 0.0, 0.0]])
    impossible = pool.joint_logp == float("-inf")
    assert bool(impossible.any())
    assert not bool((impossible & pool.expanded).any())


# --------------------------------------------------------------------------- schedules

TABLE = ChainSchedule(from_batch=(1, 2, 6), num_draft_tokens=(5, 2, 0))


@pytest.mark.parametrize(("batch_size", "length"), [(1, 5), (2, 2), (5, 2), (6, 0), (99, 0)])
def test_a_schedule_is_the_chain_of_its_batch(batch_size: int, length: int) -> None:
    """Node for node and pass for pass, whatever the number of rows."""
    laws = [random_law(row) for row in range(3)]
    given = play(build_shape(TABLE), laws, batch_size=batch_size)
    assert given.plan.max_depth.tolist() == 3 * [length]
    assert at_batch_size(TABLE, batch_size) == (
        Chain(num_draft_tokens=length) if length else RootOnly()
    )
    if length:
        chain = play(build_shape(Chain(num_draft_tokens=length)), laws)
        assert given.submitted.tolist() == chain.submitted.tolist()
        assert given.drafter.num_expansions == chain.drafter.num_expansions == length - 1
    else:
        assert given.submitted.tolist() == 3 * [[0]]
        assert given.drafter.paths == []  # nothing was asked of the drafter


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("from_batch=2/4:num_draft_tokens=3/1", "begin with 1"),
        ("from_batch=1/4/4:num_draft_tokens=3/2/1", "increasing"),
        ("from_batch=1/4:num_draft_tokens=3/2/1", "one length for each of 2"),
        ("from_batch=1/4:num_draft_tokens=0/0", "that is ar"),
        ("num_draft_tokens=3/", "from_batch"),
    ],
)
def test_schedules_that_are_none(settings: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        resolve_policy(f"schedule:{settings}")


# --------------------------------------------------------------------------- HeteroSpec

BASE = StaticTree(depth=2, top_k=2, num_tokens=7)


def entropy(probabilities: list[float]) -> float:
    total = sum(probabilities)
    return -sum(p / total * math.log(p / total) for p in probabilities)


def hetero(edges: tuple[float, ...], **changes: object) -> EntropyBins:
    return EntropyBins(base=BASE, edges=edges, **{"gammas": (0.5, 1.0), "alpha": 2, **changes})


def test_phi_adds_the_entropies_that_led_to_the_best_last_node() -> None:
    pool, _, _ = grow(build_shape(BASE), [hand_law])
    # Level 2's best node is aa (.36); its path was drawn from the root's and from a's law.
    expected = entropy(hand_law(())) + entropy(hand_law((0,)))
    assert float(phi(pool)) == pytest.approx(expected, rel=1e-6)


def test_plan_of_every_bin_and_its_options() -> None:
    base = StaticTree(depth=6, top_k=10, num_tokens=60)
    edges = tuple(map(float, range(1, 8)))
    shape = EntropyBins(base=base, edges=edges)
    assert shape.plan_depths == (9, 8, 7, 6, 6, 6, 6, 6)
    assert shape.plan_tokens == (21, 38, 61, 60, 60, 60, 60, 60)
    literal = EntropyBins(base=base, edges=edges, index_base=1)
    assert literal.plan_depths[:3] == (8, 7, 6)
    capped = EntropyBins(base=base, edges=edges, cap_tokens=True)
    assert max(capped.plan_tokens) == 60
    tiny = EntropyBins(base=StaticTree(depth=6, top_k=2, num_tokens=8), edges=edges)
    assert tiny.plan_tokens[0] == 10, "a chain of the extended depth always fits"


def test_highest_bin_is_the_base_tree() -> None:
    shape = hetero(edges=(0.0, 0.001, 0.002))
    _, tree, drafter = grow(build_shape(shape), [random_law(0)])
    _, base, _ = grow(build_shape(BASE), [random_law(0)])
    assert paths_of(tree) == paths_of(base)
    assert drafter.num_expansions == 1, "no level is drafted that nobody wants"


@pytest.mark.parametrize(("alpha", "low", "high"), [(2, 6, 8), (0, 4, 7)])
def test_phi_on_an_edge_goes_left(alpha: int, low: int, high: int) -> None:
    """Bins of ceil(0.5 · 7 + 2) and ceil(1.0 · 7 + 1) nodes; alpha 0 extends none: ceil(0.5 · 7)
    and 7."""
    pool, _, _ = grow(build_shape(BASE), [random_law(0)])
    edge = float(phi(pool))
    _, on_edge, _ = grow(build_shape(hetero(edges=(edge,), alpha=alpha)), [random_law(0)])
    below = float(torch.nextafter(torch.tensor(edge), torch.tensor(0.0)))
    _, above, _ = grow(build_shape(hetero(edges=(below,), alpha=alpha)), [random_law(0)])
    assert int(on_edge.num_nodes) == low
    assert int(above.num_nodes) == high


# --------------------------------------------------------------------------- order

TINY = float(torch.finfo(torch.float32).smallest_normal)
SCORES = st.sampled_from([0.0, -0.0, -1.0, -1.0000001, -TINY, -TINY / 2, -3e38, float("-inf"), 2.5])
POOLS = st.integers(1, 40).flatmap(
    lambda width: st.lists(st.lists(SCORES, min_size=width, max_size=width), min_size=1, max_size=4)
)


def order_by_keys(scores: torch.Tensor, num_best: int) -> torch.Tensor:
    """The order as of a batch that is too wide to be sorted whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "SORTED_WHOLE", 0)
        return top_order(scores, num_best)


@settings(max_examples=60)
@given(pool=POOLS, num_best=st.integers(1, 50))
def test_order_is_that_of_the_stable_sort(pool: list[list[float]], num_best: int) -> None:
    """Ties, zeros and -inf included."""
    scores = torch.tensor(pool)
    assert torch.equal(order_by_keys(scores, num_best), rank_order(scores)[:, :num_best])


def test_every_float_keeps_its_place() -> None:
    """All floats of one row, drawn over the whole range of bits, against the sort."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1, 60_000), generator=generator).to(torch.int32)
    scores = bits.view(torch.float32)
    scores = scores[torch.isfinite(scores)][None]
    assert scores.shape[1] > 50_000
    assert torch.equal(order_by_keys(scores, scores.shape[1]), rank_order(scores))
