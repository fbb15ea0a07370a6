"""The few calls of an OCI registry that we make, by oras."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from specctl.errors import ArtifactError, UsageError

TIMEOUT_S = (5.0, 60.0)
"""To connect, and between two pieces of an answer. oras itself would wait forever."""
BODY_S = 600.0
"""For one answer, from its head to its end."""
MAX_MANIFEST_BYTES = 1 << 20
MAX_TAGS_BYTES, MAX_TAG_PAGES, TAGS_S = 64 << 20, 2000, 120.0
"""Of one listing of tags, all pages together: half a million tags."""
_TAGS = "listing of tags"
_ACCEPT = "application/vnd.oci.image.manifest.v1+json"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class OciMissingError(Exception):
    """No such tag or blob."""


@dataclass(frozen=True)
class Blob:
    """Bytes to upload, with the media type and annotations of their descriptor."""

    data: bytes
    media_type: str
    annotations: dict[str, str] = field(default_factory=dict)


class OciClient:
    """One repository of one registry.

    Raises:
        UsageError: oras is not installed.
    """

    def __init__(self, host: str, repository: str) -> None:
        self.repository = f"{host}/{repository}"
        self._oras = _client(host)
        self._oras.auth.load_configs(self._container())

    def upload(self, blob: Blob) -> dict[str, Any]:
        """Uploads bytes unless they are there; returns their descriptor."""
        import oras.oci

        with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
            path = Path(folder) / "blob"
            path.write_bytes(blob.data)
            layer: dict[str, Any] = oras.oci.NewLayer(str(path), media_type=blob.media_type)
            layer["annotations"] = blob.annotations
            self._check(self._oras.upload_blob(str(path), self._container(), layer))
        return layer

    def put_manifest(
        self, tag: str, artifact_type: str, config: dict[str, Any], layers: list[dict[str, Any]]
    ) -> None:
        """Puts an OCI manifest; equal ones are the same."""
        manifest = {
            "schemaVersion": 2,
            "mediaType": _ACCEPT,
            "artifactType": artifact_type,
            "config": config,
            "layers": layers,
            "annotations": {},
        }
        self._check(self._oras.upload_manifest(manifest, self._container(tag)))

    def get_manifest(self, tag: str) -> dict[str, Any]:
        """The OCI manifest of a tag, not believed: the caller checks what it takes from it."""
        response = self._get(self._container(tag).manifest_url(), {"Accept": _ACCEPT})
        return _json_object(_body(response, tag, MAX_MANIFEST_BYTES), f"OCI manifest of {tag}")

    def blob(self, digest: str, max_bytes: int) -> bytes:
        """Bytes under a digest, not recomputed here.

        Raises:
            ArtifactError: E_SIZE.
        """
        url = self._container().get_blob_url(digest)
        return _body(self._get(url, {}), digest, max_bytes)

    def tags(self) -> list[str]:
        """All tags of the repository; none where it does not exist yet.

        Raises:
            ArtifactError: E_SIZE for a listing of more pages, bytes or time than the caps.
        """
        found: list[str] = []
        url: str | None = self._url(self._container().tags_url())
        latest_s, left = time.monotonic() + TAGS_S, MAX_TAGS_BYTES
        for _ in range(MAX_TAG_PAGES):
            response = self._page(url, latest_s)
            if response is None:
                return found
            data = _body(response, _TAGS, left, latest_s)
            tags, left = _tags(data), left - len(data)
            found += tags
            url = self._next_page(response)
            if url is None or not tags:
                return found
        raise _too_much(_TAGS, f"at most {MAX_TAG_PAGES} pages")

    def _page(self, url: str | None, latest_s: float) -> Any:
        if time.monotonic() > latest_s:
            raise _too_much(_TAGS, f"an end within {TAGS_S:.0f} s")
        response = self._oras.do_request(url, "GET", stream=True)
        return None if response.status_code == 404 else self._check(response)

    def _next_page(self, response: Any) -> str | None:
        """Where the listing goes on: at the same host, which alone gets our credentials."""
        link = response.links.get("next", {}).get("url")
        if not link:
            return None
        url: str = urljoin(self._url(self._container().tags_url()), link)
        if urlsplit(url).netloc != urlsplit(self._url(self.repository)).netloc:
            raise ValueError(f"the listing of tags goes on at another host, {urlsplit(url).netloc}")
        return url

    def delete_manifest(self, tag: str) -> None:
        """Deletes the OCI manifest of a tag; one that is gone is fine."""
        self._oras.delete_tag(self._container(), tag)

    def _get(self, url: str, headers: dict[str, str]) -> Any:
        response = self._oras.do_request(self._url(url), "GET", headers=headers, stream=True)
        if response.status_code == 404:
            raise OciMissingError
        return self._check(response)

    def _check(self, response: Any) -> Any:
        self._oras._check_200_response(response)
        return response

    def _container(self, tag: str = "latest") -> Any:
        return self._oras.get_container(f"{self.repository}:{tag}")

    def _url(self, path: str) -> str:
        return f"{self._oras.prefix}://{path}"


def _body(response: Any, what: str, max_bytes: int, latest_s: float | None = None) -> bytes:
    """An answer up to its cap: what was declared is not what is sent.

    Args:
        latest_s: by the monotonic clock, when it must have ended; None is `BODY_S` from now.
    """
    latest_s = time.monotonic() + BODY_S if latest_s is None else latest_s
    data = bytearray()
    # What has arrived, not a full buffer: one byte a minute must not hold the deadline up.
    while piece := response.raw.read1(1 << 20, decode_content=True):
        data += piece
        expected = None
        if len(data) > max_bytes:
            expected = f"at most {max_bytes} bytes"
        elif time.monotonic() > latest_s:
            expected = "an end in time"
        if expected is not None:
            response.close()
            raise _too_much(what, expected)
    return bytes(data)


def _too_much(what: str, expected: str) -> ArtifactError:
    return ArtifactError(
        "E_SIZE", what, expected=expected, found="more", fix="do not trust this registry"
    )


def _json_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ArtifactError("E_MANIFEST", what, expected="a JSON object", found="other bytes")
    return found


def _tags(page: bytes) -> list[str]:
    tags = _json_object(page, _TAGS).get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ArtifactError("E_MANIFEST", _TAGS, expected="a list of texts", found="another value")
    return tags


def _client(host: str) -> Any:
    try:
        import requests
        from oras.client import OrasClient
        from oras.provider import Registry
    except ImportError as error:
        raise UsageError(
            f"registry at {host}",
            expected="oras",
            found="no such package",
            fix="pip install 'specctl[oci]'",
        ) from error

    class Client(OrasClient):  # type: ignore[misc]
        # Its own retries sleep for a minute on a host that is down. What is put here goes by
        # digest, so the user may simply try again.
        do_request = Registry.do_request.__wrapped__

    class Patient(requests.adapters.HTTPAdapter):
        def send(self, *given: Any, **options: Any) -> Any:
            return super().send(*given, **{**options, "timeout": TIMEOUT_S})

    is_loopback = host.rpartition(":")[0] in _LOOPBACK or host in _LOOPBACK
    client = Client(hostname=host, insecure=is_loopback)
    for scheme in ("http://", "https://"):
        client.session.mount(scheme, Patient())
    return client
