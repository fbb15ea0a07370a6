"""Text of other tools: lines and Prometheus samples, refused by line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from specctl.errors import InputError
from specctl.logs.sources import Source, readable
from specctl.progress import advance

MAX_COUNTER = 2**53
"""Largest counter that a float64, the number type of Prometheus, counts by ones."""


@dataclass(frozen=True)
class Spot:
    """Where a line stands, counted from 1."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}"

    def refuse(self, problem: str, fix: str = "correct it") -> InputError:
        """The error for this line."""
        return InputError(f"{self}: {problem}", hint=fix)


def text_lines(source: Source) -> Iterator[tuple[Spot, str]]:
    """Lines that are not blank."""
    with readable(source.name), source.open() as stream:
        for number, raw in enumerate(stream, start=1):
            advance("bytes read", len(raw))
            spot = Spot(source.name, number)
            try:
                text = (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).decode()
            except UnicodeDecodeError as error:
                found = f"byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
                raise spot.refuse(
                    f"expected UTF-8 text, found {found}", "convert the file to UTF-8"
                ) from error
            if text.strip():
                yield spot, text


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
            raise self.spot.refuse(f"expected a number, found {self.text[:40]}")
        return value

    def count(self) -> int:
        """A whole number. Raises InputError for any other."""
        value = self.number()
        if not (value <= MAX_COUNTER and value.is_integer()):
            raise self.spot.refuse(f"expected a count, found {self.text[:40]}")
        return int(value)


def metric_samples(source: Source, prefix: str) -> Iterator[Sample]:
    """The samples whose name begins so; of a counter without `_total` and its `_created`."""
    spots: dict[tuple[str, str], Spot] = {}
    for spot, line in text_lines(source):
        if not line.startswith(prefix):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise spot.refuse(f"expected a sample of {prefix}..., found {line.strip()[:60]}")
        name, labels = match["name"].removesuffix("_total"), match["labels"] or ""
        if name.endswith("_created"):  # a time
            continue
        earlier = spots.setdefault((name, labels), spot)
        if earlier is not spot:
            found = f"{name} of line {earlier.number} again"
            raise spot.refuse(
                f"expected one scrape, each counter once, found {found}", "keep one scrape"
            )
        yield Sample(spot, name, dict(_PAIR.findall(labels)), match["value"])
