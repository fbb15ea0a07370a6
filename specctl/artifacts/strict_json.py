"""JSON from strangers: read in one way only, or not at all."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from specctl.errors import ArtifactError

MAX_NESTING = 32
"""Levels. Our own manifests nest about six deep; parsers recurse."""
MAX_KEYS = 4096
"""In one object; validating a hundred thousand unknown fields takes seconds."""
MAX_KEY_CHARS = 256
"""Of a key: like a name. Places of values are told by keys, so a long one is paid many times."""
MAX_VALUES = 100_000
"""In a whole text, counted before it is parsed; reading so many takes 0.1 s."""
MAX_INT = 2**63 - 1


def parse_strict(data: bytes, file: str = "config.json") -> Any:
    """The value of a JSON text in which every parser reads the same.

    Args:
        file: named by a refusal.

    Raises:
        ArtifactError: E_MANIFEST for duplicate or long keys, more keys, values or levels than the
            caps allow, NaN, infinities, numbers beyond 64 bit, or bytes that are not UTF-8 JSON.
    """
    if most_values(data) > MAX_VALUES:
        raise _refused(file, f"at most {MAX_VALUES} values", "more")
    try:
        tree = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
        _check_nesting(tree)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refused(file, "UTF-8 JSON", str(error)) from None
    except RecursionError:
        raise _refused(file, *_NESTING) from None
    except _AmbiguityError as error:
        raise _refused(file, *error.args) from None
    return tree


def most_values(data: bytes) -> int:
    """Values that a JSON text holds at most: a list or object of n of them has n - 1 commas."""
    return 1 + sum(data.count(mark) for mark in (b",", b"[", b"{"))


class _AmbiguityError(Exception):
    """What was expected and what was found, from within the parser."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        _refuse(f"at most {MAX_KEYS} keys in an object", str(len(pairs)))
    value: dict[str, Any] = {}
    for key, one in pairs:
        if len(key) > MAX_KEY_CHARS:
            _refuse(f"keys of at most {MAX_KEY_CHARS} characters", f"{key[:64]!r}…")
        if key in value:
            _refuse("each key once in an object", f"{key[:64]!r} twice")
        value[key] = one
    return value


def _constant(literal: str) -> NoReturn:
    _refuse("finite numbers", literal)


def _float(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        _refuse("finite numbers", literal[:64])
    return value


def _int(literal: str) -> int:
    if len(literal) > 20 or abs(int(literal)) > MAX_INT:
        _refuse("whole numbers of 64 bit", literal[:64])
    return int(literal)


def _check_nesting(tree: Any) -> None:
    level = [tree]
    for _ in range(MAX_NESTING):
        level = [child for value in level for child in _children(value)]
    if level:
        _refuse(*_NESTING)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


_NESTING = (f"at most {MAX_NESTING} levels of nesting", "more")


def _refuse(expected: str, found: str) -> NoReturn:
    raise _AmbiguityError(expected, found)


def _refused(file: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError("E_MANIFEST", file, expected=expected, found=found)
