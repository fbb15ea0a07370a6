"""C2T's tree: a drawing checked by hand, and an independent telling of the algorithm."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from specctl.policy import ScoredTree, build_shape
from tests.policy.drafts import A, B, Probabilities, grow, hand_law, paths_of, random_law
from tests.policy.scorers import ffn_by_hand, random_network, steps

LOGS = [math.log(p) for p in (0.2, 0.5, 0.7)]
BY_TOKEN = steps("draft_logp", LOGS, [0.1, 0.4, 0.5, 0.9])
"""hand_law's probability .8 is scored .9, .6 is .5, .3 is .4, and what is below .2 is .1.

Multiplied along the path, top_k 2, two nodes kept a level:
level 1: a .5  b .4
level 2: aa .25  ab .2  | ba .36  bc .04     (the drafter has aa .36 before ba .24)
level 3: aaa .125  aad .1  | bab .324  bac .036
"""


def record(**changes: object) -> ScoredTree:
    fields = {
        "scorer": BY_TOKEN,
        "predicts": "conditional",
        "beta": 0.19,
        "depth": 3,
        "first_top_k": 2,
        "second_top_k": 2,
    }
    return ScoredTree(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("beta", "paths"), [(0.6, [()]), (0.45, [(), (A,)]), (0.3, [(), (A,), (B,), (B, A), (B, A, B)])]
)
def test_nothing_below_beta_is_expanded_or_submitted(
    beta: float, paths: list[tuple[int, ...]]
) -> None:
    pool, tree, drafter = grow(build_shape(record(beta=beta)), [hand_law])
    assert paths_of(tree) == paths
    expanded = {len(path) for path in paths}
    assert drafter.num_expansions == len(expanded - {0, 3})
    assert int(pool.expanded.sum()) == len({p for p in paths if len(p) < 3})


def test_a_cap_keeps_the_best_scores_closed() -> None:
    _, tree, _ = grow(build_shape(record(num_tokens=5)), [hand_law])
    assert paths_of(tree) == [(), (A,), (B,), (B, A), (B, A, B)]


def test_a_chain_stops_at_its_first_node_below_beta() -> None:
    """a .5, aa .25, aaa .125; a drafter that is sure is scored .9 a token."""
    shape = record(first_top_k=1, second_top_k=1, depth=6)
    _, tree, drafter = grow(build_shape(shape), [hand_law])
    assert paths_of(tree) == [(), (A,), (A, A)]
    assert drafter.num_expansions == 2, "aaa is drafted, and nothing below it"
    doubtful, sure = (lambda _, law=law: law for law in (hand_law(()), [0.9, 0.1, 0.0, 0.0]))
    _, both, drafter = grow(build_shape(shape), [doubtful, sure])
    assert both.num_nodes.tolist() == [3, 7]
    assert drafter.num_expansions == 5


# --------------------------------------------------------------------------- independent telling


def told(law: Probabilities, shape: ScoredTree) -> set[tuple[int, ...]]:
    """The submitted paths, with plain Python containers."""
    found, level = {()}, [((), 0.0, 0.0)]  # path, the drafter's log-probability, score
    for depth in range(1, shape.depth + 1):
        scored = []
        for path, joint, of_parent in level:
            probs = law(path)
            entropy = -sum(p * math.log(p) for p in probs)
            likeliest = sorted(range(len(probs)), key=lambda t: -probs[t])[: shape.first_top_k]
            for token in likeliest:
                logp = joint + math.log(probs[token])
                odds = ffn_by_hand(shape.scorer, torch.tensor([[logp, entropy, depth]]).numpy())
                score = -math.log1p(math.exp(-float(odds[0])))
                if shape.predicts == "conditional":
                    score += of_parent
                elif shape.running_min:
                    score = min(score, of_parent)
                scored.append(((*path, token), logp, score))
        scored.sort(key=lambda node: -node[2])
        passed = [node for node in scored if node[2] >= math.log(shape.beta)]
        level = [node for node in scored[: shape.second_top_k] if node in passed]
        found |= {path for path, *_ in (passed if shape.keep_leaves else level)}
    return found


@pytest.mark.parametrize("predicts", ["joint", "conditional"])
@pytest.mark.parametrize(
    ("keep_leaves", "running_min"), [(True, True), (False, True), (True, False)]
)
def test_trees_equal_the_telling(predicts: str, keep_leaves: bool, running_min: bool) -> None:  # noqa: FBT001
    sizes = set()
    for seed, beta in itertools.product(range(6), (0.5, 0.2)):
        shape = ScoredTree(
            scorer=random_network(seed),
            predicts=predicts,
            beta=beta,
            depth=4,
            first_top_k=4,
            second_top_k=3,
            keep_leaves=keep_leaves,
            running_min=running_min,
        )
        law = random_law(seed)
        _, tree, _ = grow(build_shape(shape), [law])
        assert set(paths_of(tree)) == told(law, shape)
        sizes.add(len(paths_of(tree)))
    assert len(sizes) > 3, "trees too alike to tell"


def test_a_score_falls_along_every_path() -> None:
    for predicts in ("joint", "conditional"):
        shape = ScoredTree(
            scorer=random_network(4), predicts=predicts, beta=0.0, depth=3, first_top_k=3
        )
        rule = build_shape(shape)
        _, tree, _ = grow(rule, [random_law(3)])
        assert int(tree.num_nodes) == 1 + 3 + 9 + 27 == rule.max_tokens


def test_a_second_top_k_of_the_paper_bounds_the_tree() -> None:
    shape = record(depth=20, first_top_k=10, second_top_k=10, keep_leaves=False)
    assert shape.most_tokens == 201
    assert record(depth=11, first_top_k=10, second_top_k=10).most_tokens == 1011
    assert record(depth=3, first_top_k=2, second_top_k=10).most_tokens == 15
    assert record(depth=5, first_top_k=1, second_top_k=1).most_tokens == 6


def test_a_node_on_beta_is_kept() -> None:
    """The best leaf is a log-odds in float32; its own probability must not fall below itself."""
    for prob in (0.1, 0.25, 1 / 3, 0.9):
        scorer = steps("depth", [1.5], [prob, 0.05])
        reached = torch.tensor(scorer.value[1]).sigmoid().item()
        rule = build_shape(record(scorer=scorer, beta=reached * (1 - 1e-6), depth=1))
        assert int(grow(rule, [hand_law])[1].num_nodes) == 3
