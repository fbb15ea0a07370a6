"""Checkable problems with worked solutions: arithmetic, and tasks on words.

words.json has the kinds of problems of a category, what each draws, and its forms: wordings of the
question, lines of the solution, the answer. What depends on what was drawn is decided here. Letters
are spelled out and sums split, so that a tiny model can follow. A seed gives the same problems; the
packaged prompts of both categories are the first of `HELD_OUT_SEED`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

SAID: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))
SAID["short words"] = [word for word in SAID["words"] if len(word) <= 6]


class Problem(NamedTuple):
    """One question with a worked solution whose last line is `#### answer`."""

    prompt: str
    solution: str
    answer: str


class Values(SimpleNamespace):
    """What fills a form: what was drawn, and what `FIELDS` and equations `x * y` make of it."""

    def __getitem__(self, key: str) -> Any:
        match key.split():
            case [x, op, y]:
                return equation(self[x], op, self[y])
        return FIELDS[key](self) if key in FIELDS else getattr(self, key)


def stream(category: str, seed: int) -> Iterator[Problem]:
    """Problems of a category, without end; the same seed gives the same stream.

    A form without an answer has that of its last equation. Prompts repeat: some kinds have only a
    few hundred, and a stream without repeats would run out of them and let a model forget the kind.
    """
    rng = Random(f"{category}/{seed}")
    while True:
        kind = rng.choice(SAID["kinds"][category])
        v = draw(rng, SAID["draws"].get(kind, {}))
        form = DECIDED[kind](rng, v) if kind in DECIDED else None
        wordings, lines, *answers = SAID["forms"][form or kind]
        wording = rng.choice(wordings) if isinstance(wordings, list) else wordings
        solution = "\n".join(line.format_map(v) for line in lines)
        result = solution.rpartition("= ")[2].split()[0].rstrip(".")
        answer = answers[0].format_map(v) if answers else result
        yield Problem(wording.format_map(v), f"{solution}\n#### {answer}", answer)


def draw(rng: Random, pools: dict[str, str | list[int]]) -> Values:
    """Values by name, from a list of words.json or the numbers of a range; several differ."""
    v = Values()
    for names, pool in pools.items():
        choices = SAID[pool] if isinstance(pool, str) else range(pool[0], pool[1] + 1)
        several = names.split(", ")
        chosen = rng.sample(choices, len(several)) if several[1:] else [rng.choice(choices)]
        vars(v).update(zip(several, chosen, strict=True))
    return v


def generate(category: str, seed: int, count: int) -> list[Problem]:
    """The first `count` distinct problems of a stream."""
    found: dict[str, Problem] = {}
    problems = stream(category, seed)
    while len(found) < count:
        problem = next(problems)
        found.setdefault(problem.prompt, problem)
    return list(found.values())


def equation(x: int, op: str, y: int) -> str:
    """`x * y = ...`, with a step through tens and ones where that helps."""
    (small, large), ones, between = sorted((x, y)), x % 10 + y % 10, ""
    if op == "*" and small <= 12 < large and large % 10:
        between = f" = {small * (large - large % 10)} + {small * (large % 10)}"
    elif op == "+" and small > 10 and ones:
        between = f" = {x + y - ones} + {ones}"
    elif op == "-" and y >= 10 and y % 10:
        between = f" = {x - y + y % 10} - {y % 10}"
    value = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[op]
    return f"{x} {op} {y}{between} = {value}"


# --------------------------------------------------------------------------- arithmetic


def change(rng: Random, v: Values) -> str:
    """The sign of a change: `n` are taken from what there is, `have`, or added to it."""
    if v.have > 12 and rng.random() < 0.5:
        v.n = rng.randint(2, v.have - 2)
        return "-"
    v.n = rng.randint(2, max(3, 95 - v.have))
    return "+"


def chain(rng: Random, v: Values) -> None:
    """Someone has things, then gains or loses some, one to three times."""
    told, lines = [rng.choice(SAID["starts"]).format_map(v)], []
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3))):
        sign = change(rng, v)
        event, line = rng.choice(SAID[f"changes {sign}"])
        told.append(event.format_map(v))
        lines.append(line.format_map(v))
        v.have += v.n if sign == "+" else -v.n
    told.append(rng.choice(SAID["ends"]).format_map(v))
    v.told, v.lines = " ".join(told), "\n".join(lines)


def containers(rng: Random, v: Values) -> str | None:
    v.have = v.x * v.y
    return f"containers {change(rng, v)}" if v.have < 90 and rng.random() < 0.5 else None


def sharing(rng: Random, v: Values) -> str | None:
    v.total, form = v.people * v.each, None
    if v.total > 12 and rng.random() < 0.5:
        form, v.x = "sharing of two", rng.randint(3, v.total - 3)
        v.y = v.total - v.x
    v.noun = rng.choice(("friends", "children", "neighbours", "teams"))
    return form


def shopping(rng: Random, v: Values) -> str | None:
    v.x, v.y = v.n * v.p, v.m * v.q
    return rng.choice((None, "shopping for two", "shopping for two"))


def change_back(rng: Random, v: Values) -> None:
    v.cost = v.n * v.price
    v.paid = rng.choice([paid for paid in (20, 30, 50, 60, 80, 100) if paid > v.cost])


def rate(rng: Random, v: Values) -> str | None:
    v.total = v.each * v.days
    if rng.random() < 0.4:
        v.extra = rng.randint(2, 30)
        return "rate with extra"
    return None


def percent(rng: Random, v: Values) -> str | None:
    v.told, v.ratio = v.told.format_map(v), 100 // v.share
    v.whole = v.part * v.ratio
    return "percent of others" if rng.random() < 0.5 else None


def compare(rng: Random, v: Values) -> str | None:
    v.small, v.large = sorted((v.x, v.y))
    v.more, v.less = (v.a, v.b) if v.x > v.y else (v.b, v.a)
    return "compare names" if rng.random() < 0.3 else None


def relation(rng: Random, v: Values) -> str | None:
    v.n = rng.randint(2, 4) if v.kind == "times" else rng.randint(2, max(2, v.x - 1))
    if v.kind == "half":
        v.x, v.n = 2 * v.x, 2
    v.told, v.line = (text.format_map(v) for text in SAID["relations"][v.kind])
    v.y = int(v.line.split()[-1])
    return None if rng.random() < 0.5 else "relation and total"


def bare(rng: Random, v: Values) -> None:
    if v.op == "-":
        v.x, v.y = max(v.x, v.y), min(v.x, v.y)
    if v.op == "*":
        v.x, v.y = rng.randint(2, 12), rng.randint(2, 25)
    if v.op == "/":
        v.y = rng.randint(2, 9)
        v.x = v.y * rng.randint(2, 15)
    v.line = equation(v.x, v.op, v.y)


# --------------------------------------------------------------------------- words


def count_letter(rng: Random, v: Values) -> None:
    v.letter = rng.choice(v.word if rng.random() < 0.8 else "aeorst")


def nth_letter(rng: Random, v: Values) -> None:
    v.n = rng.randint(1, len(v.word))


def initials(rng: Random, v: Values) -> None:
    v.word = rng.sample(SAID["names"], rng.randint(2, 5))


def sort_digits(rng: Random, v: Values) -> str | None:
    v.word = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 7))]
    return "sort_digits down" if rng.random() < 0.4 else None


def replace(rng: Random, v: Values) -> None:
    v.old = rng.choice(v.word)
    v.new = rng.choice([c for c in "aeioumnkstz" if c != v.old])


def last_word(rng: Random, v: Values) -> None:
    v.first, second = sorted((v.x, v.y))
    v.x, v.y = (v.first, second) if rng.random() < 0.5 else (second, v.first)
    v.n = next(n for n in range(1, len(second) + 1) if not v.first.startswith(second[:n]))
    v.before, v.after = v.first[v.n - 1 : v.n] or "the end", second[v.n - 1]


DECIDED: dict[str, Callable[[Random, Values], str | None]] = {
    kind.__name__: kind
    for kind in (
        *(chain, containers, sharing, shopping, change_back, rate, percent, compare, relation),
        *(bare, count_letter, nth_letter, initials, sort_digits, replace, last_word),
    )
}
"""By kind: sets values that depend on others, and returns the form where it is not the kind's."""

FIELDS: dict[str, Callable[[Values], str]] = {
    "spelled": lambda v: " ".join(v.word),
    "backwards": lambda v: " ".join(v.word[::-1]),
    "capitals": lambda v: " ".join(v.word).upper(),
    "ordered": lambda v: " ".join(sorted(v.word)),
    "falling": lambda v: " ".join(sorted(v.word, reverse=True)),
    "consonants": lambda v: " ".join(c for c in v.word if c not in "aeiou"),
    "replaced": lambda v: " ".join(v.word.replace(v.old, v.new)),
    "size": lambda v: str(len(v.word)),
    "numbered": lambda v: ", ".join(f"{c} {i}" for i, c in enumerate(v.word, 1)),
    "count": lambda v: str(v.word.count(v.letter)),
    "tally": lambda v: ", ".join(
        f"{c} {v.word[:i].count(v.letter)}" for i, c in enumerate(v.word, 1)
    ),
    "nth": lambda v: SAID["ordinals"][v.n - 1],
    "letter_n": lambda v: v.word[v.n - 1],
    "counting": lambda v: ", ".join(f"{i} {c}" for i, c in enumerate(v.word[: v.n], 1)),
    "repeated": lambda v: " ".join([v.word] * v.n),
    "repeating": lambda v: ", ".join(f"{i + 1} {v.word}" for i in range(v.n)),
    "initials": lambda v: " ".join(name[0] for name in v.word),
    "names_initials": lambda v: ", ".join(f"{name} {name[0]}" for name in v.word),
}
"""Fields of forms that follow from the values."""
