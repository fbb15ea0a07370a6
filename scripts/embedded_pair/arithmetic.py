"""Arithmetic word problems with worked solutions; every number is a small whole number."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .words import ACTIVITIES, CONTAINERS, GOODS, ITEMS, NAMES, PLACES

Draft = tuple[str, list[str], str]  # prompt, solution lines, answer

GAINS = [
    ("{a} buys {n} more {items}.", "After buying {n} more, {a} has {eq} {items}."),
    ("{b} gives {a} {n} {items}.", "With the {n} from {b}, {a} has {eq} {items}."),
    ("{a} finds {n} {items} in the {place}.", "After finding {n}, {a} has {eq} {items}."),
    ("Then {a} gets {n} {items} as a present.", "With the present, {a} has {eq} {items}."),
]
LOSSES = [
    ("{a} gives {n} {items} to {b}.", "After giving {n} away, {a} has {eq} {items}."),
    ("{a} loses {n} {items} in the {place}.", "After losing {n}, {a} has {eq} {items}."),
    ("{a} sells {n} of the {items}.", "After selling {n}, {a} has {eq} {items}."),
    ("Then {n} of the {items} break.", "Without the {n} broken ones, {a} has {eq} {items}."),
]
STARTS = [
    "{a} has {x} {items}.",
    "In the morning {a} has {x} {items}.",
    "{a} keeps {x} {items} in the {place}.",
    "There are {x} {items} in {a}'s collection.",
]
ENDS = [
    "How many {items} does {a} have now?",
    "How many {items} are left in the end?",
    "What is the number of {items} that {a} has at the end?",
]


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
    text = [rng.choice(STARTS).format(x=have, **cast)]
    lines = []
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3))):
        sign, n, equation, have = _change(rng, have)
        told, worked = rng.choice(GAINS if sign == "+" else LOSSES)
        text.append(told.format(n=n, **cast))
        lines.append(worked.format(n=n, eq=equation, **cast))
    text.append(rng.choice(ENDS).format(**cast))
    return " ".join(text), lines, str(have)


def containers(rng: Random) -> Draft:
    """Equal groups, then some taken or added."""
    cast, box = _cast(rng), rng.choice(CONTAINERS)
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
    total = people * each
    text, lines = f"{cast['a']} has {total} {cast['items']}", []
    if total > 12 and rng.random() < 0.5:
        first = rng.randint(3, total - 3)
        text = (
            f"{cast['a']} has {first} {cast['items']} and {cast['b']} brings {total - first} more"
        )
        lines.append(f"Together there are {added(first, total - first)} {cast['items']}.")
    noun = rng.choice(("friends", "children", "neighbours", "teams"))
    text += (
        f". They are shared equally among {people} {noun}. How many {cast['items']} does each get?"
    )
    lines.append(f"Each gets {total} / {people} = {each} {cast['items']}.")
    return text, lines, str(each)


def shopping(rng: Random) -> Draft:
    """The cost of one or two kinds of goods."""
    a, goods = rng.choice(NAMES), rng.sample(GOODS, 2)
    counts, prices = [rng.randint(2, 9) for _ in goods], [rng.randint(2, 12) for _ in goods]
    kinds = rng.choice((1, 2, 2))
    parts = [f"{counts[i]} {goods[i]}s at ${prices[i]} each" for i in range(kinds)]
    lines = [f"The {goods[i]}s cost {product(counts[i], prices[i])} dollars." for i in range(kinds)]
    costs = [counts[i] * prices[i] for i in range(kinds)]
    if kinds == 2:
        lines.append(f"Together that is {added(*costs)} dollars.")
    return (
        f"{a} buys {' and '.join(parts)}. How many dollars does {a} spend?",
        lines,
        str(sum(costs)),
    )


def change_back(rng: Random) -> Draft:
    """Money left after buying several of one good."""
    a, good = rng.choice(NAMES), rng.choice(GOODS)
    n, price = rng.randint(2, 9), rng.randint(2, 9)
    paid = rng.choice([p for p in (20, 30, 50, 60, 80, 100) if p > n * price])
    text = f"{a} has ${paid} and buys {n} {good}s for ${price} each. How many dollars are left?"
    lines = [
        f"The {good}s cost {product(n, price)} dollars.",
        f"There are {taken(paid, n * price)} dollars left.",
    ]
    return text, lines, str(paid - n * price)


def rate(rng: Random) -> Draft:
    """So much a day, for some days, perhaps with a head start."""
    a, (verb, things, plain) = rng.choice(NAMES), rng.choice(ACTIVITIES)
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
    part = rng.randint(2, 12)
    whole = part * (100 // share)
    told = rng.choice(("are red", "are new", "are broken", "belong to " + cast["b"]))
    text = f"{cast['a']} has {whole} {cast['items']}, and {share}% of them {told}."
    lines = [f"{share}% of {whole} is {whole} / {100 // share} = {part}."]
    if rng.random() < 0.5:
        lines.append(f"The others are {taken(whole, part)}.")
        return f"{text} How many {cast['items']} are not like that?", lines, str(whole - part)
    return f"{text} How many {cast['items']} is that?", lines, str(part)


def compare(rng: Random) -> Draft:
    """Two people compared: the difference, or the sum, or the name of the larger."""
    cast, (x, y) = _cast(rng), rng.sample(range(3, 95), 2)
    a, b, items = cast["a"], cast["b"], cast["items"]
    more, less = (a, b) if x > y else (b, a)
    text = f"{a} has {x} {items} and {b} has {y} {items}."
    larger = f"{max(x, y)} is more than {min(x, y)}, so {more} has more."
    if rng.random() < 0.3:
        return f"{text} Who has more {items}?", [larger], more
    equation = taken(max(x, y), min(x, y))
    question = rng.choice(
        (
            f"How many more {items} does {more} have than {less}?",
            f"How many fewer {items} does {less} have than {more}?",
        )
    )
    return f"{text} {question}", [larger, f"The difference is {equation}."], str(abs(x - y))


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
    ask = rng.choice(("What is {}?", "Calculate {}.", "Please work out {}.", "How much is {}?"))
    return ask.format(f"{x} {op} {y}"), [f"{equation}."], str(value)


def equation(rng: Random) -> str:
    """One worked equation, of the sizes that the stories use."""
    op = rng.choice("++--*/")
    if op in "+-":
        x, y = sorted((rng.randint(2, 99), rng.randint(2, 99)), reverse=op == "-")
        x, y = (y, x) if op == "+" and rng.random() < 0.5 else (x, y)
        return added(x, y) if op == "+" else taken(x, y)
    x, y = rng.randint(2, 12), rng.randint(2, 25)
    return product(x, y) if op == "*" else f"{x * y} / {x} = {y}"


ARITHMETIC: tuple[Callable[[Random], Draft], ...] = (
    chain,
    chain,
    containers,
    sharing,
    shopping,
    change_back,
    rate,
    percent,
    compare,
    relation,
    bare,
)
