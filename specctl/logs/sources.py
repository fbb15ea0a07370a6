"""Text of servers, from a file or an address: its lines and its Prometheus samples."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from specctl.errors import InputError, reason_of
from specctl.progress import advance

SCHEMES = ("http://", "https://")
TIMEOUT_S = 10.0
"""To connect, and for each read after that."""
DEADLINE_S = 30.0
"""For a whole page, as a slow server may send a byte now and then."""
MAX_PAGE_BYTES = 64 << 20
MAX_COUNTER = 2**53
"""Largest counter that a float64, the number type of Prometheus, counts exactly."""


@dataclass(frozen=True)
class Source:
    """A text by name."""

    name: str  # a path or an address
    content: bytes | None = None  # None: read from the file of that name

    @classmethod
    def of(cls, place: str | Path) -> Self:
        """A file, which is read later, or a page, which is fetched now.

        Raises:
            InputError: a page that cannot be fetched or holds no metrics.
        """
        name = str(place)
        return cls(name, _fetch(name)) if name.startswith(SCHEMES) else cls(name)

    @property
    def size_bytes(self) -> int:
        """Raises InputError without such a file."""
        if self.content is not None:
            return len(self.content)
        with readable(self.name):
            return Path(self.name).stat().st_size

    def open(self) -> BinaryIO:
        """A stream from the beginning; enter `readable` around it."""
        return Path(self.name).open("rb") if self.content is None else io.BytesIO(self.content)


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turns `OSError` into an `InputError` that names the file."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {reason_of(error)}", hint="check the path"
        ) from error


def _fetch(url: str) -> bytes:
    """A page of metrics, or `InputError` with the reason."""
    wrong, fix = "cannot be read", "check that it runs, and its address: http://HOST:PORT/metrics"
    try:
        request = Request(url, headers={"Accept": "text/plain", "User-Agent": "specctl"})
        deadline = time.monotonic() + DEADLINE_S
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            parts, size = [], 0
            while size <= MAX_PAGE_BYTES and (part := answer.read1(1 << 16)):
                parts.append(part)
                size += len(part)
                if time.monotonic() > deadline:
                    raise TimeoutError
            kind = answer.headers.get_content_type()
    except HTTPError as error:
        reason = f"status {error.code} {error.reason}"
        if error.code == 404:
            fix = "name its page of metrics, http://HOST:PORT/metrics; SGLang has one only with "
            fix += "--enable-metrics"
    except TimeoutError:
        reason = f"no whole answer within {TIMEOUT_S:.0f} to {DEADLINE_S:.0f} s"
    except (URLError, HTTPException, OSError, ValueError) as error:
        inner = getattr(error, "reason", error)
        reason = str(inner) or type(error).__name__
        if isinstance(inner, OSError) and inner.strerror:
            reason = reason_of(inner)
    else:
        page = b"".join(parts)
        wrong, fix = "is no page of Prometheus metrics", "name the page /metrics"
        if size > MAX_PAGE_BYTES:
            reason = f"it has more than {MAX_PAGE_BYTES >> 20} MiB"
        elif kind in ("text/html", "application/json") or page.lstrip()[:1] in (b"<", b"{", b"["):
            reason = f"it is {kind} and begins with {page.lstrip()[:40]!r}"
        else:
            return page
    raise InputError(f"{url} {wrong}: {reason}", hint=fix)


# --------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class Spot:
    """The place of a line, counted from 1."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}"

    def refuse(self, problem: str, fix: str = "correct it") -> InputError:
        """The error for this line."""
        return InputError(f"{self}: {problem}", hint=fix)


def text_lines(source: Source) -> Iterator[tuple[Spot, str]]:
    """Lines with text, and their places; `bytes read` progress."""
    with readable(source.name), source.open() as stream:
        for number, raw in enumerate(stream, start=1):
            advance("bytes read", len(raw))
            spot = Spot(source.name, number)
            try:
                text = (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).decode()
            except UnicodeDecodeError as error:
                raise spot.refuse(
                    f"byte 0x{error.object[error.start]:02x} at column {error.start + 1} is not "
                    "UTF-8",
                    "convert the file to UTF-8",
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
    """One line of Prometheus metrics: a name, labels and a number."""

    spot: Spot
    name: str
    labels: dict[str, str]
    text: str

    def number(self) -> float:
        """The finite, non-negative value. Raises InputError for any other."""
        try:
            value = float(self.text)
        except ValueError:
            value = -1.0
        if not (math.isfinite(value) and value >= 0):
            raise self.spot.refuse(f"{self.text[:40]} is no finite number from 0 on")
        return value

    def count(self) -> int:
        """The value as a whole number. Raises InputError for any other."""
        value = self.number()
        if not (value <= MAX_COUNTER and value.is_integer()):
            raise self.spot.refuse(f"{self.text[:40]} is no count")
        return int(value)


def metric_samples(source: Source, prefix: str) -> Iterator[Sample]:
    """The samples whose name begins with `prefix`; counters lose `_total` and their `_created`."""
    spots: dict[tuple[str, str], Spot] = {}
    for spot, line in text_lines(source):
        if not line.startswith(prefix):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise spot.refuse(f"{line.strip()[:60]} is no sample of {prefix}...")
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
