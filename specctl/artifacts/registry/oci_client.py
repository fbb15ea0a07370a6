"""The few calls of an OCI registry that we make, by oras."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.errors import ArtifactError, UsageError

TIMEOUT_S = (5.0, 60.0)
"""To connect, and between two pieces of an answer. oras itself would wait forever."""
MAX_MANIFEST_BYTES = 1 << 20
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
        found = json.loads(_body(response, tag, MAX_MANIFEST_BYTES))
        if not isinstance(found, dict):
            raise ValueError(f"the manifest of {tag} is no JSON object")
        return found

    def blob(self, digest: str, max_bytes: int) -> bytes:
        """Bytes under a digest, not recomputed here.

        Raises:
            ArtifactError: E_SIZE.
        """
        url = self._container().get_blob_url(digest)
        return _body(self._get(url, {}), digest, max_bytes)

    def tags(self) -> list[str]:
        """All tags of the repository; none where it does not exist yet."""
        response = self._oras.do_request(self._url(self._container().tags_url(N=1)), "GET")
        if response.status_code == 404:
            return []
        self._check(response)
        found: list[str] = self._oras.get_tags(self._container())
        return found

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


def _body(response: Any, what: str, max_bytes: int) -> bytes:
    """An answer up to its cap: what was declared is not what is sent."""
    data = bytearray()
    for piece in response.iter_content(1 << 20):
        data += piece
        if len(data) > max_bytes:
            response.close()
            raise ArtifactError("E_SIZE", what, expected=f"at most {max_bytes} bytes", found="more")
    return bytes(data)


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
