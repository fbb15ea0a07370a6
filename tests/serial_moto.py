"""moto's S3 with its conditional put made atomic: one request after the other.

moto looks whether a key is there and then stores it, in threads: of two puts with
`If-None-Match: *` both may succeed, and one of them is lost. S3 promises that this cannot happen.
"""

from __future__ import annotations

import io
import threading
from typing import Any

from moto import server

LOCK = threading.Lock()


class Serial(server.DomainDispatcherApplication):
    """The application of moto's server, one request at a time."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        environ["wsgi.input"] = _read_whole(environ)
        with LOCK:
            return super().__call__(environ, start_response)


def _read_whole(environ: dict[str, Any]) -> Any:
    """The body, read before the lock is taken: a slow sender must not hold it."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    return io.BytesIO(environ["wsgi.input"].read(length)) if length else environ["wsgi.input"]


if __name__ == "__main__":
    server.DomainDispatcherApplication = Serial  # type: ignore[misc]
    server.main()
