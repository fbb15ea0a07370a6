"""OPT-Tree: the best tree under a node budget, and the level that adds too little."""

from __future__ import annotations

import heapq
import math

import pytest

from specctl.policy import OptTree, build_shape
from specctl.policy.opt_tree import expected_accepted
from tests.policy.drafts import A, B, Probabilities, grow, hand_law, paths_of, random_law


@pytest.mark.parametrize(
    ("min_gain", "paths"),
    [
        # Four draft nodes. Level 1: a .6, b .3, together .9. Level 2: aa .36 and ba .24 join,
        # 1.5 together, a gain of .6. Level 3 has nothing among the best four: it would gain 0.
        (0.95, [(), (A,), (B,)]),
        (0.7, [(), (A,), (B,), (A, A), (B, A)]),
        (0.5, [(), (A,), (B,), (A, A), (B, A)]),
    ],
)
def test_the_gain_of_a_level_by_hand(min_gain: float, paths: list[tuple[int, ...]]) -> None:
    rule = build_shape(OptTree(depth=3, top_k=2, num_tokens=5, min_gain=min_gain))
    _, tree, drafter = grow(rule, [hand_law])
    assert paths_of(tree) == paths
    # At .5 the gain of level 2 pays for drafting level 3, whose own gain comes too late.
    assert drafter.num_expansions == {0.95: 0, 0.7: 1, 0.5: 2}[min_gain]


def test_expectation_by_hand() -> None:
    pool, _, _ = grow(build_shape(OptTree(depth=2, top_k=2, num_tokens=5, min_gain=0)), [hand_law])
    assert float(expected_accepted(pool.joint_logp, 4)) == pytest.approx(1.5, rel=1e-6)
    assert float(expected_accepted(pool.joint_logp[:, :3], 4)) == pytest.approx(0.9, rel=1e-6)
    assert float(expected_accepted(pool.joint_logp[:, :1], 4)) == 0.0


def test_a_gain_on_the_threshold_stops() -> None:
    rule = build_shape(OptTree(depth=3, top_k=2, num_tokens=5, min_gain=1.0))
    _, tree, _ = grow(rule, [lambda _: [1.0, 0.0, 0.0, 0.0]])
    assert int(tree.depth.max()) == 1, "each level gains exactly one token"


def best_first(law: Probabilities, num_nodes: int, depth: int) -> set[tuple[int, ...]]:
    """The likeliest `num_nodes` paths by a heap over the whole vocabulary."""
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    best: list[tuple[int, ...]] = []
    while heap and len(best) <= num_nodes:
        cost, path = heapq.heappop(heap)
        best.append(path)
        if len(path) < depth:
            for token, prob in enumerate(law(path)):
                heapq.heappush(heap, (cost - math.log(prob), (*path, token)))
    return set(best)


@pytest.mark.parametrize("seed", range(10))
def test_the_tree_is_the_likeliest_of_its_size(seed: int) -> None:
    """With the paper's top_k, the node budget, the frontier leaves out nothing."""
    rule = build_shape(OptTree(depth=4, top_k=7, num_tokens=8, min_gain=0.0))
    law = random_law(seed)
    _, tree, _ = grow(rule, [law])
    assert set(paths_of(tree)) == best_first(law, 7, 4)
