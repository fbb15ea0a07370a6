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
MAX_INT = 2**63 - 1


def parse_strict(data: bytes) -> Any:
    """The value of a JSON text in which every parser reads the same.

    Raises:
        ArtifactError: E_MANIFEST for duplicate or too many keys, NaN, infinities, numbers beyond
            64 bit, nesting above `MAX_NESTING`, or bytes that are not UTF-8 JSON.
    """
    try:
        tree = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        _refuse("UTF-8 JSON", str(error))
    except RecursionError:
        _refuse_nesting()
    _check_nesting(tree)
    return tree


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        _refuse(f"at most {MAX_KEYS} keys in an object", str(len(pairs)))
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        _refuse("each key once in an object", f"{twice[:64]!r} twice")
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
        _refuse_nesting()


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def shown(text: str) -> str:
    """Text of a stranger, fit for one line of a terminal: no control characters, not endless."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:300])


def _refuse_nesting() -> NoReturn:
    _refuse(f"at most {MAX_NESTING} levels of nesting", "more")


def _refuse(expected: str, found: str) -> NoReturn:
    raise ArtifactError("E_MANIFEST", "config.json", expected=expected, found=found)
