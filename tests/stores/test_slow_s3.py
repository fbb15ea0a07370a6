"""A real S3 behind a wire that is slow or cut: what was stored is known, nothing hangs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

import pytest

from specctl.stores import (
    KeyTakenError,
    ObjectStore,
    TransientError,
    UnknownOutcomeError,
    create,
    open_store,
    read,
    s3,
)

Fault = Literal["pass", "answer lost", "cut"]
TIMEOUT_S = 0.4
KEY = "log/a/1"


class Wire:
    """A proxy that takes one fault for each connection, and then none.

    answer lost: the request arrives, and no answer comes. cut: the answer ends after some bytes.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._to = (str(parts.hostname), int(parts.port or 80))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.faults: list[Fault] = []
        self.num_requests = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            fault = self.faults.pop(0) if self.faults else "pass"
            threading.Thread(target=self._relay, args=(client, fault), daemon=True).start()

    def _relay(self, client: socket.socket, fault: Fault) -> None:
        self.num_requests += 1
        with client:
            request = self._request(client)
            answer = self._ask(request)
            if fault == "answer lost":
                time.sleep(2 * TIMEOUT_S)
            elif fault == "cut":
                client.sendall(answer[:20])
            else:
                client.sendall(answer)

    def _request(self, client: socket.socket) -> bytes:
        """Head and body, told to be the last of its connection."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += client.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        fields = [line.partition(b":") for line in lines[1:]]
        size = next((int(value) for name, _, value in fields if name == b"content-length"), 0)
        while len(body) < size:
            body += client.recv(65536)
        return b"\r\n".join([*lines, b"connection: close", b"", b""]) + body

    def _ask(self, request: bytes) -> bytes:
        with socket.create_connection(self._to) as server:
            server.sendall(request)
            return b"".join(iter(lambda: server.recv(65536), b""))


@pytest.fixture
def wire(s3_endpoint: str) -> Iterator[Wire]:
    made = Wire(s3_endpoint)
    yield made
    made.close()


@pytest.fixture
def direct(s3_url: str) -> ObjectStore:
    return open_store(s3_url)


@pytest.fixture
def store(
    s3_url: str, direct: ObjectStore, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> ObjectStore:
    assert direct.url == s3_url, "it was connected before the wire was put in between"
    monkeypatch.setattr(s3, "TIMEOUT", timedelta(seconds=TIMEOUT_S))
    monkeypatch.setenv("AWS_ENDPOINT_URL", wire.url)
    return open_store(s3_url)


@pytest.mark.parametrize("fault", ["answer lost", "cut"])
def test_one_try_ends_unknown_and_what_goes_on_knows_how_it_ended(
    store: ObjectStore, direct: ObjectStore, wire: Wire, fault: Fault
) -> None:
    wire.faults = [fault]
    began = time.monotonic()
    with pytest.raises(UnknownOutcomeError):
        store.put_new("log/b/1", b"mine")
    assert time.monotonic() - began < 10 * TIMEOUT_S
    assert wire.num_requests == 1, "obstore repeated a put of its own accord"
    wire.faults = [fault, fault]
    create(store, KEY, b"mine")
    assert direct.get(KEY, max_bytes=9) == b"mine"
    with pytest.raises(KeyTakenError):
        create(store, KEY, b"another's")
    wire.faults = [fault]
    with pytest.raises(TransientError):
        store.get(KEY, max_bytes=9)
    wire.faults = [fault]
    assert read(store, KEY, max_bytes=9) == b"mine"
    wire.faults = [fault]
    assert [one.key for one in store.objects("log/a")] == [KEY]
