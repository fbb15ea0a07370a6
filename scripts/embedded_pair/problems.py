"""Checkable problems: `generate` makes them from a seed, `#### answer` ends every solution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """Problems of a category, without end; the same seed gives the same stream.

    Prompts repeat: some kinds have only a few hundred, and a stream without repeats would run
    out of them and let a model forget the kind.
    """
    rng = Random(f"{category}/{seed}")
    while True:
        prompt, lines, answer = rng.choice(MAKERS[category])(rng)
        yield Problem(category, prompt, "\n".join([*lines, f"#### {answer}"]), answer)


def generate(category: str, seed: int, count: int) -> list[Problem]:
    """The first `count` distinct problems of a stream."""
    found: dict[str, Problem] = {}
    problems = stream(category, seed)
    while len(found) < count:
        problem = next(problems)
        found.setdefault(problem.prompt, problem)
    return list(found.values())
