"""A real S3 server (moto) for tests, on loopback, in a process that a test's processes share.

Run as a script it is that server, with the conditional put of moto made atomic: one request after
the other. moto looks whether a key is there and then stores it, in threads: of two puts with
`If-None-Match: *` both may succeed, and one of them is lost. S3 promises that this cannot happen.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}
START_S = 30.0


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """A moto server; its endpoint."""
    port = free_port()
    command = [sys.executable, __file__, "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, folder / "moto.log", f"http://127.0.0.1:{port}/moto-api/") as url:
        yield url.removesuffix("/moto-api/")


def make_bucket(endpoint: str, bucket: str) -> None:
    """Creates a bucket; moto asks for no signature."""
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    urllib.request.urlopen(request).close()


@contextmanager
def _running(command: list[str], log: Path, url: str) -> Iterator[str]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **S3_ENVIRONMENT}
        )
        try:
            _wait_until_up(process, log, url)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=10)


def _wait_until_up(process: subprocess.Popen[bytes], log: Path, url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=1).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"no answer from {url}: {log.read_text()}")


def serve() -> None:
    from moto import server

    lock = threading.Lock()

    class Serial(server.DomainDispatcherApplication):
        def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
            # The body is read before the lock is taken: a slow sender must not hold it.
            if length := int(environ.get("CONTENT_LENGTH") or 0):
                environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
            with lock:
                return super().__call__(environ, start_response)

    server.DomainDispatcherApplication = Serial  # type: ignore[misc]
    server.main()


if __name__ == "__main__":
    serve()
