"""Text of other tools: lines, strict JSON and Prometheus samples, refused by line.

pydantic checks the fields of JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
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

from specctl.errors import InputError, shown
from specctl.logs.sources import Source, readable
from specctl.records import in_plain_words, require

MAX_COUNTER = 2**53
"""Largest counter that a float64, the number type of Prometheus, counts by ones."""
Row = dict[str, Any]
OnBytes = Callable[[int], None]


# --------------------------------------------------------------------------- fields


class OtherRecord(BaseModel):
    """Base of another tool's records: fields that nobody reads may be there, none is converted."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    fix: ClassVar[str] = "correct it"
    """The advice where a rule between fields does not hold."""


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
        message = in_plain_words(first["msg"])
        if first["type"] == "value_error" and isinstance(value, dict):
            raise self.refuse(message, "other values", kind.fix)
        field = [part for part in place if isinstance(part, str)][-1]
        if first["type"] == "missing":
            raise self.refuse(f"a field {field!r}", "none")
        at = f" at index {place[-1]}" if isinstance(place[-1], int) else ""
        raise self.refuse(f"{field!r}: {message}", f"{_shown(value)}{at}")


def _lines(source: Source, on_bytes: OnBytes | None = None) -> Iterator[tuple[Spot, str]]:
    """All lines. Split at line feeds alone: JSON strings may hold U+2028."""
    with readable(source.name), source.open() as stream:
        for number, raw in enumerate(stream, start=1):
            if on_bytes is not None:
                on_bytes(len(raw))
            spot = Spot(source.name, number)
            try:
                yield spot, (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).decode()
            except UnicodeDecodeError as error:
                found = f"byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
                raise spot.refuse("UTF-8 text", found, "convert the file to UTF-8") from error


def text_lines(source: Source, on_bytes: OnBytes | None = None) -> Iterator[tuple[Spot, str]]:
    """Lines that are not blank.

    Raises:
        InputError: a line that is not UTF-8, or a file that cannot be read.
    """
    return ((spot, text) for spot, text in _lines(source, on_bytes) if text.strip())


def json_objects(source: Source, on_bytes: OnBytes | None = None) -> Iterator[tuple[Spot, Row]]:
    """The objects of a file: one a line, or the items of one array, or one that spans lines.

    Raises:
        InputError: naming the line of what is malformed, or the file where it holds nothing.
    """
    for spot, value in _json_values(source, on_bytes):
        if not isinstance(value, dict):
            raise spot.refuse("a JSON object", _shown(value))
        yield spot, value


def _json_values(source: Source, on_bytes: OnBytes | None) -> Iterator[tuple[Spot, Any]]:
    lines = text_lines(source, on_bytes)
    spot, first = next(lines, (Spot(source.name, 1), ""))
    if not first:
        fix = "name a file that holds some"
        raise InputError(source.name, expected="records", found="an empty file", fix=fix)
    if first.strip() != "{" and not first.lstrip().startswith("["):
        yield from ((at, parse_json(line, at)) for at, line in chain([(spot, first)], lines))
        return
    # Blank lines too, so that a syntax error is named by its line.
    value = parse_json(
        "".join(line for at, line in _lines(source) if at.number >= spot.number), spot
    )
    if not isinstance(value, list):
        yield spot, value
        return
    yield from ((Spot(source.name, place, "item"), item) for place, item in enumerate(value, 1))


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
        at = Spot(spot.path, spot.number + error.lineno - 1)
        line = (text.splitlines() or [""])[error.lineno - 1]
        fix = "remove them: tr -d '\\000' < FILE > COPY"
        if "\0" in line:  # of a file whose writer was stopped: the system filled what was missing
            raise at.refuse("JSON", f"{line.count(chr(0))} NUL bytes", fix) from error
        cut = ", at the end of a line without a line end" if not text.endswith("\n") else ""
        found = f"{shown(line, max_chars=40)!r}, which is no JSON from column {error.colno} on{cut}"
        raise at.refuse("JSON", found, "restore the line, or remove it") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise spot.refuse("JSON of sane size", str(error)[:80], "remove it") from error


# --------------------------------------------------------------------------- metrics

_LABEL = r'\s*\w+="(?:[^"\\]|\\.)*"\s*'
_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(
    rf"(?P<name>[\w:]+)(?:\{{(?P<labels>(?:{_LABEL}(?:,{_LABEL})*,?)?)\}})?"
    r"\s+(?P<value>\S+)(?:\s+-?\d+)?\s*"
)


@dataclass(frozen=True)
class Sample:
    """One line of metrics, as Prometheus writes them: a name, labels and a number."""

    spot: Spot
    name: str
    labels: dict[str, str]
    text: str

    def number(self) -> float:
        """A finite number, not negative. Raises InputError for any other."""
        try:
            value = float(self.text)
        except ValueError:
            value = -1.0
        if not (math.isfinite(value) and value >= 0):
            raise self.spot.refuse("a number", self.text[:40])
        return value

    def count(self) -> int:
        """A whole number. Raises InputError for any other."""
        value = self.number()
        if not (value <= MAX_COUNTER and value.is_integer()):
            raise self.spot.refuse("a count", self.text[:40])
        return int(value)


def metric_samples(
    source: Source, prefix: str, on_bytes: OnBytes | None = None
) -> Iterator[Sample]:
    """The samples whose name begins so; of a counter without `_total`, and without its `_created`.

    Raises:
        InputError: a line that is no sample, or one that stands twice: two scrapes would add up.
    """
    seen: dict[tuple[str, str], Spot] = {}
    for spot, line in text_lines(source, on_bytes):
        if not line.startswith(prefix):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise spot.refuse(f"a sample of {prefix}...", line.strip()[:60])
        name, labels = match["name"].removesuffix("_total"), match["labels"] or ""
        if name.endswith("_created"):  # a time
            continue
        earlier = seen.setdefault((name, labels), spot)
        if earlier is not spot:
            found = f"{name} of line {earlier.number} again"
            raise spot.refuse("one scrape, each counter once", found, "keep one scrape")
        yield Sample(spot, name, dict(_PAIR.findall(labels)), match["value"])


def _shown(value: Any) -> str:
    """Another tool's value, fit for one line."""
    kinds = {dict: "an object", list: "a list", type(None): "nothing"}
    return kinds.get(type(value)) or repr(value)[:40]
