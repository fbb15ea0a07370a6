"""HeteroSpec's rule: Φ by hand, bins, extension and pruning, alone and in a batch."""

from __future__ import annotations

import math

import pytest
import torch

from specctl.features import meta_path, phi
from specctl.policy import EntropyBins, StaticTree, build_shape
from tests.policy.drafts import grow, hand_law, paths_of, random_law

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


def test_meta_path_by_the_last_tokens_own_probability() -> None:
    pool, _, _ = grow(build_shape(BASE), [hand_law])
    by_path, by_token = meta_path(pool), meta_path(pool, conditional=True)
    assert float(pool.joint_logp[0, by_path].exp()) == pytest.approx(0.36)
    assert float(pool.tree.draft_logp[0, by_token].exp()) == pytest.approx(0.8)  # b, a


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


def test_lowest_bin_extends_and_prunes() -> None:
    rule = build_shape(hetero(edges=(50.0,)))
    pool, tree, _ = grow(rule, [random_law(0)])
    assert int(pool.tree.depth.max()) == 4  # 2 + alpha 2 - rank 0
    assert int(tree.num_nodes) == 6  # ceil(0.5 · 7 + 2)


def test_highest_bin_is_the_base_tree() -> None:
    shape = hetero(edges=(0.0, 0.001, 0.002))
    _, tree, drafter = grow(build_shape(shape), [random_law(0)])
    _, base, _ = grow(build_shape(BASE), [random_law(0)])
    assert paths_of(tree) == paths_of(base)
    assert drafter.num_expansions == 1, "no level is drafted that nobody wants"


def test_phi_on_an_edge_goes_left() -> None:
    pool, _, _ = grow(build_shape(BASE), [random_law(0)])
    edge = float(phi(pool))
    _, on_edge, _ = grow(build_shape(hetero(edges=(edge,))), [random_law(0)])
    below = float(torch.nextafter(torch.tensor(edge), torch.tensor(0.0)))
    _, above, _ = grow(build_shape(hetero(edges=(below,))), [random_law(0)])
    assert int(on_edge.num_nodes) == 6  # the low bin
    assert int(above.num_nodes) == 8  # the high bin: ceil(1.0 · 7 + 1)
