"""HeteroSpec's and AdaEDL's trees, written down from the papers' text in plain Python, and the
numbers that the papers state.

Nothing here calls a rule to find what is wanted: lists, sorting and float64 alone. A random case in
which two compared numbers are nearly equal is left out, since float32 may order them otherwise; the
tests count those cases and fail where they are many. EAGLE's, ECHO's and C2T's trees stand in
test_trees.py, ECHO's Algorithm 1 over a batch in test_budgets.py (`told_plainly`), MARS and AdaSD
in files of their own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from specctl.cli import fitting as _fitting  # adds the verbs  # noqa: F401
from specctl.cli.app import fit_app
from specctl.policy import (
    EntropyBins,
    EntropyStop,
    JensenShannon,
    Mars,
    Policy,
    Shape,
    SparseGates,
    StaticTree,
    build_shape,
)
from specctl.runtime.words import resolve_policy
from specctl.train.presets import PRESETS
from tests.policy.drafts import Probabilities, paths_of, play

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
    shape: Shape, wanted: Callable[[Probabilities], set[Path]], vocab: int, num: int
) -> None:
    """Every submitted tree of random drafters."""
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


# --------------------------------------------------------------------------- trees


def of(words: str) -> Policy:
    return resolve_policy(words, allow_lossy=True).policy


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
    compare(of(f"adaedl-eagle3:threshold={least}").shape, lambda law: adaedl(law, least), 12, 120)


def test_heterospecs_tree() -> None:
    base = StaticTree(depth=4, top_k=4, num_tokens=20)
    edges = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    shape = EntropyBins(base=base, edges=edges, path="conditional")
    compare(shape, lambda law: heterospec(law, shape), 14, 250)
    assert PRESETS["heterospec-paper"].options["path"] == shape.path


# --------------------------------------------------------------------------- numbers


def gated(*thresholds: float) -> SparseGates:
    """ECHO's tree of one request (C.4), gates behind the first, fourth and sixth drafted level."""
    tree = {"depth": 8, "width": 10, "max_width": 10, "num_tokens": 60, "rerank": True}
    return SparseGates(gate_levels=(1, 4, 6), thresholds=thresholds, **tree)


MARS_TREE = str(PRESETS["mars-paper"].options["shape"])


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ("eagle3-paper", StaticTree(depth=8, top_k=10, num_tokens=60)),
        ("echo-paper", gated(0.2, 0.35, 0.5)),
        ("echo-fixed", gated(0.35, 0.35, 0.35)),
        # Section 4.1: draft length 7, top 10; the released scripts' total of 50, root counted.
        (MARS_TREE, StaticTree(depth=7, top_k=10, num_tokens=50)),
        # Section 4.3: the mean entropy of all rejected tokens; 20 tokens at most (Algorithm 1).
        ("adasd-paper", EntropyStop(window=20, between="rejected", min_samples=1)),
    ],
)
def test_words_have_the_papers_numbers(words: str, shape: Shape) -> None:
    assert of(words).shape == shape


def test_rules_and_presets_have_the_papers_numbers() -> None:
    """MARS's Algorithm 1; AdaSD's section 4.4, of all rounds before; C2T's section 4.2."""
    assert of("chain+mars-paper").acceptance == Mars(mode="alg1", form="ratio", theta=0.9)
    assert of("chain+adasd-accept-paper").acceptance == JensenShannon(min_samples=1)
    c2t = {"predicts": "joint", "first_top_k": 15, "second_top_k": 15, "keep_leaves": False}
    assert {**c2t, "beta": 0.5, "depth": 11}.items() <= PRESETS["c2t-paper"].options.items()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_options_that_its_verb_has(name: str) -> None:
    preset = PRESETS[name]
    command = next(c for c in fit_app.registered_commands if c.name == preset.verb)
    known = inspect.signature(command.callback).parameters  # type: ignore[arg-type]
    assert preset.options.keys() <= known.keys()
