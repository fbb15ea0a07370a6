"""Files of other tools: text and strict JSON, refused by line. pydantic checks their fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from specctl.errors import InputError
from specctl.records import require

MAX_COUNTER = 2**53
"""Largest counter that a float64, the number type of Prometheus, counts by ones."""
Row = dict[str, Any]
OnBytes = Callable[[int], None]


# --------------------------------------------------------------------------- fields


class OtherRecord(BaseModel):
    """Base of another tool's records: fields that nobody reads may be there, none is converted."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    fix: ClassVar[str] = "correct it"
    """What to do where a rule between fields does not hold."""


def _text(value: Any) -> str:
    value = str(value) if type(value) is int else value
    require(isinstance(value, str) and bool(value.strip()), "text or a whole number")
    require(not any("\ud800" <= c <= "\udfff" for c in value), "no half of a surrogate pair")
    return str(value)


Name = Annotated[str, BeforeValidator(_text)]
Category = Annotated[str, BeforeValidator(lambda value: _text(value) if value else "")]
"""Empty where the file has none."""
Counter = Annotated[int, Field(ge=0, le=MAX_COUNTER)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
"""A count or token id of a list."""


def _at_once(values: Any, one_by_one: ValidatorFunctionWrapHandler) -> Any:
    """A fitting list as it is: pydantic takes longer, and says which number does not fit."""
    is_list = type(values) is list and set(map(type, values)) <= {int}
    fits = is_list and (not values or 0 <= min(values) <= max(values) < 2**31)
    return values if fits else one_by_one(values)


Counts = Annotated[list[Count], Field(fail_fast=True), WrapValidator(_at_once)]
RecordT = TypeVar("RecordT", bound=OtherRecord)


@dataclass(frozen=True)
class Spot:
    """Where a record stands: its 1-based line, or item of a JSON array."""

    path: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"

    def refuse(self, expected: str, found: str, fix: str = "correct it") -> InputError:
        """The error for this record."""
        return InputError(str(self), expected=expected, found=found, fix=fix)

    def check_new(self, name: str, seen: dict[str, Spot], what: str) -> None:
        """Refuses a name that an earlier record has: it would count twice."""
        first = seen.setdefault(name, self)
        if first is not self:
            found = f"{name[:80]!r}, which {first.unit} {first.number} has too"
            raise self.refuse(f"each {what} once", found, "keep one of them")

    def record(self, kind: type[RecordT], row: Row) -> RecordT:
        """The fields of a record.

        Raises:
            InputError: naming the first field that does not fit, or the rule between fields.
        """
        try:
            return kind.model_validate(row)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        value, place = first["input"], first["loc"]
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if first["type"] == "value_error" and isinstance(value, dict):
            raise self.refuse(message, "other values", kind.fix)
        field = [part for part in place if isinstance(part, str)][-1]
        if first["type"] == "missing":
            raise self.refuse(f"a field {field!r}", "none")
        at = f" at index {place[-1]}" if isinstance(place[-1], int) else ""
        raise self.refuse(f"{field!r}: {message}", f"{_shown(value)}{at}")


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
    for spot, value in _json_values(path, on_bytes):
        if not isinstance(value, dict):
            raise spot.refuse("a JSON object", _shown(value))
        yield spot, value


def _json_values(path: Path, on_bytes: OnBytes | None) -> Iterator[tuple[Spot, Any]]:
    lines = text_lines(path, on_bytes)
    spot, first = next(lines, (Spot(str(path), 1), ""))
    if not first:
        raise InputError(str(path), expected="records", found="an empty file", fix="fill the file")
    if first.strip() != "{" and not first.lstrip().startswith("["):
        yield from ((at, parse_json(line, at)) for at, line in chain([(spot, first)], lines))
        return
    # Blank lines too, so that a syntax error is named by its line.
    value = parse_json("".join(line for at, line in _lines(path) if at.number >= spot.number), spot)
    if not isinstance(value, list):
        yield spot, value
        return
    yield from ((Spot(str(path), place, "item"), item) for place, item in enumerate(value, 1))


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


def _shown(value: Any) -> str:
    """Another tool's value, fit for one line."""
    kinds = {dict: "an object", list: "a list", type(None): "nothing"}
    return kinds.get(type(value)) or repr(value)[:40]
