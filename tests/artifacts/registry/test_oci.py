"""Content in a real OCI registry, and what a registry that lies is told."""

from __future__ import annotations

import json
import urllib.request
import uuid
from pathlib import Path

import pytest

from specctl.artifacts.manifest import digest_of
from specctl.artifacts.registry.content import listed_files
from specctl.artifacts.registry.oci import OciContent
from specctl.artifacts.registry.oci_client import Blob
from specctl.errors import ArtifactError, StoreError, UsageError

FOLDER = Path(__file__).parents[2] / "golden" / "artifacts-v1" / "hetero"


@pytest.fixture
def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in FOLDER.iterdir()}


@pytest.fixture
def digest(files: dict[str, bytes]) -> str:
    return digest_of(files["config.json"])


@pytest.fixture
def content(oci_host: str) -> OciContent:
    return OciContent(f"oci://{oci_host}/team/{uuid.uuid4().hex}")


def ignore(size_bytes: int) -> None:
    assert size_bytes > 0


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
    for envelope in (b"one", b"two", b"one"):
        content.add_signature(digest, envelope)
    assert sorted(content.signatures(digest)) == [b"one", b"two"]
    assert list(content.held()) == [digest]


def test_what_was_removed_is_missing(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    content.publish(digest, files, ignore)
    content.add_signature(digest, b"one")
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


def test_a_signature_tag_without_an_envelope_is_refused(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    content.publish(digest, files, ignore)
    config = content._client.upload(Blob(b"{}", "application/json"))
    tag = f"{digest.replace(':', '-')}.sig-0"
    content._client.put_manifest(tag, "application/json", config, [])
    with pytest.raises(ArtifactError, match="E_SIG"):
        content.signatures(digest)


def test_a_host_that_is_down_is_told_at_once() -> None:
    with pytest.raises(StoreError, match="docker login"):
        list(OciContent("oci://127.0.0.1:9/team/x").held())


@pytest.mark.parametrize("url", ["oci://host", "oci:///x", "oci://"])
def test_urls_without_a_repository_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        OciContent(url)
