"""The words of a policy on the command line: `eagle2:depth=8`, `survival:max_tokens=64`.

docs/policies.md lists the words and their settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from specctl.errors import UsageError
from specctl.policy.families import WORDS
from specctl.runtime.policy_places import is_artifact, is_meant_as_artifact

PARTS = WORDS
SHAPES = WORDS["shape"]


def pieces(spec: str) -> Iterator[str]:
    """The parts between the pluses of a spec; an artifact may have pluses in its name."""
    words = spec.split("+")
    while words:
        size = _longest(words)
        yield "+".join(words[:size])
        words = words[size:]


def names_artifact(piece: str) -> bool:
    """Whether a piece names an artifact, there or not. A known word never does: a folder of that
    name, whoever made it, would change what the word means; `./chain` is one."""
    return _begins_unknown(piece) and (is_artifact(piece) or is_meant_as_artifact(piece))


def _begins_unknown(piece: str) -> bool:
    return part_of(piece.partition("+")[0]) is None


def _longest(words: list[str]) -> int:
    """How many words the first piece has: of what is there first, else of what looks like one."""
    if not _begins_unknown(words[0]):
        return 1
    joined = {n: "+".join(words[:n]) for n in range(len(words), 0, -1)}
    for is_one in (is_artifact, is_meant_as_artifact):
        for n, piece in joined.items():
            if is_one(piece):
                return n
    return 1


def part_of(piece: str) -> str | None:
    """`shape`, `budget` or `acceptance`, by the piece's word; None for an unknown one."""
    name = piece.partition(":")[0]
    return next((part for part, known in PARTS.items() if name in known), None)


def record_of(piece: str) -> dict[str, Any]:
    """The record that a known word with its settings stands for, as plain values."""
    name, *settings = piece.split(":")
    [defaults] = (known[name] for known in PARTS.values() if name in known)
    given = [_setting(piece, word) for word in settings]
    names = ["kind", *(field for field, _ in given)]  # the name before the colon is the kind
    if len(set(names)) < len(names):
        raise UsageError(
            f"policy {piece!r}",
            expected="each setting once, and no kind",
            found=", ".join(names[1:]),
            fix="remove what is repeated",
        )
    return {**defaults, **dict(given)}


def _setting(piece: str, word: str) -> tuple[str, Any]:
    field, _, value = word.partition("=")
    if not field or not value:
        raise UsageError(
            f"policy {piece!r}",
            expected="settings such as eagle2:depth=6:top_k=8:num_tokens=48",
            found=repr(word),
            fix="give field=value, separated by colons",
        )
    if value.endswith("/"):  # a list of one, e.g. gate_levels=1/
        value = value.removesuffix("/")
        return field, [_value(part) for part in value.split("/")]
    return field, [_value(part) for part in value.split("/")] if "/" in value else _value(value)


def _value(text: str) -> Any:
    """A number, `true` or `false`; other text stands for itself, for the record to judge."""
    for read in (int, _finite):
        with suppress(ValueError):
            return read(text)
    return {"true": True, "false": False}.get(text, text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
