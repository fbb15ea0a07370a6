"""JSON of unknown origin: read in the one way that every parser agrees on, or refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from specctl.errors import ArtifactError, reason_of

MAX_NESTING = 32
"""Levels. Our own manifests nest about six deep; parsers recurse."""
MAX_KEYS = 4096
"""In one object; validating a hundred thousand unknown fields takes seconds."""
MAX_KEY_CHARS = 256
"""Of a key, like a name; the place of a value repeats the keys above it."""
MAX_VALUES = 100_000
"""In a whole text, counted before it is parsed; reading so many takes 0.1 s."""
MAX_INT = 2**63 - 1


def parse_strict(data: bytes, file: str = "config.json") -> Any:
    """The value of a JSON text that every parser reads alike.

    Args:
        file: named by a refusal.

    Raises:
        ArtifactError: E_MANIFEST for duplicate or long keys, more keys, values or levels than the
            caps allow, NaN, infinities, numbers beyond 64 bit, or bytes that are not UTF-8 JSON.
    """

    def refuse(problem: str) -> NoReturn:
        raise ArtifactError("E_MANIFEST", file, problem)

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > MAX_KEYS:
            refuse(f"an object has {len(pairs)} keys, more than {MAX_KEYS}")
        found: dict[str, Any] = {}
        for key, value in pairs:
            if len(key) > MAX_KEY_CHARS:
                refuse(f"a key has more than {MAX_KEY_CHARS} characters: {key[:64]!r}…")
            if key in found:
                refuse(f"an object has the key {key[:64]!r} twice")
            found[key] = value
        return found

    def as_float(literal: str) -> float:
        value = float(literal)
        return value if math.isfinite(value) else refuse(f"{literal[:64]} is not finite")

    def as_int(literal: str) -> int:
        if len(literal) > 20 or abs(int(literal)) > MAX_INT:
            refuse(f"{literal[:64]} is no whole number of 64 bit")
        return int(literal)

    if most_values(data) > MAX_VALUES:
        refuse(f"it has more than {MAX_VALUES} values")
    try:
        tree = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=as_object,
            parse_constant=lambda literal: refuse(f"{literal} is not finite"),
            parse_float=as_float,
            parse_int=as_int,
        )
        level = [tree]
        for _ in range(MAX_NESTING):
            level = [inner for value in level for inner in _children(value)]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        refuse(f"it is {reason_of(error)}")
    except RecursionError:
        level = [data]
    if level:
        refuse(f"it nests more than {MAX_NESTING} levels")
    return tree


def most_values(data: bytes) -> int:
    """Values that a JSON text holds at most: a list or object of n of them has n - 1 commas."""
    return 1 + sum(data.count(mark) for mark in (b",", b"[", b"{"))


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
