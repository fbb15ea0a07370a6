"""String problems, letters spelled out one by one so that a tiny model can follow."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .arithmetic import Draft
from .words import NAMES, WORDS

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def _spell(word: str) -> str:
    """`cat` -> `c a t`."""
    return " ".join(word)


def _word(rng: Random) -> tuple[str, str]:
    """A word and the line that spells it."""
    word = rng.choice(WORDS)
    return word, f'The letters of "{word}" are {_spell(word)}.'


def reverse(rng: Random) -> Draft:
    """Letters from last to first."""
    word, spelled = _word(rng)
    ask = rng.choice(
        (
            'Reverse the word "{}".',
            'Write the letters of "{}" backwards.',
            'Spell "{}" from the end to the start.',
        )
    )
    answer = _spell(word[::-1])
    return ask.format(word), [spelled, f"From the last to the first: {answer}."], answer


def upper(rng: Random) -> Draft:
    """Capital letters."""
    word, spelled = _word(rng)
    ask = rng.choice(
        ('Write the word "{}" in capital letters.', 'Convert "{}" to uppercase, letter by letter.')
    )
    answer = _spell(word.upper())
    return ask.format(word), [spelled, f"In capitals: {answer}."], answer


def count_letter(rng: Random) -> Draft:
    """How often a letter occurs, counted along the word."""
    word, spelled = _word(rng)
    letter = rng.choice(word if rng.random() < 0.8 else "aeorst")
    ask = rng.choice(
        (
            'How many times does the letter {1} occur in "{0}"?',
            'Count the letter {1} in the word "{0}".',
        )
    )
    tally = ", ".join(f"{c} {word[: i + 1].count(letter)}" for i, c in enumerate(word))
    return (
        ask.format(word, letter),
        [spelled, f"Counting {letter}: {tally}."],
        str(word.count(letter)),
    )


def nth_letter(rng: Random) -> Draft:
    """The letter at a place counted from one."""
    word, spelled = _word(rng)
    n = rng.randint(1, len(word))
    ask = rng.choice(
        ('What is the {1} letter of "{0}"?', 'Which letter comes {1} in the word "{0}"?')
    )
    listed = ", ".join(f"{i + 1} {c}" for i, c in enumerate(word[:n]))
    return ask.format(word, ORDINALS[n - 1]), [spelled, f"Counting to {n}: {listed}."], word[n - 1]


def length(rng: Random) -> Draft:
    """The number of letters."""
    word, _ = _word(rng)
    ask = rng.choice(('How many letters does the word "{}" have?', 'How long is the word "{}"?'))
    listed = ", ".join(f"{c} {i + 1}" for i, c in enumerate(word))
    return ask.format(word), [f"Counting the letters: {listed}."], str(len(word))


def initials(rng: Random) -> Draft:
    """First letters of names."""
    names = rng.sample(NAMES, rng.randint(2, 5))
    ask = rng.choice(("Join the initials of {}.", "Write down the first letters of {}."))
    lines = ["The first letters: " + ", ".join(f"{n} {n[0]}" for n in names) + "."]
    return ask.format(" ".join(names)), lines, _spell("".join(n[0] for n in names))


def sort_letters(rng: Random) -> Draft:
    """Letters in the order of the alphabet."""
    word = rng.choice([w for w in WORDS if len(w) <= 6])
    ask = rng.choice(
        (
            'Sort the letters of "{}" by the alphabet.',
            'Put the letters of "{}" in alphabetical order.',
        )
    )
    answer = _spell("".join(sorted(word)))
    return (
        ask.format(word),
        [f'The letters of "{word}" are {_spell(word)}.', f"In order: {answer}."],
        answer,
    )


def sort_digits(rng: Random) -> Draft:
    """Digits from small to large, or from large to small."""
    digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 7))]
    falling = rng.random() < 0.4
    shown, answer = (" ".join(map(str, d)) for d in (digits, sorted(digits, reverse=falling)))
    way = "from large to small" if falling else "from small to large"
    ask = rng.choice(("Sort the digits {} {}.", "Put {} in order {}."))
    return ask.format(shown, way), [f"{way.capitalize()}: {answer}."], answer


def repeat(rng: Random) -> Draft:
    """A word several times."""
    word, n = rng.choice(WORDS), rng.randint(2, 5)
    ask = rng.choice(('Repeat the word "{}" {} times.', 'Write "{}" {} times in a row.'))
    listed = ", ".join(f"{i + 1} {word}" for i in range(n))
    return ask.format(word, n), [f"Counting to {n}: {listed}."], " ".join([word] * n)


def replace(rng: Random) -> Draft:
    """One letter exchanged for another."""
    word, spelled = _word(rng)
    old = rng.choice(word)
    new = rng.choice([c for c in "aeioumnkstz" if c != old])
    ask = rng.choice(
        ('Replace every {1} with {2} in "{0}".', 'In the word "{0}", change each {1} to {2}.')
    )
    answer = _spell(word.replace(old, new))
    return ask.format(word, old, new), [spelled, f"With {new} for {old}: {answer}."], answer


def drop_vowels(rng: Random) -> Draft:
    """The consonants of a word."""
    word, spelled = _word(rng)
    ask = rng.choice(
        ('Remove the vowels from "{}".', 'Write the word "{}" without a, e, i, o and u.')
    )
    answer = _spell("".join(c for c in word if c not in "aeiou"))
    return ask.format(word), [spelled, f"Without the vowels: {answer}."], answer


def last_word(rng: Random) -> Draft:
    """The word that a dictionary lists first or last."""
    first, second = sorted(rng.sample(WORDS, 2))
    shown = [first, second] if rng.random() < 0.5 else [second, first]
    ask = rng.choice(
        (
            'Which word comes first in a dictionary, "{}" or "{}"?',
            'Of "{}" and "{}", which one is first by the alphabet?',
        )
    )
    i = next((i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), len(first))
    why = (
        f"Letter {i + 1} decides: {first[i : i + 1] or 'the end'} comes before {second[i : i + 1]}."
    )
    return ask.format(*shown), [why], first


STRINGS: tuple[Callable[[Random], Draft], ...] = (
    reverse,
    upper,
    count_letter,
    nth_letter,
    length,
    initials,
    sort_letters,
    sort_digits,
    repeat,
    replace,
    drop_vowels,
    last_word,
)
