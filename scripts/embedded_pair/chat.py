"""Short chat: question and answer pairs from our own templates and from docstrings."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from .words import ITEMS, NAMES, PLACES

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "happy": "sad",
    "light": "dark",
    "early": "late",
    "old": "young",
    "high": "low",
    "full": "empty",
    "open": "closed",
    "loud": "quiet",
    "wet": "dry",
    "hard": "soft",
    "near": "far",
    "strong": "weak",
    "thick": "thin",
    "rich": "poor",
    "sweet": "sour",
    "clean": "dirty",
    "deep": "shallow",
}
THINGS = {
    "a kettle": "a pot with a lid and a spout that boils water",
    "a lantern": "a lamp with a handle that you can carry in the dark",
    "a ladder": "two long rails with steps between them, used to climb",
    "a compass": "a small tool whose needle points to the north",
    "a bakery": "a shop where bread and cakes are made and sold",
    "an orchard": "a piece of land where fruit trees grow",
    "a harbour": "a sheltered place where ships can stay safely",
    "a glacier": "a large body of ice that moves slowly down a valley",
    "a library": "a place that keeps many books and lends them to people",
    "a telescope": "a long tube with lenses that makes far things look near",
    "a variable": "a name in a program that stands for a value",
    "a function": "a named piece of code that takes arguments and returns a result",
    "a list": "an ordered collection of values that can grow and shrink",
    "a loop": "a part of a program that runs again and again",
    "a file": "a named piece of data that a computer keeps on a disk",
}
KINDS = {
    "fruits": ["apple", "pear", "plum", "cherry", "grape", "lemon", "peach"],
    "animals": ["dog", "cat", "horse", "rabbit", "fox", "otter", "owl"],
    "colours": ["red", "blue", "green", "yellow", "white", "black", "orange"],
    "trees": ["oak", "pine", "birch", "cedar", "willow", "maple", "ash"],
    "tools": ["hammer", "saw", "brush", "needle", "spade", "wrench", "knife"],
    "vegetables": ["carrot", "onion", "potato", "pea", "bean", "leek", "radish"],
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
ADVICE = {
    "sleep better": [
        "go to bed at the same time every day",
        "keep the room dark and cool",
        "put the phone away in the evening",
    ],
    "learn to cook": [
        "start with a few simple dishes",
        "read the whole recipe before you begin",
        "taste the food as you go",
    ],
    "write clean code": [
        "give every function one job",
        "choose names that say what they mean",
        "test the small parts first",
    ],
    "save money": [
        "write down what you spend",
        "plan the meals of the week",
        "wait a day before you buy something large",
    ],
    "study for a test": [
        "start a few days early",
        "explain the topic in your own words",
        "take short breaks",
    ],
    "keep a garden": [
        "water the plants in the morning",
        "pull the weeds while they are small",
        "add some compost in spring",
    ],
}
ASKS = ["What is the opposite of {0}?", "Tell me the opposite of the word {0}."]
DEFINE = ["What is {0}?", "Can you explain what {0} is?", "Describe {0} in one sentence."]
NEXT_DAY = ["Which day comes after {0}?", "What day is it tomorrow if today is {0}?"]
HELP = [
    "How can I {0}?",
    "Give me some advice: how do I {0}?",
    "I would like to {0}. What should I do?",
]
LIST = ["Name {1} {0}.", "Can you list {1} {0}?", "Give me {1} examples of {0}."]
HELLO = ["Hello, I am {0}.", "Hi! My name is {0}.", "Good morning, {0} here."]
WHERE = ["I cannot find my {0}. {1} was in the {2} today. Where should I look?"]
DOC_ASKS = ["What does {0} do?", "What does {0} do in Python?", "Explain {0}.", "What is {0} for?"]


def _tips(rng: Random, goal: str) -> tuple[str, str]:
    first, second, third = ADVICE[goal]
    return rng.choice(HELP).format(
        goal
    ), f"To {goal}, first {first}. Then {second}. It also helps to {third}."


def _kinds(rng: Random) -> tuple[str, str]:
    kind, (count, word) = (
        rng.choice(list(KINDS)),
        rng.choice(((2, "two"), (3, "three"), (4, "four"))),
    )
    chosen = KINDS[kind][:count]
    return rng.choice(LIST).format(
        kind, word
    ), f"Here are {word} {kind}: {', '.join(chosen[:-1])} and {chosen[-1]}."


def _turn(rng: Random) -> tuple[str, str]:
    """One question with its answer."""
    name, item, place = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    word, thing, day = rng.choice(list(OPPOSITES)), rng.choice(list(THINGS)), rng.randrange(7)
    return rng.choice(
        (
            lambda: (
                rng.choice(ASKS).format(word),
                f"The opposite of {word} is {OPPOSITES[word]}.",
            ),
            lambda: (rng.choice(DEFINE).format(thing), f"{thing.capitalize()} is {THINGS[thing]}."),
            lambda: (
                rng.choice(NEXT_DAY).format(DAYS[day]),
                f"After {DAYS[day]} comes {DAYS[(day + 1) % 7]}.",
            ),
            lambda: (rng.choice(HELLO).format(name), f"Hello {name}! What can I do for you today?"),
            lambda: (
                WHERE[0].format(item, name, place),
                f"Look in the {place} first, because {name} was there. "
                f"The {item} may be in the {place}.",
            ),
            lambda: _tips(rng, rng.choice(list(ADVICE))),
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
    rng = Random(f"doc/{name}/{seed}")
    answer = " ".join(docstring.split("\n\n")[0].split())
    return [(rng.choice(DOC_ASKS).format(name), answer)]
