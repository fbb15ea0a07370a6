"""Files of other tools: strict JSON and plain text, refused by line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from specctl.errors import InputError
from specctl.logs.positions import Longs

MAX_INT = 2**31 - 1
"""Largest count or token id that is believed."""
MAX_COUNTER = 2**53
"""Largest counter that a float64, the number type of Prometheus, counts by ones."""
Row = dict[str, Any]
OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Spot:
    """Where a record stands: its 1-based line, or item of a JSON array.

    Its methods read fields of the record, and refuse it by naming the place.
    """

    path: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"

    def refuse(self, expected: str, found: str, fix: str = "correct it") -> InputError:
        """The error for this record."""
        return InputError(str(self), expected=expected, found=found, fix=fix)

    def text(self, row: Row, key: str) -> str:
        """A field that holds a name: text, or a whole number."""
        value = row.get(key)
        if type(value) is int:
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(f"{key!r} as text or a whole number", kind_of(value))
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise self.refuse(f"{key!r} as Unicode text", "half a surrogate pair")
        return value

    def count(self, row: Row, key: str) -> int:
        """A field that holds a count."""
        value = row.get(key)
        if type(value) is not int or not 0 <= value <= MAX_COUNTER:
            raise self.refuse(f"{key!r} as a count", _shown(value))
        return value

    def items(self, values: Any, name: str) -> list[Any]:
        """A list, whatever it holds."""
        if not isinstance(values, list):
            raise self.refuse(f"{name} as a list", kind_of(values))
        return values

    def counts(self, values: Any, name: str, *, low: int = 0) -> Longs:
        """A list of whole numbers, each of at least `low`: `[n]` int64."""
        listed = self.items(values, name)
        # Whole lists are judged at once; a truth value is no number here.
        if not set(map(type, listed)) <= {int} or (
            listed and not low <= min(listed) <= max(listed) <= MAX_INT
        ):
            for index, value in enumerate(listed):
                if type(value) is not int or not low <= value <= MAX_INT:
                    found = f"{_shown(value)} at index {index}"
                    raise self.refuse(f"{name} as whole numbers of at least {low}", found)
        return np.array(listed, np.int64)

    def seconds(self, values: Any, name: str) -> list[float]:
        """A list of durations in seconds, each above 0."""
        listed = self.items(values, name)
        for index, value in enumerate(listed):
            if type(value) not in (int, float) or not 0 < value < MAX_COUNTER:
                found = f"{_shown(value)} at index {index}"
                raise self.refuse(f"{name} as seconds above 0", found)
        return [float(value) for value in listed]

    def check(self, rules: dict[str, bool], fix: str) -> None:
        """Refuses a record of which a rule does not hold."""
        for rule, holds in rules.items():
            if not holds:
                raise self.refuse(rule, "another count", fix)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals into `InputError` naming the file."""
    try:
        yield
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise InputError(
            str(path), expected="a file that can be read", found=found, fix="check the path"
        ) from error


def size_bytes(path: Path) -> int:
    """Size of a file.

    Raises:
        InputError: there is no such file.
    """
    with readable(path):
        return path.stat().st_size


def _lines(path: Path, on_bytes: OnBytes | None = None) -> Iterator[tuple[Spot, str]]:
    """All lines. Split at line feeds alone: JSON strings may hold U+2028."""
    with readable(path), path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if on_bytes is not None:
                on_bytes(len(raw))
            spot = Spot(str(path), number)
            try:
                yield spot, (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).decode()
            except UnicodeDecodeError as error:
                found = f"byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
                raise spot.refuse("UTF-8 text", found, "convert the file to UTF-8") from error


def text_lines(path: Path, on_bytes: OnBytes | None = None) -> Iterator[tuple[Spot, str]]:
    """Lines that are not blank.

    Raises:
        InputError: a line that is not UTF-8, or a file that cannot be read.
    """
    return ((spot, text) for spot, text in _lines(path, on_bytes) if text.strip())


def json_objects(path: Path, on_bytes: OnBytes | None = None) -> Iterator[tuple[Spot, Row]]:
    """The objects of a file: one a line, or the items of one array, or one that spans lines.

    Raises:
        InputError: naming the line of what is malformed, or the file where it holds nothing.
    """
    lines = text_lines(path, on_bytes)
    spot, first = next(lines, (Spot(str(path), 1), ""))
    if not first:
        raise InputError(str(path), expected="records", found="an empty file", fix="fill the file")
    if first.strip() != "{" and not first.lstrip().startswith("["):
        yield spot, _object(parse_json(first, spot), spot)
        for spot, line in lines:
            yield spot, _object(parse_json(line, spot), spot)
        return
    # Blank lines too, so that a syntax error is named by its line.
    whole = "".join(line for at, line in _lines(path) if at.number >= spot.number)
    value = parse_json(whole, spot)
    if not isinstance(value, list):
        yield spot, _object(value, spot)
        return
    for number, item in enumerate(value, start=1):
        item_spot = Spot(str(path), number, "item")
        yield item_spot, _object(item, item_spot)


def parse_json(text: str, spot: Spot) -> Any:
    """The value of a text, read in one way only.

    Raises:
        InputError: no JSON, a key twice, NaN or infinite numbers, or absurd nesting or size.
    """

    def constant(literal: str) -> NoReturn:
        raise spot.refuse("finite numbers", literal[:40])

    def finite(literal: str) -> float:
        value = float(literal)
        return value if math.isfinite(value) else constant(literal)

    def unique(pairs: list[tuple[str, Any]]) -> Row:
        if len(value := dict(pairs)) != len(pairs):
            raise spot.refuse("each key once in an object", f"keys {[k for k, _ in pairs][:8]}")
        return value

    hooks: Any = {
        "parse_constant": constant,
        "parse_float": finite,
        "object_pairs_hook": unique,
    }
    try:
        return json.loads(text.rstrip(), **hooks)
    except json.JSONDecodeError as error:
        cut = ", at the end of a line without a line end" if not text.endswith("\n") else ""
        at = Spot(spot.path, spot.number + error.lineno - 1)
        found = f"{error.msg} at column {error.colno}{cut}"
        raise at.refuse("JSON", found, "restore the line, or remove it") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise spot.refuse("JSON of sane size", str(error)[:80], "remove it") from error


def _object(value: Any, spot: Spot) -> Row:
    if not isinstance(value, dict):
        raise spot.refuse("a JSON object", kind_of(value))
    return value


def _shown(value: Any) -> str:
    """Another tool's value, fit for one line."""
    return kind_of(value) if isinstance(value, dict | list | type(None)) else repr(value)[:40]


def kind_of(value: Any) -> str:
    """A type in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    return "nothing" if value is None else names.get(type(value), "a number")
