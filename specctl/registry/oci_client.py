"""The few calls of an OCI registry that we make, by oras.

Each may be made again, as everything goes by digest, so each is tried again where that may help.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urljoin, urlsplit

from specctl.errors import ArtifactError, UsageError
from specctl.stores.creating import retried
from specctl.stores.interface import TransientError

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
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers that say: later."""
P = ParamSpec("P")
T = TypeVar("T")


class OciMissingError(Exception):
    """No such tag or blob."""


class OciBusyError(Exception):
    """An answer that may be another one the next time."""


@contextmanager
def _passing_errors(place: str) -> Iterator[None]:
    import requests
    from urllib3.exceptions import HTTPError

    cut = requests.exceptions.ChunkedEncodingError
    try:
        yield
    except (requests.ConnectionError, requests.Timeout, cut, HTTPError, OciBusyError) as error:
        raise TransientError(
            place,
            expected="an answer of the OCI registry",
            found=f"the store does not answer: {str(error) or type(error).__name__}",
            fix="check the host and the network, then try again",
        ) from error


def _patient(
    method: Callable[Concatenate[OciClient, P], T],
) -> Callable[Concatenate[OciClient, P], T]:
    """A call that is made again where its failure may pass (`TransientError` in the end)."""

    @wraps(method)
    def call(self: OciClient, /, *given: P.args, **options: P.kwargs) -> T:
        def once() -> T:
            with _passing_errors(f"oci://{self.repository}"):
                return method(self, *given, **options)

        return retried(once)

    return call


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

    @_patient
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

    @_patient
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
        return parse_manifest(self.manifest_bytes(tag), tag)

    @_patient
    def manifest_bytes(self, tag: str) -> bytes:
        """The same as it is stored; the registry's digest of it is the one of these bytes."""
        response = self._get(self._container(tag).manifest_url(), {"Accept": _ACCEPT})
        return _body(response, tag, MAX_MANIFEST_BYTES)

    @_patient
    def blob(self, digest: str, max_bytes: int) -> bytes:
        """Bytes under a digest, not recomputed here.

        Raises:
            ArtifactError: E_SIZE.
        """
        url = self._container().get_blob_url(digest)
        return _body(self._get(url, {}), digest, max_bytes)

    @_patient
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

    @_patient
    def delete_manifest(self, digest: str) -> None:
        """Deletes an OCI manifest by its own digest, with all its tags; one that is gone is fine.

        Never by a tag: it may stand for another one by now.
        """
        url = self._url(self._container().manifest_url(digest))
        response = self._oras.do_request(url, "DELETE")
        if response.status_code != 404:
            self._check(response)

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


def parse_manifest(data: bytes, tag: str) -> dict[str, Any]:
    """The OCI manifest in these bytes, not believed.

    Raises:
        ArtifactError: E_MANIFEST.
    """
    return _json_object(data, f"OCI manifest of {tag}")


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
        # Its own retries sleep for a minute on a host that is down.
        def do_request(self, *given: Any, **options: Any) -> Any:
            response = Registry.do_request.__wrapped__(self, *given, **options)
            if response.status_code in _PASSING:
                response.close()
                raise OciBusyError(f"HTTP {response.status_code} {response.reason}")
            return response

    class Patient(requests.adapters.HTTPAdapter):
        def send(self, *given: Any, **options: Any) -> Any:
            return super().send(*given, **{**options, "timeout": TIMEOUT_S})

    is_loopback = host.rpartition(":")[0] in _LOOPBACK or host in _LOOPBACK
    client = Client(hostname=host, insecure=is_loopback)
    for scheme in ("http://", "https://"):
        client.session.mount(scheme, Patient())
    return client
