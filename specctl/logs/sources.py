"""Text of servers, from a file, a pipe or an address: its lines and their places."""

from __future__ import annotations

import gzip
import io
import lzma
import re
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from specctl.contents import HEAD_BYTES, encoding_of, no_text, unpacked
from specctl.errors import InputError, UsageError, reason_of
from specctl.progress import advance, progress

SCHEMES = ("http://", "https://")
TIMEOUT_S = 10.0
"""To connect, and for each read after that."""
DEADLINE_S = 30.0
"""For a whole page, as a slow server may send a byte now and then."""
MAX_PAGE_BYTES = 64 << 20
_ADDRESS = re.compile(r"[\w.\-]+:\d+(?:/|$)|[\w.\-]+\.\w+(?::\d+)?/metrics$")


@dataclass(frozen=True)
class Source:
    """A text by name."""

    name: str  # a path or an address
    content: bytes | None = None  # None: read from the file of that name

    @classmethod
    def of(cls, place: str | Path) -> Self:
        """A file, which is read later, `-` for standard input, or a page, which is fetched now.

        Raises:
            InputError: a page that cannot be fetched or is none of metrics.
        """
        name = str(place)
        if name == "-":
            return cls("standard input", sys.stdin.buffer.read())
        if _ADDRESS.match(name) and not Path(name).exists():
            raise InputError(f"{name} is no file", hint=f"for a page, write http://{name}")
        return cls(name, _fetch(name)) if name.startswith(SCHEMES) else cls(name)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The bytes from the beginning, unpacked.

        Raises:
            InputError: a file that cannot be read, or one that is no text.
        """
        held = self.content
        with (
            readable(self.name),
            Path(self.name).open("rb") if held is None else io.BytesIO(held) as raw,
        ):
            try:
                stream = unpacked(raw)
                kind = no_text(stream.read(HEAD_BYTES))
                if kind is not None:
                    what, fix = kind
                    problem = f"is no text: it is {what}"
                    if stream is not raw:
                        problem = f"is compressed, and what it holds is {what}"
                    raise InputError(
                        f"{self.name} {problem}", hint=fix or "give the server's log or metrics"
                    )
                stream.seek(0)
                yield stream
            except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
                raise InputError(
                    f"{self.name} is compressed, and ends early or is damaged", hint="copy it whole"
                ) from error


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turns `OSError` into an `InputError` that names the file."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {reason_of(error)}", hint="check the path"
        ) from error


def watched(places: Sequence[str], seconds: int) -> list[Source]:
    """A page of metrics now, and again after this time.

    Raises:
        UsageError: not one address.
    """
    if len(places) != 1 or not places[0].startswith(SCHEMES):
        raise UsageError(
            "--watch scrapes one address twice",
            hint="give http://HOST:PORT/metrics alone, or two files of scrapes without --watch",
        )
    [url] = places
    first = _fetch(url)
    with progress(waited := "seconds to the second scrape", seconds):
        for _ in range(seconds):
            time.sleep(1)
            advance(waited)
    return [Source(f"{url} at first", first), Source(f"{url} {seconds} s later", _fetch(url))]


def _fetch(url: str) -> bytes:
    """A page of metrics, or `InputError` with the reason."""
    wrong, fix = "cannot be read", "check that it runs, and its address: http://HOST:PORT/metrics"
    try:
        request = Request(url, headers={"Accept": "text/plain", "User-Agent": "specctl"})
        deadline = time.monotonic() + DEADLINE_S
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            page = bytearray()
            while len(page) <= MAX_PAGE_BYTES and (part := answer.read1(1 << 16)):
                page += part
                if time.monotonic() > deadline:
                    raise TimeoutError
            kind = answer.headers.get_content_type()
    except HTTPError as error:
        reason = f"status {error.code} {error.reason}"
        if error.code == 404:
            fix = "name its page of metrics, http://HOST:PORT/metrics; SGLang has one only with "
            fix += "--enable-metrics, llama.cpp with --metrics"
    except TimeoutError:
        reason = f"no whole answer within {TIMEOUT_S:.0f} to {DEADLINE_S:.0f} s"
    except (URLError, HTTPException, OSError, ValueError) as error:
        inner = getattr(error, "reason", error)
        reason = str(inner) or type(error).__name__
        if isinstance(inner, OSError) and inner.strerror:
            reason = reason_of(inner)
    else:
        wrong, fix = "is no page of Prometheus metrics", "name the page /metrics"
        if len(page) > MAX_PAGE_BYTES:
            reason = f"it has more than {MAX_PAGE_BYTES >> 20} MiB"
        elif kind == "text/html" or page.lstrip()[:1] == b"<":
            reason = f"it is {kind} and begins with {bytes(page.lstrip()[:40])!r}"
        else:
            return bytes(page)
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
    """Lines with text, with their line ends, and their places; `lines read` progress.

    A byte that is no text becomes U+FFFD, which no figure of a server holds.
    """
    with source.open() as stream:
        encoding, mark = encoding_of(stream.read(HEAD_BYTES))
        stream.seek(mark)
        text = io.TextIOWrapper(stream, encoding, errors="replace", newline=None)
        for number, line in enumerate(text, start=1):
            advance("lines read")
            if line.strip():
                yield Spot(source.name, number), line
        text.detach()
