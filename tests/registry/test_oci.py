"""Content in a real OCI registry, and what a registry that lies is told."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specctl.artifacts.manifest import digest_of
from specctl.errors import ArtifactError, StoreError, UsageError
from specctl.registry import oci_client
from specctl.registry.content import listed_files
from specctl.registry.oci import OciContent
from specctl.registry.oci_client import Blob
from tests.registry.oci_content import content, digest, files, ignore, statement

__all__ = ["content", "digest", "files"]  # fixtures


def test_what_is_published_is_fetched(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    assert list(content.held()) == []
    for _ in range(2):
        content.publish(digest, files, ignore)
    assert content.fetch(digest, ignore) == files
    assert list(content.held()) == [digest]
    listed = {entry.digest for entry in listed_files(files["config.json"]).values()}
    assert content.parts(digest) == listed | {digest}


def test_other_tools_see_names_types_and_our_identity(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    content.publish(digest, files, ignore)
    place = content.url.removeprefix("oci://")
    host, _, repository = place.partition("/")
    url = f"http://{host}/v2/{repository}/manifests/{digest.replace(':', '-')}"
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=accept)) as answer:
        manifest = json.load(answer)
    assert manifest["config"]["digest"] == digest
    titles = {
        layer["annotations"]["org.opencontainers.image.title"] for layer in manifest["layers"]
    }
    assert titles == files.keys() - {"config.json"}


def test_signatures_are_kept_beside(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    content.publish(digest, files, ignore)
    assert content.signatures(digest) == []
    one, two = (statement(digest, name) for name in ("one", "two"))
    for envelope in (one, two, one):
        content.add_signature(digest, envelope)
    assert sorted(content.signatures(digest)) == sorted([one, two])
    assert list(content.held()) == [digest]


def test_what_was_removed_is_missing(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    content.publish(digest, files, ignore)
    content.add_signature(digest, statement(digest, "one"))
    for _ in range(2):
        content.remove(digest)
    assert list(content.held()) == []
    with pytest.raises(ArtifactError, match="E_MISSING"):
        content.fetch(digest, ignore)
    content.publish(digest, files, ignore)
    assert content.signatures(digest) == []


def test_files_that_the_manifest_does_not_list_are_not_published(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    with pytest.raises(ArtifactError, match="E_EXTRA"):
        content.publish(digest, {**files, "report.json": b"{}"}, ignore)
    with pytest.raises(ArtifactError, match="E_DIGEST"):
        content.publish(digest, {**files, "README.md": b"other"}, ignore)
    assert list(content.held()) == []


def test_a_registry_that_sends_other_bytes_is_refused(
    content: OciContent, files: dict[str, bytes], digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content.publish(digest, files, ignore)
    real = content._client.blob
    monkeypatch.setattr(content._client, "blob", lambda *given: real(*given)[:-1] + b"\0")
    with pytest.raises(ArtifactError, match="E_DIGEST"):
        content.fetch(digest, ignore)


def test_an_endless_answer_is_cut(content: OciContent, digest: str) -> None:
    big = Blob(b"\0" * (2 << 20), "application/octet-stream")
    content._client.upload(big)
    with pytest.raises(ArtifactError, match="E_SIZE"):
        content._client.blob(digest_of(big.data), 1 << 20)


def test_what_is_no_envelope_is_passed_over_and_told(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    """No layer, junk, a statement of another manifest; and one more behind them all."""
    content.publish(digest, files, ignore)
    config = content._client.upload(Blob(b"{}", "application/json"))
    other = statement("sha256:" + "0" * 64, "one")
    for number, junk in enumerate([None, b"junk", other]):
        layers = [content._client.upload(Blob(junk, "text/plain"))] if junk else []
        tag = f"{digest.replace(':', '-')}.sig-{number}"
        content._client.put_manifest(tag, "application/json", config, layers)
    content.add_signature(digest, statement(digest, "one"))
    assert content.signatures(digest) == [statement(digest, "one")]
    unfit = {place[-1]: error for place, error in content.unfit_signatures()}
    assert unfit.keys() == {"0", "1", "2"}
    assert all("E_SIG" in str(error) for error in unfit.values())


@pytest.mark.parametrize(
    "manifest",
    [b'{"layers":["x"]}', b'{"layers":{}}', b'{"layers":[{"digest":1}]}', b"[]", b"<", b"[" * 9999],
)
def test_manifests_of_other_forms_are_passed_over(
    content: OciContent, digest: str, manifest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = f"{digest.replace(':', '-')}.sig-0"
    monkeypatch.setattr(content._client, "tags", lambda: [tag])
    monkeypatch.setattr(content._client, "_get", lambda *_: None)
    monkeypatch.setattr(oci_client, "_body", lambda *_: manifest)
    assert content.signatures(digest) == []
    assert [place for place, _ in content.unfit_signatures()] == [tag]


class Listing(BaseHTTPRequestHandler):
    """Tags without end: every page says that there is a next one."""

    seconds = 0.0
    tags: object = ("a", "b")
    link = "</v2/x/y/tags/list?last={}>"
    num_pages = 0

    def do_GET(self) -> None:
        type(self).num_pages += 1
        body = json.dumps({"name": "x/y", "tags": self.tags}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Link", f'{self.link.format(self.num_pages)}; rel="next"')
        self.end_headers()
        for at in range(len(body)) if self.seconds else ():
            time.sleep(self.seconds)
            with suppress(OSError):
                self.wfile.write(body[at : at + 1])
        if not self.seconds:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def lister() -> Iterator[tuple[type[Listing], OciContent]]:
    """An OCI registry of one's own, and its content; its class says how it answers."""
    kind = type("Own", (Listing,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kind, OciContent(f"oci://127.0.0.1:{server.server_port}/x/y")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("cap", "value"), [("MAX_TAG_PAGES", 5), ("MAX_TAGS_BYTES", 99), ("TAGS_S", 0.2)]
)
def test_a_listing_without_end_is_cut(
    lister: tuple[type[Listing], OciContent],
    cap: str,
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oci_client, cap, value)
    with pytest.raises(ArtifactError, match="E_SIZE"):
        lister[1].signatures("sha256:" + "0" * 64)
    assert cap != "MAX_TAG_PAGES" or lister[0].num_pages == value


def test_a_listing_that_drips_is_cut(
    lister: tuple[type[Listing], OciContent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lister[0], "seconds", 0.1, raising=False)
    monkeypatch.setattr(oci_client, "TAGS_S", 0.3)
    began = time.monotonic()
    with pytest.raises(ArtifactError, match="E_SIZE"):
        list(lister[1].held())
    assert time.monotonic() - began < 2


def test_a_listing_goes_on_at_its_own_host_only(
    lister: tuple[type[Listing], OciContent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that answers: asking it would succeed, and tell it who we are."""
    elsewhere = type("Elsewhere", (Listing,), {"tags": ()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    link = f"<http://127.0.0.1:{server.server_port}/v2/x/y/tags/list>"
    monkeypatch.setattr(lister[0], "link", link)
    with pytest.raises(StoreError, match="another host"):
        list(lister[1].held())
    assert elsewhere.num_pages == 0
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("tags", [["a", 1], "tags", {"a": 1}])
def test_tags_of_another_type_are_refused(
    lister: tuple[type[Listing], OciContent], tags: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lister[0], "tags", tags)
    with pytest.raises(ArtifactError, match="E_MANIFEST"):
        list(lister[1].held())


@pytest.mark.usefixtures("no_waits")
def test_a_host_that_is_down_is_told() -> None:
    with pytest.raises(StoreError, match="the store does not answer"):
        list(OciContent("oci://127.0.0.1:9/team/x").held())


@pytest.mark.parametrize("url", ["oci://host", "oci:///x", "oci://"])
def test_urls_without_a_repository_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        OciContent(url)
