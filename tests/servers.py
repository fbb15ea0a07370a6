"""Real servers for tests, on loopback: an S3 (moto) and an OCI registry (Debian's docker-registry).

Each runs in a process of its own, so that a test's own processes can share it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}
SERIAL_MOTO = Path(__file__).with_name("serial_moto.py")
REGISTRY_BINARY = Path(sys.prefix) / "bin" / "docker-registry"
"""Where the Makefile puts it; one on PATH serves as well."""
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
    command = [sys.executable, str(SERIAL_MOTO), "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, folder / "moto.log", f"http://127.0.0.1:{port}/moto-api/") as url:
        yield url.removesuffix("/moto-api/")


def make_bucket(endpoint: str, bucket: str) -> None:
    """Creates a bucket; moto asks for no signature."""
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    urllib.request.urlopen(request).close()


def has_docker_registry() -> bool:
    return REGISTRY_BINARY.exists() or shutil.which("docker-registry") is not None


@contextmanager
def oci_server(folder: Path) -> Iterator[str]:
    """A docker-registry that keeps its data below `folder`; `host:port`."""
    binary = str(REGISTRY_BINARY) if REGISTRY_BINARY.exists() else shutil.which("docker-registry")
    assert binary, "docker-registry is missing; `make .venv/.done` installs it"
    port = free_port()
    config = folder / "registry.yml"
    config.write_text(
        "version: 0.1\n"
        "log: {level: warn}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'registry'}}}, "
        "delete: {enabled: true}}\n"
        f"http: {{addr: 127.0.0.1:{port}}}\n"
    )
    command = [binary, "serve", str(config)]
    with _running(command, folder / "registry.log", f"http://127.0.0.1:{port}/v2/") as url:
        yield url.removeprefix("http://").removesuffix("/v2/")


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
