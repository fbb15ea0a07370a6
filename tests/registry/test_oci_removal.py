"""What a removal may take from a real OCI registry, where a tag says nothing sure."""

from __future__ import annotations

import urllib.request

import pytest

from specctl.registry.oci import OciContent
from tests.registry.oci_content import content, digest, files, ignore, statement

__all__ = ["content", "digest", "files"]  # fixtures


def tag_of(digest: str) -> str:
    return digest.replace(":", "-")


def tag_again(content: OciContent, digest: str, tag: str) -> None:
    """What whoever may push can do: one more tag for the OCI manifest of an artifact."""
    host, _, repository = content.url.removeprefix("oci://").partition("/")
    headers = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}
    request = urllib.request.Request(
        f"http://{host}/v2/{repository}/manifests/{tag}",
        content._client.manifest_bytes(tag_of(digest)),
        headers,
        method="PUT",
    )
    urllib.request.urlopen(request).close()


def test_a_tag_deletes_nothing_that_it_is_not(
    content: OciContent, files: dict[str, bytes], digest: str
) -> None:
    """Another artifact's OCI manifest, tagged as something that nobody needs."""
    other = "sha256:" + "0" * 64
    content.publish(digest, files, ignore)
    envelope = statement(digest, "one")
    content.add_signature(digest, envelope)
    tag_again(content, digest, tag_of(other))
    tag_again(content, digest, f"{tag_of(other)}.sig-1")
    assert list(content.held()) == [digest]
    assert list(content.foreign()) == [f"{content.url}:{tag_of(other)}"]
    assert [place for place, _ in content.unfit_signatures()] == [f"{tag_of(other)}.sig-1"]
    content.remove(other)
    assert content.fetch(digest, ignore) == files
    assert content.signatures(digest) == [envelope]
    content.remove(digest)
    assert content._client.tags() == []


def test_a_removal_that_was_cut_off_is_done_again(
    content: OciContent, files: dict[str, bytes], digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content.publish(digest, files, ignore)
    content.add_signature(digest, statement(digest, "one"))
    real = content._client.delete_manifest

    def cut(found: str) -> None:
        real(found)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(content._client, "delete_manifest", cut)
        with pytest.raises(KeyboardInterrupt):
            content.remove(digest)
    assert list(content.held()) == [digest]
    content.remove(digest)
    assert content._client.tags() == []
