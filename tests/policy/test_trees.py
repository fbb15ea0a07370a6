"""Trees of every family: drawn by hand, and equal to an independent telling of each algorithm.

A telling calls no rule: lists, sorting and float64 alone, as EAGLE's, ECHO's and C2T's papers say.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specctl.policy import (
    Chain,
    DynamicDepth,
    JointThreshold,
    OptTree,
    ScoredTree,
    Shape,
    SignalStop,
    SparseGates,
    StaticTree,
    TopProbability,
    build_shape,
)
from specctl.policy.echo import log_threshold
from specctl.policy.pruning import PrunedShape
from specctl.policy.rules import Level, fresh_start, stop_rows
from tests.policy import drafts
from tests.policy.scorers import ffn_by_hand, random_network, steps

Path = tuple[int, ...]
LOGS = [math.log(p) for p in (0.2, 0.5, 0.7)]
BY_TOKEN = steps("draft_logp", LOGS, [0.1, 0.4, 0.5, 0.9])
"""hand_law's probability .8 is scored .9, .6 is .5, .3 is .4, and what is below .2 is .1.

Multiplied along the path, top_k 2, two nodes kept a level:
level 1: a .5  b .4
level 2: aa .25  ab .2  | ba .36  bc .04     (the drafter has aa .36 before ba .24)
level 3: aaa .125  aad .1  | bab .324  bac .036
"""


def threshold(min_prob: float, **changes: Any) -> JointThreshold:
    return JointThreshold(**{"depth": 3, "top_k": 2, "min_prob": min_prob, **changes})


def stop(signal: str, threshold: float, **changes: Any) -> SignalStop:
    return SignalStop(**{"signal": signal, "threshold": threshold, "window": 4, **changes})


def p_min(threshold: float, **changes: Any) -> TopProbability:
    return TopProbability(threshold=threshold, window=2, **changes)


def gates(**changes: Any) -> SparseGates:
    fields = {"depth": 3, "width": 1, "max_width": 3, "gate_levels": (2,), "thresholds": (0.3,)}
    return SparseGates(**{**fields, **changes})


def scored(**changes: Any) -> ScoredTree:
    fields = {"predicts": "conditional", "beta": 0.19, "first_top_k": 2, "second_top_k": 2}
    return ScoredTree(**{"scorer": BY_TOKEN, "depth": 3, **fields, **changes})


def network_tree(seed: int, **changes: Any) -> ScoredTree:
    fields = {"beta": 0.2, "depth": 4, "first_top_k": 4, "second_top_k": 3}
    return ScoredTree(**{"scorer": random_network(seed), **fields, **changes})


def ddd(check_levels: tuple[int, ...], min_beam_logp: float) -> DynamicDepth:
    fields = {"check_levels": check_levels, "min_beam_logp": min_beam_logp}
    return DynamicDepth(depth=3, top_k=2, num_tokens=7, **fields)


def opt_tree(min_gain: float) -> OptTree:
    return OptTree(depth=3, top_k=2, num_tokens=5, min_gain=min_gain)


def chain(length: int) -> list[Path]:
    return [(drafts.A,) * size for size in range(length + 1)]


def paths(words: str) -> list[Path]:
    """Of nodes named as in `hand_law`, the root added."""
    return [(), *(tuple("abcd".index(letter) for letter in word) for word in words.split())]


def flat_start(path: Path) -> list[float]:
    return [0.28, 0.24, 0.24, 0.24] if not path else [1.0, 0.0, 0.0, 0.0]


def of_one(path: Path) -> list[float]:
    return [1.0] + [0.0] * 11


def of_twelve(path: Path) -> list[float]:
    return [0.2] + [0.8 / 11] * 11


def sure_at_first(path: Path) -> list[float]:
    return of_twelve(path) if path else [0.9] + [0.1 / 11] * 11


BY_DEPTH = {1: "a b", 2: "a b aa ab ba bc", 3: "a b aa ba aaa bab"}
"""EAGLE-2's tree of seven nodes, top_k 2, by its depth."""
HAND: list[tuple[drafts.Probabilities, Shape, list[Path], int]] = [
    # The likeliest token; level 1 comes from the root's logits.
    (drafts.hand_law, Chain(num_draft_tokens=3), chain(3), 2),
    # All scores tie at 0: ancestors stay; then shallow nodes come before deep ones.
    (drafts.certain_law, StaticTree(depth=5, top_k=1, num_tokens=6), chain(5), 4),
    (drafts.uniform_law, StaticTree(depth=3, top_k=2, num_tokens=4), paths("a b aa"), 2),
    # Nothing is drafted below what is unlikely; a node on the threshold is kept; a cap keeps
    # the likeliest.
    (drafts.hand_law, threshold(0.7), [()], 0),
    (drafts.hand_law, threshold(0.5), paths("a"), 1),
    (drafts.uniform_law, threshold(0.25, depth=2, top_k=4), paths("a b c d"), 1),
    (drafts.hand_law, threshold(0.15, num_tokens=5), paths("a b aa ba"), 2),
    # Four draft nodes. Level 1: a .6, b .3, together .9. Level 2: aa .36 and ba .24 join, 1.5
    # together, a gain of .6, which at .5 pays for drafting level 3, whose own gain is 0. A gain
    # on the threshold stops: below, each level gains exactly one token.
    (drafts.hand_law, opt_tree(0.95), paths("a b"), 0),
    (drafts.hand_law, opt_tree(0.7), paths("a b aa ba"), 1),
    (drafts.hand_law, opt_tree(0.5), paths("a b aa ba"), 2),
    (drafts.certain_law, opt_tree(1.0), paths("a"), 0),
    # Open gates: one node a level down to the depth cap. Level 2 is at .36: its gate closes and
    # the level is widened. At the deepest level a gate still widens, although nothing would follow.
    (drafts.hand_law, gates(), chain(3), 2),
    (drafts.hand_law, gates(thresholds=(0.5,)), paths("a aa ab ac"), 1),
    (drafts.hand_law, gates(gate_levels=(3,), max_width=2), paths("a aa aaa aad"), 2),
    # Nothing below beta is expanded or submitted; a cap keeps the best scores closed.
    (drafts.hand_law, scored(beta=0.6), [()], 0),
    (drafts.hand_law, scored(beta=0.45), paths("a"), 1),
    (drafts.hand_law, scored(num_tokens=5), paths("a b ba bab"), 2),
    # A chain stops at its first node below beta: aaa .125 is drafted, and nothing below it.
    (drafts.hand_law, scored(first_top_k=1, second_top_k=1, depth=6), chain(2), 2),
    # Beam of level 1: a .6, b .3, so H = log .9 = -.105; of level 2: aa .36, ba .24, so
    # H = log .6 = -.511. What was drafted is ranked as EAGLE-2 does.
    *[
        (drafts.hand_law, ddd(levels, least), paths(BY_DEPTH[depth]), depth - 1)
        for levels, least, depth in [
            ((1, 2), -0.1, 1),
            ((1, 2), -0.3, 2),
            ((2,), -0.1, 2),
            ((1,), -0.3, 3),
            ((), -0.0, 3),
            ((3,), -0.0, 3),
        ]
    ],
    # The uncertain token is submitted and ends the chain; nothing is drafted behind it.
    (drafts.chain_law, stop("confidence", 0.4), chain(3), 2),
    # It may be left out: its level had to be drafted to know, and at the deepest level, where
    # `grow` is not called, `select` must still see it. The first token is then not tested.
    (drafts.chain_law, stop("confidence", 0.4, keep_last=False), chain(2), 2),
    (drafts.chain_law, stop("sqrt_entropy", 0.6, window=2, keep_last=False), chain(1), 1),
    (flat_start, stop("confidence", 0.4), chain(1), 0),
    (flat_start, stop("confidence", 0.4, keep_last=False), chain(4), 3),
    # llama.cpp's: over the ten likeliest of twelve the first is at .2 / .8545 = .234. It is left
    # out, and a chain that is then shorter than the least is not verified.
    (of_one, p_min(1.0), chain(2), 1),
    (of_twelve, p_min(0.23), chain(2), 1),
    (of_twelve, p_min(0.24), [()], 0),
    (sure_at_first, p_min(0.24), chain(1), 1),
    (sure_at_first, p_min(0.24, min_draft_tokens=2), [()], 1),
    (sure_at_first, p_min(0.23, min_draft_tokens=2), chain(2), 1),
    # A certain drafter never stops.
    (drafts.certain_law, stop("entropy", 0.0), chain(4), 3),
    (drafts.certain_law, stop("sqrt_entropy", 0.0), chain(4), 3),
]


@pytest.mark.parametrize(("law", "shape", "wanted", "num_expansions"), HAND)
def test_the_tree_by_hand(
    law: drafts.Probabilities, shape: Shape, wanted: list[Path], num_expansions: int
) -> None:
    pool, tree, drafter = drafts.grow(build_shape(shape), [law])
    assert drafts.paths_of(tree) == wanted
    assert drafter.num_expansions == num_expansions
    if isinstance(shape, ScoredTree) and shape.num_tokens is None:
        assert int(pool.expanded.sum()) == len({p for p in wanted if len(p) < shape.depth})


# --------------------------------------------------------------------------- tellings


def likely_paths(law: drafts.Probabilities, shape: JointThreshold) -> set[Path]:
    """Every path of the whole vocabulary that is likely enough, to the first level that is not."""
    found, level = {()}, {(): 1.0}
    for _ in range(shape.depth):
        children = ((path, prob, enumerate(law(path))) for path, prob in level.items())
        deeper = {(*path, t): prob * p for path, prob, law_of in children for t, p in law_of}
        level = {path: prob for path, prob in deeper.items() if prob >= shape.min_prob}
        found |= level.keys()
        if sum(level.values()) < shape.min_level_prob:
            break
    return found


def best_first(law: drafts.Probabilities, shape: OptTree) -> set[Path]:
    """The likeliest paths by a heap over the whole vocabulary."""
    heap: list[tuple[float, Path]] = [(0.0, ())]
    best: list[Path] = []
    while heap and len(best) < shape.num_tokens:
        cost, path = heapq.heappop(heap)
        best.append(path)
        if len(path) < shape.depth:
            for token, prob in enumerate(law(path)):
                heapq.heappush(heap, (cost - math.log(prob), (*path, token)))
    return set(best)


def gated_by_the_book(law: drafts.Probabilities, shape: SparseGates) -> tuple[set[Path], int]:
    """Kept paths, and the level that stopped."""
    bars = dict(zip(shape.gate_levels, shape.thresholds, strict=True))
    kept, level, drafted = [()], {(): 1.0}, []
    for depth in range(1, shape.depth + 1):
        children = [
            (prob * p, (*path, token))
            for path, prob in level.items()
            for p, token in sorted(
                ((p, t) for t, p in enumerate(law(path))), key=lambda c: (-c[0], c[1])
            )[: shape.max_width]
        ]
        children.sort(key=lambda child: -child[0])
        drafted += children
        closed = children[0][0] < bars.get(depth, 0.0)
        best = children[: shape.max_width if closed else shape.width]
        kept += [path for _, path in best]
        level = {path: prob for prob, path in best}
        if closed:
            break
    if shape.rerank:
        drafted.sort(key=lambda child: -child[0])
        kept = [(), *(path for _, path in drafted)]
    return set(kept[: shape.num_tokens]), depth if closed else 0


def scored_by_the_book(law: drafts.Probabilities, shape: ScoredTree) -> set[Path]:
    found, level = {()}, [((), 0.0, 0.0)]  # path, the drafter's log-probability, score
    scores: dict[Path, float] = {}  # in the order of the pool
    for depth in range(1, shape.depth + 1):
        nodes = []
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
                elif shape.keep_leaves or shape.num_tokens:
                    score = min(score, of_parent)
                nodes.append(((*path, token), logp, score))
                scores[(*path, token)] = score
        nodes.sort(key=lambda node: -node[2])
        passed = [node for node in nodes if node[2] >= math.log(shape.beta)]
        level = [node for node in nodes[: shape.second_top_k] if node in passed]
        found |= {path for path, *_ in (passed if shape.keep_leaves else level)}
        if sum(math.exp(score) for *_, score in level) < shape.min_level_prob:
            break
    ranked = sorted((path for path in scores if path in found), key=lambda path: -scores[path])
    return {(), *ranked[: (shape.num_tokens or len(found)) - 1]}


def stopped_by_the_book(law: drafts.Probabilities, shape: SignalStop) -> set[Path]:
    """A loop over one chain in float64."""
    path: Path = ()
    joint = 1.0
    for length in range(1, shape.window + 1):
        probs = law(path)
        best = max(range(len(probs)), key=probs.__getitem__)
        joint, before, path = joint * probs[best], path, (*path, best)
        entropy = -sum(p * math.log(p) for p in probs if p)
        uncertain = {
            "confidence": probs[best] < shape.threshold,
            "survival": joint < shape.threshold,
            "entropy": entropy > shape.threshold,
            "sqrt_entropy": math.sqrt(entropy) > shape.threshold,
            "entropy_bound": 1 - math.sqrt(0.2 * entropy) < shape.threshold,
        }[shape.signal]
        if uncertain and (shape.keep_last or length > 1):
            path = path if shape.keep_last else before
            break
    return {path[:length] for length in range(len(path) + 1)}


THRESHOLDS = {
    "confidence": 0.35,
    "survival": 0.1,
    "entropy": 1.6,
    "sqrt_entropy": 1.27,
    "entropy_bound": 0.43,
}
RERANKED = gates(depth=5, width=4, max_width=4, num_tokens=14, thresholds=(0.0,), rerank=True)
"""EAGLE's tree, as its gate is always open."""
GATED = [
    SparseGates(gate_levels=(1, 3), thresholds=(0.3, 0.1), depth=4, width=3, max_width=6),
    SparseGates(gate_levels=(2,), thresholds=(0.2,), depth=5, width=1, max_width=8),
    SparseGates(gate_levels=(1, 2, 3), thresholds=(0.2, 0.15, 0.1), depth=3, width=2, max_width=2),
    gates(gate_levels=(1, 4), thresholds=(0.3, 0.1), depth=6, width=2, max_width=5, num_tokens=8),
    RERANKED.model_copy(update={"gate_levels": (1, 3), "thresholds": (0.25, 0.1)}),
]
TOLD: list[tuple[Callable[..., set[Path]], Shape]] = [
    # With the whole vocabulary as top_k the beam leaves out nothing.
    *[(likely_paths, threshold(prob, depth=4, top_k=12)) for prob in (0.3, 0.1, 0.04)],
    *[
        (likely_paths, threshold(0.06, depth=4, top_k=12, min_level_prob=together))
        for together in (0.3, 0.5, 0.7)
    ],
    # So it does with the paper's top_k, the node budget.
    (best_first, OptTree(depth=4, top_k=7, num_tokens=8, min_gain=0.0)),
    *[(lambda law, shape: gated_by_the_book(law, shape)[0], shape) for shape in GATED],
    (
        lambda law, _: gated_by_the_book(law, RERANKED)[0],
        StaticTree(depth=5, top_k=4, num_tokens=14),
    ),
    *[
        (stopped_by_the_book, stop(signal, bar, window=8, keep_last=keep_last))
        for (signal, bar), keep_last in itertools.product(THRESHOLDS.items(), (True, False))
    ],
    *[
        (scored_by_the_book, network_tree(seed, predicts=which, keep_leaves=leaves, beta=beta))
        for which in ("joint", "conditional")
        for leaves in (True, False)
        for seed, beta in ((0, 0.5), (1, 0.2))
    ],
    *[
        (scored_by_the_book, network_tree(1, predicts="conditional", beta=0.05, **bounds))
        for bounds in ({"min_level_prob": 0.3}, {"min_level_prob": 0.6}, {"num_tokens": 8})
    ],
    (scored_by_the_book, network_tree(0, num_tokens=8)),
]


@pytest.mark.parametrize(("telling", "shape"), TOLD)
def test_rows_of_a_batch_equal_the_telling(telling: Callable[..., set[Path]], shape: Shape) -> None:
    laws = [drafts.random_law(seed, sharpness=1.0 + seed % 4) for seed in range(12)]
    _, tree, _ = drafts.grow(build_shape(shape), laws)
    found = [frozenset(drafts.paths_of(tree, row)) for row in range(len(laws))]
    assert found == [telling(law, shape) for law in laws]
    assert len(set(found)) >= 3, "trees too alike to tell"


@pytest.mark.parametrize("shape", GATED)
def test_the_level_that_stopped_is_noted(shape: SparseGates) -> None:
    laws = [drafts.random_law(seed, sharpness=1.0 + seed % 4) for seed in range(16)]
    rule = build_shape(shape)
    levels = [gated_by_the_book(law, shape)[1] for law in laws]
    reached = [level if level <= rule.max_depth else 0 for level in levels]
    assert drafts.play(rule, laws).plan.stopped_at.tolist() == reached
    assert len(set(reached)) > 1, "rows too alike to tell"


# --------------------------------------------------------------------------- on the threshold


@pytest.mark.parametrize(
    ("bar", "level"), [(0.0, 0), (0.25, 0), (0.2500001, 1), (1.0, 1), (0.1, 0)]
)
def test_a_confidence_on_a_gate_passes(bar: float, level: int) -> None:
    record = gates(gate_levels=(1,), thresholds=(bar,), depth=1, max_width=2)
    assert drafts.play(build_shape(record), [drafts.uniform_law]).plan.stopped_at.tolist() == [
        level
    ]


def test_a_value_on_the_threshold_goes_on() -> None:
    pool, _, _ = drafts.grow(build_shape(stop("confidence", 0.0)), [drafts.chain_law])
    value, entropy = pool.draft_logp[0, 2].exp(), pool.entropy[0, 2]
    above = float(torch.nextafter(value, torch.tensor(2.0)))
    below = float(torch.nextafter(entropy, torch.tensor(0.0)))
    on_and_off = (("confidence", float(value), above), ("entropy", float(entropy), below))
    for signal, on, off in on_and_off:
        for bar, size in ((on, 4), (off, 3)):
            _, tree, _ = drafts.grow(build_shape(stop(signal, bar)), [drafts.chain_law])
            assert int(tree.num_nodes) == size


def test_a_beam_that_lost_nothing_goes_on() -> None:
    _, tree, _ = drafts.grow(build_shape(ddd((1, 2), 0.0)), [drafts.certain_law])
    assert int(tree.depth.max()) == 3


def test_a_node_on_beta_is_kept() -> None:
    """The step is a log-odds in float32; its own probability must not fall below itself."""
    for prob in (0.1, 0.25, 1 / 3, 0.9):
        scorer = steps("depth", [1.5], [prob, 0.05])
        reached = torch.tensor(scorer.b2[0]).sigmoid().item()
        rule = build_shape(scored(scorer=scorer, beta=reached * (1 - 1e-6), depth=1))
        assert int(drafts.grow(rule, [drafts.hand_law])[1].num_nodes) == 3


@pytest.mark.parametrize("prob", [0.1, 0.3, 1 / 3, 0.7])
def test_thresholds_are_exact_in_float32(prob: float) -> None:
    """The rounded threshold keeps what the unrounded would, down to the last bit."""
    rule = build_shape(threshold(prob))
    assert isinstance(rule, PrunedShape)
    for value in (rule.min_score, log_threshold(prob)):
        rounded = torch.tensor(value)
        next_up = torch.nextafter(rounded, torch.tensor(math.inf))
        assert rounded.double() <= math.log(prob) < next_up.double()
    assert log_threshold(0.0) == -math.inf


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    "shape",
    [
        *[threshold(prob, depth=6, top_k=4) for prob in (0.02, 0.25, 0.9999)],
        *[gates(gate_levels=(1, 3), thresholds=(p, p), width=2) for p in (0.0, 1.0)],
        *[scored(predicts=which, beta=0.0) for which in ("joint", "conditional")],
    ],
)
def test_no_tree_outgrows_what_the_record_states(shape: Any) -> None:
    rule = build_shape(shape)
    _, tree, _ = drafts.grow(rule, [drafts.uniform_law])
    assert int(tree.num_nodes[0]) <= rule.max_tokens == shape.most_tokens


def test_most_tokens_by_hand() -> None:
    assert scored(depth=20, first_top_k=10, second_top_k=10, keep_leaves=False).most_tokens == 201
    assert scored(depth=11, first_top_k=10, second_top_k=10).most_tokens == 1011
    assert scored(depth=3, first_top_k=2, second_top_k=10).most_tokens == 15
    assert scored(depth=5, first_top_k=1, second_top_k=1).most_tokens == 6


def test_a_cap_is_not_drafted_beyond() -> None:
    rule = build_shape(gates(depth=8, width=3, max_width=4, num_tokens=8, thresholds=(0.0,)))
    assert rule.max_depth == 3, "levels of 3, 3 and 1 nodes fill 8 tokens"
    _, tree, _ = drafts.grow(rule, [drafts.random_law(1)])
    assert tree.depth[0].tolist() == [0, 1, 1, 1, 2, 2, 2, 3]


def test_a_row_stops_once() -> None:
    """What a deeper level, drafted for other rows, says of a stopped row does not count."""
    rule = build_shape(StaticTree(depth=3, top_k=2, num_tokens=7))
    plan = rule.begin(fresh_start(2))
    pool, _, _ = drafts.grow(rule, [drafts.hand_law, drafts.hand_law])
    for depth, stopped in ((1, [True, False]), (2, [True, True]), (3, [True, False])):
        stop_rows(plan, Level(depth, pool, 1), torch.tensor(stopped))
    assert plan.max_depth.tolist() == [1, 2]
