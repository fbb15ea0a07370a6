"""Checkable problems with worked solutions (arithmetic, tasks on words), and short chat.

A seed gives the same problems; the packaged prompts of both categories are the first of
`HELD_OUT_SEED`. Letters are spelled out and sums split, so that a tiny model can follow. Names,
words and wordings are in words.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

SAID: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))
NAMES, ITEMS, PLACES, WORDS = (SAID[name] for name in ("names", "items", "places", "words"))
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
Draft = tuple[str, list[str], str]  # prompt, solution lines, answer
Maker = Callable[[Random], Draft]


@dataclass(frozen=True)
class Problem:
    """One question with a worked solution whose last line is `#### answer`."""

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
        yield Problem(prompt, "\n".join([*lines, f"#### {answer}"]), answer)


def generate(category: str, seed: int, count: int) -> list[Problem]:
    """The first `count` distinct problems of a stream."""
    found: dict[str, Problem] = {}
    problems = stream(category, seed)
    while len(found) < count:
        problem = next(problems)
        found.setdefault(problem.prompt, problem)
    return list(found.values())


def ask(rng: Random, kind: str, *values: object) -> str:
    """One of the wordings of a question."""
    chosen: str = rng.choice(SAID["asks"][kind])
    return chosen.format(*values)


# --------------------------------------------------------------------------- arithmetic


def product(x: int, y: int) -> str:
    """`x * y = ...`, split into tens and ones where a factor has two digits."""
    small, large = sorted((x, y))
    tens, ones = large - large % 10, large % 10
    if large <= 12 or small > 12 or not ones:
        return f"{x} * {y} = {x * y}"
    return f"{x} * {y} = {small * tens} + {small * ones} = {x * y}"


def added(x: int, y: int) -> str:
    """`x + y = ...`, tens and ones added apart where both have tens."""
    tens, ones = x - x % 10 + y - y % 10, x % 10 + y % 10
    between = f" = {tens} + {ones}" if min(x, y) > 10 and ones else ""
    return f"{x} + {y}{between} = {x + y}"


def taken(x: int, y: int) -> str:
    """`x - y = ...`, the tens of `y` taken first."""
    tens, ones = y - y % 10, y % 10
    between = f" = {x - tens} - {ones}" if tens and ones else ""
    return f"{x} - {y}{between} = {x - y}"


def _cast(rng: Random) -> dict[str, str]:
    """Names and things for one story."""
    a, b = rng.sample(NAMES, 2)
    return {"a": a, "b": b, "items": rng.choice(ITEMS), "place": rng.choice(PLACES)}


def _change(rng: Random, have: int) -> tuple[str, int, str, int]:
    """One event of a chain: sign, amount, its equation and the new amount."""
    if have > 12 and rng.random() < 0.5:
        n = rng.randint(2, have - 2)
        return "-", n, taken(have, n), have - n
    n = rng.randint(2, max(3, 95 - have))
    return "+", n, added(have, n), have + n


def chain(rng: Random) -> Draft:
    """Someone has things, then gains or loses some, one to three times."""
    cast, have = _cast(rng), rng.randint(5, 60)
    text, lines = [rng.choice(SAID["starts"]).format(x=have, **cast)], []
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3))):
        sign, n, equation, have = _change(rng, have)
        told, worked = rng.choice(SAID["gains" if sign == "+" else "losses"])
        text.append(told.format(n=n, **cast))
        lines.append(worked.format(n=n, eq=equation, **cast))
    text.append(rng.choice(SAID["ends"]).format(**cast))
    return " ".join(text), lines, str(have)


def containers(rng: Random) -> Draft:
    """Equal groups, then some taken or added."""
    cast, box = _cast(rng), rng.choice(SAID["containers"])
    x, y = rng.randint(2, 9), rng.randint(2, 15)
    text = f"{cast['a']} has {x} {box} with {y} {cast['items']} in each."
    lines, total = [f"In the {box} there are {product(x, y)} {cast['items']}."], x * y
    if total < 90 and rng.random() < 0.5:
        sign, n, equation, total = _change(rng, total)
        deed = f"{cast['b']} {'adds' if sign == '+' else 'takes'} {n}"
        text, lines = f"{text} {deed}.", [*lines, f"{deed}: {equation}."]
    return f"{text} How many {cast['items']} are there in total?", lines, str(total)


def sharing(rng: Random) -> Draft:
    """Equal shares of a pile, sometimes two piles put together first."""
    cast, people, each = _cast(rng), rng.randint(2, 9), rng.randint(2, 15)
    total, items, lines = people * each, cast["items"], []
    text = f"{cast['a']} has {total} {items}"
    if total > 12 and rng.random() < 0.5:
        first = rng.randint(3, total - 3)
        text = f"{cast['a']} has {first} {items} and {cast['b']} brings {total - first} more"
        lines.append(f"Together there are {added(first, total - first)} {items}.")
    noun = rng.choice(("friends", "children", "neighbours", "teams"))
    text += f". They are shared equally among {people} {noun}. How many {items} does each get?"
    lines.append(f"Each gets {total} / {people} = {each} {items}.")
    return text, lines, str(each)


def shopping(rng: Random) -> Draft:
    """The cost of one or two kinds of goods."""
    a, goods = rng.choice(NAMES), rng.sample(SAID["goods"], 2)
    counts, prices = [rng.randint(2, 9) for _ in goods], [rng.randint(2, 12) for _ in goods]
    kinds = rng.choice((1, 2, 2))
    bought = list(zip(counts, goods, prices, strict=True))[:kinds]
    parts = [f"{n} {good}s at ${price} each" for n, good, price in bought]
    lines = [f"The {good}s cost {product(n, price)} dollars." for n, good, price in bought]
    costs = [n * price for n, _, price in bought]
    if kinds == 2:
        lines.append(f"Together that is {added(*costs)} dollars.")
    text = f"{a} buys {' and '.join(parts)}. How many dollars does {a} spend?"
    return text, lines, str(sum(costs))


def change_back(rng: Random) -> Draft:
    """Money left after buying several of one good."""
    a, good = rng.choice(NAMES), rng.choice(SAID["goods"])
    n, price = rng.randint(2, 9), rng.randint(2, 9)
    cost = n * price
    paid = rng.choice([p for p in (20, 30, 50, 60, 80, 100) if p > cost])
    text = f"{a} has ${paid} and buys {n} {good}s for ${price} each. How many dollars are left?"
    lines = [f"The {good}s cost {product(n, price)} dollars."]
    return text, [*lines, f"There are {taken(paid, cost)} dollars left."], str(paid - cost)


def rate(rng: Random) -> Draft:
    """So much a day, for some days, perhaps with a head start."""
    a, (verb, things, plain) = rng.choice(NAMES), rng.choice(SAID["activities"])
    each, days, unit = rng.randint(2, 25), rng.randint(2, 9), rng.choice(("day", "hour", "week"))
    total = each * days
    text = f"{a} {verb} {each} {things} every {unit} for {days} {unit}s."
    lines = [f"In {days} {unit}s {a} {verb} {product(days, each)} {things}."]
    if rng.random() < 0.4:
        extra = rng.randint(2, 30)
        text += f" On top of that come {extra} {things} from before."
        lines.append(f"With the {extra} from before: {added(total, extra)}.")
        total += extra
    return f"{text} How many {things} does {a} {plain} in total?", lines, str(total)


def percent(rng: Random) -> Draft:
    """A simple share of a round number, and perhaps the rest."""
    cast, share = _cast(rng), rng.choice((10, 20, 25, 50))
    part, items = rng.randint(2, 12), cast["items"]
    whole = part * (100 // share)
    told = rng.choice(("are red", "are new", "are broken", "belong to " + cast["b"]))
    text = f"{cast['a']} has {whole} {items}, and {share}% of them {told}."
    lines = [f"{share}% of {whole} is {whole} / {100 // share} = {part}."]
    if rng.random() < 0.5:
        lines.append(f"The others are {taken(whole, part)}.")
        return f"{text} How many {items} are not like that?", lines, str(whole - part)
    return f"{text} How many {items} is that?", lines, str(part)


def compare(rng: Random) -> Draft:
    """Two people compared: the difference, or the sum, or the name of the larger."""
    cast, (x, y) = _cast(rng), rng.sample(range(3, 95), 2)
    a, b, items = cast["a"], cast["b"], cast["items"]
    more, less = (a, b) if x > y else (b, a)
    text = f"{a} has {x} {items} and {b} has {y} {items}."
    larger = f"{max(x, y)} is more than {min(x, y)}, so {more} has more."
    if rng.random() < 0.3:
        return f"{text} Who has more {items}?", [larger], more
    lines = [larger, f"The difference is {taken(max(x, y), min(x, y))}."]
    return f"{text} {ask(rng, 'compare', items, more, less)}", lines, str(abs(x - y))


def relation(rng: Random) -> Draft:
    """One amount told in terms of another, then their total."""
    cast, x = _cast(rng), rng.randint(3, 30)
    a, b, items = cast["a"], cast["b"], cast["items"]
    kind = rng.choice(("times", "more", "fewer", "half"))
    n = rng.randint(2, 4) if kind == "times" else rng.randint(2, max(2, x - 1))
    x = 2 * x if kind == "half" else x
    told, equation, y = {
        "times": (f"{n} times as many {items} as", product(n, x), n * x),
        "more": (f"{n} more {items} than", added(x, n), x + n),
        "fewer": (f"{n} fewer {items} than", taken(x, n), x - n),
        "half": (f"half as many {items} as", f"{x} / 2 = {x // 2}", x // 2),
    }[kind]
    text, lines = f"{a} has {x} {items}. {b} has {told} {a}.", [f"{b} has {equation} {items}."]
    if rng.random() < 0.5:
        return f"{text} How many {items} does {b} have?", lines, str(y)
    lines.append(f"Together they have {added(x, y)} {items}.")
    return f"{text} How many {items} do they have together?", lines, str(x + y)


def bare(rng: Random) -> Draft:
    """A sum without a story."""
    op = rng.choice("+-*/")
    x, y = rng.randint(10, 99), rng.randint(2, 99)
    if op == "-":
        x, y = max(x, y), min(x, y)
    if op == "*":
        x, y = rng.randint(2, 12), rng.randint(2, 25)
    if op == "/":
        y = rng.randint(2, 9)
        x = y * rng.randint(2, 15)
    value = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[op]
    shown = {"+": added, "-": taken, "*": product}.get(op)
    equation = shown(x, y) if shown else f"{x} / {y} = {value}"
    return ask(rng, "bare", f"{x} {op} {y}"), [f"{equation}."], str(value)


def equation(rng: Random) -> str:
    """One worked equation, of the sizes that the stories use."""
    op = rng.choice("++--*/")
    if op in "+-":
        x, y = sorted((rng.randint(2, 99), rng.randint(2, 99)), reverse=op == "-")
        x, y = (y, x) if op == "+" and rng.random() < 0.5 else (x, y)
        return added(x, y) if op == "+" else taken(x, y)
    x, y = rng.randint(2, 12), rng.randint(2, 25)
    return product(x, y) if op == "*" else f"{x * y} / {x} = {y}"


# --------------------------------------------------------------------------- words


def spaced(word: str) -> str:
    """`cat` -> `c a t`."""
    return " ".join(word)


def _word(rng: Random) -> tuple[str, str]:
    """A word and the line that spells it."""
    word = rng.choice(WORDS)
    return word, f'The letters of "{word}" are {spaced(word)}.'


def _changed(kind: str, told: str, change: Callable[[str], str], most: int = 99) -> Maker:
    """Of a word of so many letters at most: spelled, then changed."""

    def make(rng: Random) -> Draft:
        word = rng.choice([w for w in WORDS if len(w) <= most])
        answer = spaced(change(word))
        lines = [f'The letters of "{word}" are {spaced(word)}.', f"{told}: {answer}."]
        return ask(rng, kind, word), lines, answer

    return make


def count_letter(rng: Random) -> Draft:
    word, spelled = _word(rng)
    letter = rng.choice(word if rng.random() < 0.8 else "aeorst")
    tally = ", ".join(f"{c} {word[: i + 1].count(letter)}" for i, c in enumerate(word))
    lines = [spelled, f"Counting {letter}: {tally}."]
    return ask(rng, "count_letter", word, letter), lines, str(word.count(letter))


def nth_letter(rng: Random) -> Draft:
    word, spelled = _word(rng)
    n = rng.randint(1, len(word))
    listed = ", ".join(f"{i + 1} {c}" for i, c in enumerate(word[:n]))
    lines = [spelled, f"Counting to {n}: {listed}."]
    return ask(rng, "nth_letter", word, ORDINALS[n - 1]), lines, word[n - 1]


def length(rng: Random) -> Draft:
    word, _ = _word(rng)
    listed = ", ".join(f"{c} {i + 1}" for i, c in enumerate(word))
    return ask(rng, "length", word), [f"Counting the letters: {listed}."], str(len(word))


def initials(rng: Random) -> Draft:
    names = rng.sample(NAMES, rng.randint(2, 5))
    lines = ["The first letters: " + ", ".join(f"{n} {n[0]}" for n in names) + "."]
    return ask(rng, "initials", " ".join(names)), lines, spaced("".join(n[0] for n in names))


def sort_digits(rng: Random) -> Draft:
    digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 7))]
    falling = rng.random() < 0.4
    shown, answer = (" ".join(map(str, d)) for d in (digits, sorted(digits, reverse=falling)))
    way = "from large to small" if falling else "from small to large"
    return ask(rng, "sort_digits", shown, way), [f"{way.capitalize()}: {answer}."], answer


def repeat(rng: Random) -> Draft:
    word, n = rng.choice(WORDS), rng.randint(2, 5)
    listed = ", ".join(f"{i + 1} {word}" for i in range(n))
    return ask(rng, "repeat", word, n), [f"Counting to {n}: {listed}."], " ".join([word] * n)


def replace(rng: Random) -> Draft:
    word, spelled = _word(rng)
    old = rng.choice(word)
    new = rng.choice([c for c in "aeioumnkstz" if c != old])
    answer = spaced(word.replace(old, new))
    lines = [spelled, f"With {new} for {old}: {answer}."]
    return ask(rng, "replace", word, old, new), lines, answer


def last_word(rng: Random) -> Draft:
    first, second = sorted(rng.sample(WORDS, 2))
    shown = [first, second] if rng.random() < 0.5 else [second, first]
    i = next((i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), len(first))
    before, after = first[i : i + 1] or "the end", second[i : i + 1]
    why = f"Letter {i + 1} decides: {before} comes before {after}."
    return ask(rng, "last_word", *shown), [why], first


CHANGES = (
    _changed("reverse", "From the last to the first", lambda word: word[::-1]),
    _changed("upper", "In capitals", str.upper),
    _changed("sort_letters", "In order", lambda word: "".join(sorted(word)), most=6),
    _changed("drop_vowels", "Without the vowels", lambda word: re.sub("[aeiou]", "", word)),
)
STORIES = (containers, sharing, shopping, change_back, rate, percent)
MAKERS: dict[str, tuple[Maker, ...]] = {
    "arithmetic": (chain, chain, *STORIES, compare, relation, bare),
    "strings": (
        *(*CHANGES[:2], count_letter, nth_letter, length, initials, CHANGES[2], sort_digits),
        *(repeat, replace, CHANGES[3], last_word),
    ),
}
"""Kinds of problems; one that stands twice comes twice as often."""


def _tips(rng: Random, goal: str) -> tuple[str, str]:
    first, second, third = SAID["advice"][goal]
    answer = f"To {goal}, first {first}. Then {second}. It also helps to {third}."
    return ask(rng, "help", goal), answer


def _kinds(rng: Random) -> tuple[str, str]:
    kind = rng.choice(list(SAID["kinds"]))
    count, word = rng.choice(((2, "two"), (3, "three"), (4, "four")))
    chosen = SAID["kinds"][kind][:count]
    answer = f"Here are {word} {kind}: {', '.join(chosen[:-1])} and {chosen[-1]}."
    return ask(rng, "list", kind, word), answer


def _turn(rng: Random) -> tuple[str, str]:
    """One question with its answer."""
    name, item, place = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    opposites, things, days = SAID["opposites"], SAID["things"], SAID["days"]
    word, thing, day = rng.choice(list(opposites)), rng.choice(list(things)), rng.randrange(7)
    lost = f"I cannot find my {item}. {name} was in the {place} today. Where should I look?"
    look = f"Look in the {place} first, because {name} was there. The {item} may be in the {place}."
    greeting, tomorrow = f"Hello {name}! What can I do for you today?", days[(day + 1) % 7]
    meaning = f"{thing.capitalize()} is {things[thing]}."
    return rng.choice(
        (
            lambda: (ask(rng, "opposite", word), f"The opposite of {word} is {opposites[word]}."),
            lambda: (ask(rng, "define", thing), meaning),
            lambda: (ask(rng, "next_day", days[day]), f"After {days[day]} comes {tomorrow}."),
            lambda: (ask(rng, "hello", name), greeting),
            lambda: (lost, look),
            lambda: _tips(rng, rng.choice(list(SAID["advice"]))),
            lambda: _kinds(rng),
        )
    )()


def chat_stream(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Conversations of one to three turns, without end."""
    rng = Random(f"chat/{seed}")
    while True:
        yield [_turn(rng) for _ in range(rng.choice((1, 1, 2, 3)))]


def doc_turn(name: str, docstring: str, seed: int) -> list[tuple[str, str]]:
    """A question about a library function, answered by the first paragraph of its docstring."""
    answer = " ".join(docstring.split("\n\n")[0].split())
    return [(ask(Random(f"doc/{name}/{seed}"), "doc", name), answer)]
