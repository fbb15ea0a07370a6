"""The text that an import reads: a file, or a server's answer at an address."""

from __future__ import annotations

import io
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

SCHEMES = ("http://", "https://")
TIMEOUT_S = 10.0
"""To connect, and for each answer of the network after that."""
DEADLINE_S = 30.0
"""For a whole page: a server that sends a byte now and then does not hold an import for ever."""
MAX_PAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Source:
    """A text by name."""

    name: str  # a path or an address, as errors name it
    content: bytes | None = None  # the bytes; None where they are read from the file of that name

    @classmethod
    def of(cls, place: str | Path) -> Self:
        """A file, which is read later, or a page, which is fetched now.

        Raises:
            InputError: a page that cannot be had, or that is no text of metrics.
        """
        name = str(place)
        return cls(name, _fetch(name)) if name.startswith(SCHEMES) else cls(name)

    @property
    def size_bytes(self) -> int:
        """Raises InputError where there is no such file."""
        if self.content is not None:
            return len(self.content)
        with readable(self.name):
            return Path(self.name).stat().st_size

    def open(self) -> BinaryIO:
        """A stream from the beginning; see `readable` for a file that is not there."""
        return Path(self.name).open("rb") if self.content is None else io.BytesIO(self.content)


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turns the operating system's refusals into `InputError` naming the file."""
    try:
        yield
    except OSError as error:
        found = reason_of(error)
        raise InputError(
            f"{path}: expected a file that can be read, found {found}", hint="check the path"
        ) from error


def _fetch(url: str) -> bytes:
    """A page of metrics; where there is none, the reason in the error."""
    expected = "a server that answers with its metrics"
    fix = "check that it runs, and its address: http://HOST:PORT/metrics"
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
        found = f"status {error.code} {error.reason}"
        if error.code == 404:
            fix = "name its page of metrics, http://HOST:PORT/metrics; SGLang has one only with "
            fix += "--enable-metrics"
    except TimeoutError:
        found = f"no whole answer within {TIMEOUT_S:.0f} to {DEADLINE_S:.0f} s"
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        found = str(reason) or type(error).__name__
        if isinstance(reason, OSError) and reason.strerror:
            found = reason_of(reason)
    else:
        page = b"".join(parts)
        expected, fix = "metrics in the text format of Prometheus", "name the page /metrics"
        if size > MAX_PAGE_BYTES:
            found = f"more than {MAX_PAGE_BYTES >> 20} MiB"
        elif kind in ("text/html", "application/json") or page.lstrip()[:1] in (b"<", b"{", b"["):
            found = f"{kind}, which begins {page.lstrip()[:40]!r}"
        else:
            return page
    raise InputError(f"{url}: expected {expected}, found {found}", hint=fix)
