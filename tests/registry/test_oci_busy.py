"""An OCI registry that is busy for a moment: every call is made again, and nothing is lost."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specctl.artifacts.manifest import digest_of
from specctl.registry.oci import OciContent
from tests.registry.oci_content import FOLDER, ignore, statement

VERBS = ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE")


class Busy(BaseHTTPRequestHandler):
    """In front of an OCI registry: one request, by its number, is told to come later."""

    upstream, num_requests, busy_at = "", 0, -1

    def answer(self) -> None:
        kind = type(self)
        kind.num_requests += 1
        size_bytes = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size_bytes) if size_bytes else None
        if kind.num_requests == kind.busy_at:
            self.reply(503, {}, b"later")
            return
        request = urllib.request.Request(
            kind.upstream + self.path, body, dict(self.headers), method=self.command
        )
        try:
            with urllib.request.urlopen(request) as found:
                self.reply(found.status, dict(found.headers), found.read())
        except urllib.error.HTTPError as error:
            self.reply(error.code, dict(error.headers), error.read())

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "date", "server", "connection"):
                self.send_header(name, value)
        size = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", size or str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.usefixtures("no_waits")
def test_one_answer_that_says_later_stops_nothing(
    oci_host: str,
) -> None:
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    digest = digest_of(files["config.json"])
    verbs = {f"do_{verb}": Busy.answer for verb in VERBS}
    kind = type("OneBusy", (Busy,), {"upstream": f"http://{oci_host}", **verbs})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"

    def use(content: OciContent) -> None:
        content.publish(digest, files, ignore)
        content.add_signature(digest, statement(digest, "one"))
        assert content.fetch(digest, ignore) == files
        assert content.signatures(digest) == [statement(digest, "one")]
        content.remove(digest)
        assert list(content.held()) == []

    use(OciContent(f"oci://{host}/team/{uuid.uuid4().hex}"))
    total = kind.num_requests
    assert total > 15
    for number in range(1, total + 1):
        kind.num_requests, kind.busy_at = 0, number
        use(OciContent(f"oci://{host}/team/{uuid.uuid4().hex}"))
        assert kind.num_requests > number
    server.shutdown()
    server.server_close()
