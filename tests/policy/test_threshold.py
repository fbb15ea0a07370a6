"""The joint-probability threshold: by hand, against its definition, and the pruning that it shares
with classifiers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy import JointThreshold, build_shape
from specctl.policy.pruning import PrunedShape
from tests.policy.drafts import (
    A,
    B,
    C,
    Probabilities,
    certain_law,
    grow,
    hand_law,
    paths_of,
    random_law,
    uniform_law,
)

# Joint probabilities of hand_law: a .6, b .3; aa .36, ba .24, ab .18; aaa .216, bab .192, aad .108.


@pytest.mark.parametrize(
    ("min_prob", "paths"),
    [
        (0.7, [()]),
        (0.5, [(), (A,)]),
        (0.15, [(), (A,), (B,), (A, A), (A, B), (B, A), (A, A, A), (B, A, B)]),
    ],
)
def test_the_tree_by_hand(min_prob: float, paths: list[tuple[int, ...]]) -> None:
    rule = build_shape(JointThreshold(depth=3, top_k=2, min_prob=min_prob))
    _, tree, drafter = grow(rule, [hand_law])
    assert paths_of(tree) == paths
    deepest_expanded = {0.7: 0, 0.5: 1, 0.15: 2}[min_prob]
    assert drafter.num_expansions == deepest_expanded, "nothing is drafted below what is unlikely"


def test_a_node_on_the_threshold_is_kept() -> None:
    rule = build_shape(JointThreshold(depth=2, top_k=4, min_prob=0.25))
    _, tree, _ = grow(rule, [uniform_law])
    assert len(paths_of(tree)) == 5


def test_a_cap_keeps_the_likeliest() -> None:
    rule = build_shape(JointThreshold(depth=3, top_k=2, min_prob=0.15, num_tokens=5))
    _, tree, _ = grow(rule, [hand_law])
    assert paths_of(tree) == [(), (A,), (B,), (A, A), (B, A)]


def likely_paths(law: Probabilities, min_prob: float, depth: int) -> set[tuple[int, ...]]:
    """Every path of the whole vocabulary that is likely enough, with plain Python containers."""
    found, level = {()}, {(): 1.0}
    for _ in range(depth):
        children = ((path, prob, enumerate(law(path))) for path, prob in level.items())
        deeper = {(*path, t): prob * p for path, prob, law_of in children for t, p in law_of}
        level = {path: prob for path, prob in deeper.items() if prob >= min_prob}
        found |= level.keys()
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("min_prob", [0.3, 0.1, 0.04])
def test_the_tree_is_all_that_is_likely(seed: int, min_prob: float) -> None:
    """With the whole vocabulary as top_k the beam leaves out nothing."""
    rule = build_shape(JointThreshold(depth=4, top_k=12, min_prob=min_prob))
    law = random_law(seed)
    _, tree, _ = grow(rule, [law])
    assert set(paths_of(tree)) == likely_paths(law, min_prob, 4)


@pytest.mark.parametrize("law", [certain_law, uniform_law])
@pytest.mark.parametrize("min_prob", [0.02, 0.25, 0.3333333, 0.9999])
def test_no_tree_outgrows_what_the_record_states(law: Probabilities, min_prob: float) -> None:
    record = JointThreshold(depth=6, top_k=4, min_prob=min_prob)
    rule = build_shape(record)
    _, tree, _ = grow(rule, [law])
    assert int(tree.num_nodes[0]) <= record.most_tokens == rule.max_tokens


def test_no_threshold_keeps_the_whole_beam() -> None:
    rule = build_shape(JointThreshold(depth=2, top_k=3, min_prob=0.0))
    pool, tree, _ = grow(rule, [random_law(1)])
    assert len(paths_of(tree)) == 1 + 3 + 9 == int(pool.tree.num_nodes[0])


# --------------------------------------------------------------------------- any score


def token_score(pool: DraftPool, start: int) -> Tensor:
    """A classifier that likes c best and a least, whatever the drafter says."""
    return pool.tree.token_ids[:, start:] / 3


def pruned(**changes: object) -> PrunedShape:
    fields = {"max_depth": 3, "top_k": 4, "width": 2, "max_tokens": 40, "score": token_score}
    return PrunedShape(**{**fields, "min_score": 0.5, **changes})  # type: ignore[arg-type]


def test_a_score_of_ones_own_grows_the_tree() -> None:
    """c .67 and d 1.0 reach .5: both are expanded at every level, a and b nowhere kept."""
    _, tree, _ = grow(pruned(), [uniform_law])
    found = paths_of(tree)
    assert len(found) == 1 + 2 + 4 + 4, "two nodes a level are expanded"
    assert {token for path in found for token in path} == {C, 3}


def test_a_score_that_rises_along_a_path_needs_closing() -> None:
    """With the running minimum, d below c counts no more than c, so caps keep trees closed."""
    rule = pruned(max_tokens=5, combine=torch.minimum)
    _, tree, _ = grow(rule, [uniform_law])
    assert paths_of(tree) == [(), (C,), (3,), (3, 3), (3, 3, 3)]


def test_a_product_multiplies_along_the_path() -> None:
    rule = pruned(combine=torch.mul, root_score=1.0, min_score=0.6)
    _, tree, _ = grow(rule, [uniform_law])
    # c .67; dc .67; cd .67; ddc .67, dcd .67, cdd .67; cc .44 is out.
    assert all(path.count(C) <= 1 for path in paths_of(tree))
    assert (C, 3) in paths_of(tree)


def test_every_node_is_scored_once() -> None:
    seen: list[int] = []

    def counted(pool: DraftPool, start: int) -> Tensor:
        seen.append(pool.joint_logp.shape[1] - start)
        return token_score(pool, start)

    pool, _, _ = grow(pruned(score=counted), [uniform_law])
    assert sum(seen) == pool.joint_logp.shape[1] - 1


def test_threshold_is_exact_in_float32() -> None:
    """The rounded threshold keeps what the unrounded would, down to the last bit."""
    for prob in (0.1, 0.3, 1 / 3, 0.7):
        exact = math.log(prob)
        rule = build_shape(JointThreshold(depth=2, top_k=2, min_prob=prob))
        assert isinstance(rule, PrunedShape)
        next_up = torch.nextafter(torch.tensor(rule.min_score), torch.tensor(math.inf)).item()
        assert rule.min_score <= exact < next_up
