"""The five papers' algorithms, written down from their text in plain Python, against our rules.

Nothing here calls a rule to find what is wanted: lists, sorting and float64 alone. A random case in
which two compared numbers are nearly equal is left out, since float32 may order them otherwise; the
tests count those cases and fail where they are many. ECHO's Algorithm 1 over a batch stands in
test_budgets.py (`told_plainly`), the released MARS sampler in test_mars.py."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from specctl.cli import fitting as _fitting  # adds the verbs  # noqa: F401
from specctl.cli.app import fit_app
from specctl.policy import EntropyBins, ScoredTree, Shape, build_shape
from specctl.policy.families import build_acceptance
from specctl.policy.verification import DraftDistribution, Outcome
from specctl.runtime.words import resolve_policy
from specctl.train.cart import printed_edges
from specctl.train.presets import PRESETS
from tests.policy import drafts
from tests.policy.drafts import Probabilities, paths_of, play
from tests.policy.scorers import ffn_by_hand, random_network

Path = tuple[int, ...]
NEAR, MOST_LEFT_OUT = 1e-5, 0.1
"""Relative difference below which two numbers tie, and the share of cases that may hold a tie."""


class TieError(Exception):
    """Two numbers that decide are too close for float32."""


def apart(values: Iterable[float], bar: float | None = None) -> None:
    """Refuses values that are nearly equal: two of them, or, where there is a bar, one and it."""
    ranked = sorted(values)
    pairs = pairwise(ranked) if bar is None else ((v, bar) for v in ranked)
    if any(abs(high - low) < NEAR * abs(high) for low, high in pairs):
        raise TieError


def law_of(seed: int, vocab: int) -> Probabilities:
    """Sharp and flat distributions of a seed; some differ in the second decimal alone."""

    @cache
    def law(path: Path) -> list[float]:
        draws = np.random.default_rng([seed, *path])
        logits = draws.normal(size=vocab) * draws.choice([1.0, 3.0, 6.0])
        exp = np.exp(logits - logits.max())
        return [float(p) for p in np.float32(exp / exp.sum())]

    return law


def compare(
    shape: Shape, wanted: Callable[[Probabilities], set[Path]], vocab: int, num: int = 200
) -> int:
    """Every submitted tree of random drafters; the cases that were compared."""
    laws = [law_of(seed, vocab) for seed in range(num)]
    told: dict[int, set[Path]] = {}
    for row, law in enumerate(laws):
        try:
            told[row] = wanted(law)
        except TieError:
            continue
    tree = play(build_shape(shape), laws).tree
    for row, paths in told.items():
        assert set(paths_of(tree, row)) == paths, row
    assert len(told) >= (1 - MOST_LEFT_OUT) * num, f"{num - len(told)} of {num} cases left out"
    return len(told)


def children(law: Probabilities, level: dict[Path, float], top_k: int) -> dict[Path, float]:
    """The `top_k` likeliest children of every node, with joint probabilities."""
    found = {}
    for path, joint in level.items():
        probs = law(path)
        ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
        apart(probs)
        found |= {(*path, token): joint * probs[token] for token in ranked[:top_k]}
    return found


def best(scores: dict[Path, float], number: int) -> dict[Path, float]:
    """The entries of highest score."""
    ranked = sorted(scores, key=lambda path: -scores[path])
    apart([scores[path] for path in ranked[number - 1 : number + 1]])
    return {path: scores[path] for path in ranked[:number]}


# --------------------------------------------------------------------------- ECHO, EAGLE-3


def echo(
    law: Probabilities, bars: dict[int, float], depth: int = 8, k: int = 10, total: int = 60
) -> set[Path]:
    """ECHO at batch 1: EAGLE-3's beam and rerank (C.4); a gate (Eq. 5 to 7) ends it. d = 0 is the
    first drafted level."""
    level, drafted = {(): 1.0}, {}
    for d in range(depth):
        candidates = children(law, level, k)
        drafted |= candidates
        if d in bars:
            confidence = max(candidates.values())
            apart([confidence], bars[d])
            if confidence < bars[d]:
                break
        level = best(candidates, k)
    return {(), *best(drafted, total - 1)}


def shape_of(words: str) -> Any:
    """The shape that a preset's word stands for."""
    return resolve_policy(words, allow_lossy=True).policy.shape


@pytest.mark.parametrize(
    ("words", "bars"),
    [
        ("eagle3-paper", {}),
        ("echo-paper", {0: 0.2, 3: 0.35, 5: 0.5}),
        ("echo-fixed", {0: 0.35, 3: 0.35, 5: 0.35}),
    ],
)
def test_echos_tree_of_one_request(words: str, bars: dict[int, float]) -> None:
    compare(shape_of(words), lambda law: echo(law, bars), 12, 120)


# --------------------------------------------------------------------------- MARS


def test_mars_drafts_seven_levels_and_fifty_nodes() -> None:
    """Section 4.1: draft length 7, top 10; the released scripts' total of 50, root counted."""
    shape = shape_of(str(PRESETS["mars-paper"].options["shape"]))
    compare(shape, lambda law: echo(law, {}, depth=7, total=50), 12, 40)


# --------------------------------------------------------------------------- HeteroSpec


def heterospec(law: Probabilities, shape: EntropyBins) -> set[Path]:
    """Sections 4.1 to 4.3: Φ along the path of highest final-token confidence, its bin, depth + Δ
    and γ · N + Δ nodes."""
    base, alpha = shape.base, math.ceil(shape.base.depth / 2)
    level, drafted = {(): 1.0}, {}
    for _ in range(base.depth):
        candidates = children(law, level, base.top_k)
        drafted |= candidates
        level = best(candidates, base.top_k)
    final = {path: law(path[:-1])[path[-1]] for path in candidates}
    star = next(iter(best(final, 1)))
    phi = 0.0
    for t in range(base.depth):
        top = sorted(law(star[:t]), reverse=True)[:10]
        phi -= sum(p / sum(top) * math.log(p / sum(top)) for p in top)
    apart(shape.edges, phi)
    i = sum(phi > edge for edge in shape.edges)
    more = max(0, alpha - i) if i < 3 else 0
    gamma = (0.3, 0.6, 1.0, *[1.0] * len(shape.edges))[i]
    for _ in range(more):
        candidates = children(law, level, base.top_k)
        drafted |= candidates
        level = best(candidates, base.top_k)
    size = max(math.ceil(gamma * base.num_tokens + more), base.depth + more + 1)
    return {(), *best(drafted, size - 1)}


def adaedl(law: Probabilities, least: float) -> set[Path]:
    """AdaEDL on EAGLE-3's tree (appendix A.10): drafting ends with the level whose likeliest node
    was drawn with a lower bound of acceptance, 1 - sqrt(0.2 · entropy), below a threshold."""
    level, drafted = {(): 1.0}, {}
    for _ in range(8):
        candidates = children(law, level, 10)
        drafted |= candidates
        level = best(candidates, 10)
        [likeliest] = best(candidates, 1)
        entropy = -sum(p * math.log(p) for p in law(likeliest[:-1]) if p)
        bound = 1 - math.sqrt(0.2 * entropy)
        apart([bound], least)
        if bound < least:
            break
    return {(), *best(drafted, 59)}


@pytest.mark.parametrize("least", [0.3, 0.5])
def test_adaedl_on_a_tree(least: float) -> None:
    words = f"adaedl-eagle3:threshold={least}"
    compare(shape_of(words), lambda law: adaedl(law, least), 12, 120)


def test_heterospecs_tree() -> None:
    base = shape_of("eagle2:depth=4:top_k=4:num_tokens=20")
    edges = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    shape = EntropyBins(base=base, edges=edges, path="conditional")
    assert compare(shape, lambda law: heterospec(law, shape), 14, 250) > 200
    assert PRESETS["heterospec-paper"].options["path"] == shape.path


def printed_loss(phi: list[float], y: list[float], s: float) -> float:
    """Eq. 2 as printed: the share of a side times the sum of its squared errors."""
    loss = 0.0
    for side in ([b for a, b in zip(phi, y, strict=True) if (a <= s) == left] for left in (1, 0)):
        mean = sum(side) / len(side)
        loss += len(side) / len(y) * sum((one - mean) ** 2 for one in side)
    return loss


def printed_tree(phi: list[float], y: list[float], layers: int) -> list[float]:
    values = sorted(set(phi))
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    if not layers or not middles or len(set(y)) == 1:
        return []
    losses = [printed_loss(phi, y, s) for s in middles]
    lowest = sorted(losses)
    if len(lowest) > 1 and lowest[1] - lowest[0] < 1e-9:
        raise TieError
    s = middles[losses.index(lowest[0])]
    found = [s]
    for left in (True, False):
        rows = [(a, b) for a, b in zip(phi, y, strict=True) if (a <= s) == left]
        found += printed_tree([a for a, _ in rows], [b for _, b in rows], layers - 1)
    return sorted(found)


def test_eq_2_as_printed() -> None:
    num_compared = 0
    for seed in range(200):
        draws = np.random.default_rng(seed)
        phi = draws.gamma(2.0, size=24).astype(np.float32)
        y = draws.normal(10 * phi, 5).round(2)
        try:
            wanted = printed_tree([float(v) for v in phi], y.tolist(), 2)
        except TieError:
            continue
        found = sorted(printed_edges(phi, y, depth=2, min_rows=1))
        assert found == pytest.approx(wanted, abs=1e-6), seed
        num_compared += 1
    assert num_compared > 150, num_compared


# --------------------------------------------------------------------------- C2T


def c2t(law: Probabilities, shape: ScoredTree) -> set[Path]:
    """Section 4.2: the confidence of the top K children from joint probability, entropy and depth;
    the K2 best of a level that reach beta are verified, and drafted from."""
    options = PRESETS["c2t-paper"].options
    k, k2, beta = options["first_top_k"], options["second_top_k"], options["beta"]
    kept, level = {()}, {(): 1.0}
    for depth in range(1, shape.depth + 1):
        entropy = {p: -sum(q * math.log(q) for q in law(p) if q) for p in level}
        joint = children(law, level, k)
        rows = np.array([[math.log(joint[p]), entropy[p[:-1]], depth] for p in joint])
        confidence = 1 / (1 + np.exp(-ffn_by_hand(shape.scorer, rows)))
        scores = dict(zip(joint, confidence.tolist(), strict=True))
        apart(scores.values(), beta)
        passed = {path: score for path, score in scores.items() if score >= beta}
        if not passed:
            break
        level = {path: joint[path] for path in best(passed, k2)}
        kept |= level.keys()
    return kept


@pytest.mark.parametrize("seed", [6, 8])
def test_c2ts_tree(seed: int) -> None:
    options = PRESETS["c2t-paper"].options
    names = ("predicts", "first_top_k", "second_top_k", "keep_leaves", "beta")
    fields = {name: options[name] for name in names}
    assert options["depth"] == 11
    # The network reads log joint probability: a monotone transform of the paper's feature.
    shape = ScoredTree(scorer=random_network(seed), depth=4, **fields)
    compare(shape, lambda law: c2t(law, shape), 18, 150)


# --------------------------------------------------------------------------- MARS


def mars(
    parents: list[int], tokens: list[int], logits: list[list[float]], theta: float
) -> list[int]:
    """Algorithm 1 along a tree, greedy: the top-1 child; else the top-2 child if z2 / z1 > θ."""
    path, node = [], 0
    while True:
        z = logits[node]
        first, second = sorted(range(len(z)), key=lambda token: -z[token])[:2]
        kids = {tokens[n]: n for n in range(1, len(parents)) if parents[n] == node}
        apart([z[second] / z[first]], theta)
        if first in kids:
            node = kids[first]
        elif second in kids and z[first] > 0 and z[second] > 0 and z[second] / z[first] > theta:
            node = kids[second]
        else:
            return [*path, first]
        path.append(tokens[node])


@pytest.mark.parametrize("width", [1, 3])
def test_mars_algorithm_1(width: int) -> None:
    rule = build_acceptance(resolve_policy("chain+mars-paper", allow_lossy=True).policy.acceptance)
    num_compared = num_relaxed = 0
    for seed in range(400):
        draws = np.random.default_rng(seed)
        parents, tokens = [-1], [9]
        for n in range(1, 8):
            parent = n - 1 if width == 1 else int(draws.integers(max(0, n - width), n))
            taken = {tokens[c] for c in range(1, n) if parents[c] == parent}
            parents.append(parent)
            tokens.append(int(draws.choice([t for t in range(4) if t not in taken] or [4 + n])))
        logits = draws.normal(4, 1.5, size=(8, 12))
        logits[:, 4:] -= 6
        values = torch.tensor(logits, dtype=torch.float32)
        try:
            wanted = mars(parents, tokens, values.double().tolist(), 0.9)
        except TieError:
            continue
        tree = drafts.tree_of_nodes(9, *zip(tokens[1:], parents[1:], strict=True))
        found = rule.judge(drafts.verification(tree, values[None]))
        node, emitted = 0, []
        while True:
            kids = [n for n in range(1, 8) if parents[n] == node and bool(found.admitted[0, n])]
            if not kids:
                break
            assert len(kids) == 1
            node = kids[0]
            emitted.append(tokens[node])
        emitted.append(int(found.target_ids[0, node]))
        assert emitted == wanted, seed
        strict = mars(parents, tokens, values.double().tolist(), 1.0)
        num_relaxed += strict != wanted
        num_compared += 1
    assert num_compared >= 360, num_compared
    assert num_relaxed > 40, num_relaxed


# --------------------------------------------------------------------------- AdaSD


def test_adasd_stops_at_the_mean_entropy_of_rejected_tokens() -> None:
    """Section 4.3: draft until a token's entropy exceeds the mean entropy of all rejected tokens so
    far; 20 tokens at most (Algorithm 1). Before the first rejection nothing ends a draft but those
    20: the text that states the start is lost in our copy."""
    rule = build_shape(shape_of("adasd-paper"))
    laws = [law_of(seed, 8) for seed in range(30)]
    rejected: list[list[float]] = [[] for _ in laws]
    memory = torch.zeros(len(laws), rule.memory_size, dtype=torch.float64)
    num_compared = num_stopped = num_left_out = 0
    draws = np.random.default_rng(0)

    def entropy(law: Probabilities, path: Path) -> float:
        return -sum(p * math.log(p) for p in law(path) if p)

    for turn in range(8):
        shifted = [lambda path, law=law, turn=turn: law((turn, *path)) for law in laws]
        given = play(rule, shifted, memory)
        lengths = given.tree.num_nodes.tolist()
        paths = torch.full((len(laws), 22), -1)
        for row, law in enumerate(shifted):
            bar = sum(rejected[row]) / len(rejected[row]) if rejected[row] else math.inf
            path: Path = ()
            seen = []
            while len(path) < 20:
                seen.append(entropy(law, path))
                path = (*path, max(range(8), key=law(path).__getitem__))
                if seen[-1] > bar:
                    break
            if any(abs(one - bar) < NEAR * one for one in seen):
                num_left_out += 1
            else:
                assert paths_of(given.tree, row)[-1] == path, (turn, row)
                num_compared += 1
                num_stopped += len(path) < 20
            num_accepted = int(draws.integers(0, lengths[row]))
            paths[row, : num_accepted + 1] = torch.arange(num_accepted + 1)
            if num_accepted < lengths[row] - 1:
                rejected[row].append(seen[num_accepted])
        nothing = torch.zeros_like(given.tree.parent)
        memory = rule.observe(
            memory, Outcome(given.pool, given.submitted, given.tree, paths, nothing, None)
        )
    assert num_compared > 200, num_compared
    assert num_stopped > 100, num_stopped
    assert num_left_out <= MOST_LEFT_OUT * num_compared


def distance(p: list[float], q: list[float]) -> float:
    """Jensen-Shannon distance, base 2 (section 2.2)."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log2(x / y) for x, y in zip(a, b, strict=True) if x)

    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return math.sqrt(max(0.0, kl(p, middle) / 2 + kl(q, middle) / 2))


def test_adasd_accepts_below_the_midpoint_of_mean_distances() -> None:
    """Section 4.4: a token passes where it is the target's own or the distance is below the
    midpoint of the mean accepted and the mean rejected distance, of all rounds before."""
    policy = resolve_policy("chain+adasd-accept-paper", allow_lossy=True).policy
    rule = build_acceptance(policy.acceptance)
    accepted: list[float] = []
    rejected: list[float] = []
    memory = torch.zeros(1, rule.memory_size, dtype=torch.float64)
    pool = play(build_shape(policy.shape), [law_of(0, 6)]).pool
    num_compared = num_relaxed = 0
    for turn in range(300):
        target, drafter = law_of(turn, 6), law_of(10_000 + turn, 6)
        mixed = [
            [0.6 * a + 0.4 * b for a, b in zip(target((d,)), drafter((d,)), strict=True)]
            for d in range(4)
        ]
        p = [target((d,)) for d in range(4)]
        draft = [max(range(6), key=mixed[d].__getitem__) for d in range(4)]
        own = [max(range(6), key=p[d].__getitem__) for d in range(4)]
        known = bool(accepted and rejected)
        bar = (sum(accepted) / len(accepted) + sum(rejected) / len(rejected)) / 2 if known else 0.0
        far = [distance(mixed[d], p[d]) for d in range(4)]
        passes = [draft[d] == own[d] or far[d] < bar for d in range(4)]
        tree = drafts.tree_of_nodes(9, *((token, d) for d, token in enumerate(draft)))
        flat = [1 / 6] * 6
        given = drafts.verification(
            tree,
            torch.tensor([[*p, flat]]).log(),
            torch.tensor([[*own, 0]]),
            memory=memory,
            drafted_from=DraftDistribution(torch.tensor([[flat, *mixed]]).log(), torch.arange(6)),
        )
        judged = rule.judge(given)
        if all(abs(one - bar) > 1e-5 for one in far):
            assert judged.admitted[0, 1:].tolist() == passes, turn
            num_compared += 1
            num_relaxed += any(far[d] < bar and draft[d] != own[d] for d in range(4))
        until = passes.index(False) if False in passes else 4
        accepted += far[:until]
        rejected += far[until : until + 1]
        path = torch.tensor([[*range(until + 1), *[-1] * (4 - until)]])
        nothing = torch.zeros_like(tree.parent)
        memory = rule.observe(memory, Outcome(pool, nothing, tree, path, nothing, judged.evidence))
    assert num_compared > 290, num_compared
    assert num_relaxed > 20, num_relaxed


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_options_that_its_verb_has(name: str) -> None:
    preset = PRESETS[name]
    command = next(c for c in fit_app.registered_commands if c.name == preset.verb)
    known = inspect.signature(command.callback).parameters  # type: ignore[arg-type]
    assert preset.options.keys() <= known.keys()
