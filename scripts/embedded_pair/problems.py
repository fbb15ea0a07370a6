"""Checkable problems: `generate` makes them from a seed, `#### answer` ends every solution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from .arithmetic import ARITHMETIC
from .string_tasks import STRINGS

MAKERS = {"arithmetic": ARITHMETIC, "strings": STRINGS}


@dataclass(frozen=True)
class Problem:
    """One question with a worked solution whose last line is `#### answer`."""

    category: str
    prompt: str
    solution: str
    answer: str


def stream(category: str, seed: int) -> Iterator[Problem]:
    """Distinct problems of a category, without end; the same seed gives the same stream."""
    rng, seen = Random(f"{category}/{seed}"), set()
    while True:
        prompt, lines, answer = rng.choice(MAKERS[category])(rng)
        if prompt not in seen:
            seen.add(prompt)
            yield Problem(category, prompt, "\n".join([*lines, f"#### {answer}"]), answer)


def generate(
    category: str, seed: int, count: int, exclude: frozenset[str] = frozenset()
) -> list[Problem]:
    """`count` distinct problems whose prompts are not in `exclude`."""
    fresh = (problem for problem in stream(category, seed) if problem.prompt not in exclude)
    return list(islice(fresh, count))
