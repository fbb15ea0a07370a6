"""Strict JSON: text that parsers could read in different ways, or slowly, is refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from specctl.errors import ArtifactError, reason_of

MAX_NESTING = 32
"""Levels; parsers recurse, and manifests have about six."""
MAX_KEYS = 4096
"""In one object: validating a hundred thousand unknown fields takes seconds."""
MAX_KEY_CHARS = 256
"""In one key: error messages repeat all keys above a value."""
MAX_VALUES = 100_000
"""In a text, counted before it is parsed; parsing this many takes 0.1 s."""
MAX_INT = 2**63 - 1


def parse_strict(data: bytes, file: str = "config.json") -> Any:
    """The value of a JSON text that every parser reads alike.

    Args:
        file: its name in errors.

    Raises:
        ArtifactError: E_MANIFEST for duplicate or long keys, too many keys, values or levels, NaN,
            infinities, integers above 64 bits, or bytes that are not UTF-8 JSON.
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
            refuse(f"{literal[:64]} is no integer of 64 bits")
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
    """Upper bound of the values in a JSON text: a list or object of n values has n - 1 commas."""
    return 1 + sum(data.count(mark) for mark in (b",", b"[", b"{"))


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
