"""Content in an OCI registry (docker-registry, Harbor, zot, GHCR ...), through oras.

Everything goes by digest. An artifact is an OCI manifest whose config is our `config.json` and
whose layers are its files, tagged `sha256-<hex>` after our own identity; an envelope is one more,
tagged `sha256-<hex>.sig-<hex>`, as not every registry has the referrers API. The OCI manifests keep
the blobs from the registry's own garbage collection and make them visible to its tools. What is
read is found by our digests and recomputed: a tag that was moved can hide an artifact, never
replace it. Nor is anything deleted for its tag alone: an OCI manifest goes if it is what it is
tagged as, and by its own digest. Tags have no compare-and-swap, so aliases live in our own log, in
another store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from specctl.artifacts.files import MAX_BYTES
from specctl.artifacts.manifest import MANIFEST, digest_of
from specctl.artifacts.signing import MAX_ENVELOPE_BYTES
from specctl.errors import ArtifactError, SpecctlError, StoreError, UsageError
from specctl.registry.content import (
    MAX_SIGNATURE_BYTES,
    MAX_SIGNATURES,
    OnBytes,
    check_envelope_of,
    check_files,
    checked,
    listed_files,
    missing,
)
from specctl.registry.layout import hex_of
from specctl.registry.oci_client import Blob, OciClient, OciMissingError, parse_manifest

ARTIFACT_TYPE = "application/vnd.specctl.policy.v1"
MANIFEST_TYPE = "application/vnd.specctl.policy.manifest.v1+json"
FILE_TYPE = "application/vnd.specctl.policy.file.v1"
ENVELOPE_TYPE = "application/vnd.dsse.envelope.v1+json"
TITLE = "org.opencontainers.image.title"
_ENVELOPE_TAG = re.compile(r"sha256-([0-9a-f]{64})\.sig-")
_ARTIFACT_TAG = re.compile(r"sha256-([0-9a-f]{64})")
EMPTY = Blob(b"{}", "application/vnd.oci.empty.v1+json")


class OciContent:
    """See `Content`.

    Args:
        url: `oci://host[:port]/repository`; plain HTTP on loopback, HTTPS elsewhere. Credentials
            come from Docker's configuration (`docker login`, `oras login`).

    Raises:
        UsageError: oras is not installed, or the URL names no repository.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        repository = parts.path.strip("/")
        if not parts.netloc or not repository:
            raise UsageError(
                f"registry {url!r}",
                expected="oci://host/repository",
                found="no host or no repository",
                fix="name both",
            )
        self.url = url.rstrip("/")
        self._client = OciClient(parts.netloc, repository)

    def publish(self, digest: str, files: Mapping[str, bytes], on_bytes: OnBytes) -> None:
        """See `Content`."""
        check_files(digest, files)
        with _registry_errors(self.url, digest):
            layers = []
            for name, data in sorted(files.items()):
                if name != MANIFEST:
                    layers.append(self._client.upload(Blob(data, FILE_TYPE, {TITLE: name})))
                    on_bytes(len(data))
            config = self._client.upload(Blob(files[MANIFEST], MANIFEST_TYPE))
            self._client.put_manifest(_tag(digest), ARTIFACT_TYPE, config, layers)
            on_bytes(len(files[MANIFEST]))

    def manifest(self, digest: str) -> bytes:
        """See `Content`."""
        with _registry_errors(self.url, digest):
            self._client.get_manifest(_tag(digest))  # what was removed is not there
            return self._blob(digest, MAX_BYTES[MANIFEST])

    def fetch(self, digest: str, on_bytes: OnBytes) -> dict[str, bytes]:
        """See `Content`."""
        files = {MANIFEST: self.manifest(digest)}
        for name, entry in listed_files(files[MANIFEST]).items():
            with _registry_errors(self.url, digest):
                files[name] = self._blob(entry.digest, entry.size_bytes)
            on_bytes(entry.size_bytes)
        return files

    def signatures(self, digest: str) -> list[bytes]:
        """See `Content`. `MAX_SIGNATURES` and `MAX_SIGNATURE_BYTES` bound what is read."""
        prefix, left = f"{_tag(digest)}.sig-", MAX_SIGNATURE_BYTES
        found: list[bytes] = []
        with _registry_errors(self.url, digest):
            tags = sorted(tag for tag in self._client.tags() if tag.startswith(prefix))
            for tag in tags[:MAX_SIGNATURES]:
                with suppress(ArtifactError, OciMissingError):
                    found.append(self._envelope(tag, digest, min(left, MAX_ENVELOPE_BYTES)))
                    left -= len(found[-1])
        return found

    def unfit_signatures(self) -> Iterator[tuple[str, SpecctlError]]:
        """See `Content`."""
        with _registry_errors(self.url, "tags"):
            tags = sorted(self._client.tags())
        for tag in tags:
            match = _ENVELOPE_TAG.match(tag)
            try:
                if match:
                    with _registry_errors(self.url, tag):
                        self._envelope(tag, f"sha256:{match[1]}", MAX_ENVELOPE_BYTES)
            except SpecctlError as error:
                yield tag, error

    def add_signature(self, digest: str, envelope: bytes) -> None:
        """See `Content`."""
        tag = f"{_tag(digest)}.sig-{hex_of(digest_of(envelope))[:40]}"
        with _registry_errors(self.url, digest):
            layer = self._client.upload(Blob(envelope, ENVELOPE_TYPE))
            self._client.put_manifest(tag, ENVELOPE_TYPE, self._client.upload(EMPTY), [layer])

    def parts(self, digest: str) -> frozenset[str]:
        """See `Content`."""
        listed = listed_files(self.manifest(digest))
        return frozenset([digest, *(entry.digest for entry in listed.values())])

    def held(self) -> Iterator[str]:
        """See `Content`. Artifacts alone: blobs are the registry's to collect."""
        yield from (digest for _, digest, is_meant in self._artifact_tags() if is_meant)

    def remove(self, digest: str) -> None:
        """See `Content`. The artifact goes last: what it has left would not be `held`."""
        with _registry_errors(self.url, digest):
            ours = f"{_tag(digest)}.sig-"
            signatures = [tag for tag in self._client.tags() if tag.startswith(ours)]
            for tag in [*signatures, _tag(digest)]:
                with suppress(OciMissingError):
                    self._delete(tag, digest)

    def _delete(self, tag: str, digest: str) -> None:
        """Deletes what a tag stands for, if it is of this artifact."""
        with suppress(ArtifactError):  # what else it is, `foreign` and `unfit_signatures` tell
            stored = self._client.manifest_bytes(tag)
            if tag != _tag(digest):
                self._envelope_in(stored, tag, digest, MAX_ENVELOPE_BYTES)
            elif not _is_meant(stored, tag, digest):
                return
            self._client.delete_manifest(digest_of(stored))

    def _artifact_tags(self) -> Iterator[tuple[str, str, bool]]:
        """Tags of the form of an artifact's: each, its digest, and whether it stands for that."""
        with _registry_errors(self.url, "tags"):
            tags = sorted(self._client.tags())
        for match in filter(None, map(_ARTIFACT_TAG.fullmatch, tags)):
            tag, digest = match[0], f"sha256:{match[1]}"
            is_meant = self._stands_for(tag, digest)
            if is_meant is not None:
                yield tag, digest, is_meant

    def _stands_for(self, tag: str, digest: str) -> bool | None:
        """None for a tag that is gone since it was listed."""
        with _registry_errors(self.url, tag):
            try:
                return _is_meant(self._client.manifest_bytes(tag), tag, digest)
            except ArtifactError:  # too large
                return False
            except OciMissingError:
                return None

    def verify(self, digest: str) -> None:
        """See `Content`. What is held are artifacts, so all files of one are read."""
        self.fetch(digest, lambda _: None)

    def foreign(self) -> Iterator[str]:
        """See `Content`. A repository may serve others too: tags of other forms are theirs."""
        yield from (
            f"{self.url}:{tag}" for tag, _, is_meant in self._artifact_tags() if not is_meant
        )

    def _blob(self, digest: str, max_bytes: int) -> bytes:
        return checked(f"{self.url}, {digest}", self._client.blob(digest, max_bytes), digest)

    def _envelope(self, tag: str, digest: str, max_bytes: int) -> bytes:
        """The envelope over a manifest that a tag stands for; E_SIG for anything else."""
        return self._envelope_in(self._client.manifest_bytes(tag), tag, digest, max_bytes)

    def _envelope_in(self, stored: bytes, tag: str, digest: str, max_bytes: int) -> bytes:
        place = f"{self.url}:{tag}"
        layers = parse_manifest(stored, tag).get("layers")
        layer = layers[0] if isinstance(layers, list) and layers else None
        found = layer.get("digest") if isinstance(layer, dict) else None
        if not isinstance(found, str) or not re.fullmatch(r"sha256:[0-9a-f]{64}", found):
            raise ArtifactError("E_SIG", place, expected="one layer with a digest", found="none")
        envelope = self._blob(found, max_bytes)
        check_envelope_of(place, envelope, digest)
        return envelope


def _is_meant(stored: bytes, tag: str, digest: str) -> bool:
    """Whether an OCI manifest is the one of our artifact with this digest."""
    try:
        config = parse_manifest(stored, tag).get("config")
    except ArtifactError:
        return False
    return isinstance(config, dict) and config.get("digest") == digest


def _tag(digest: str) -> str:
    return f"sha256-{hex_of(digest)}"


@contextmanager
def _registry_errors(url: str, digest: str) -> Iterator[None]:
    """What oras and requests raise, as ours."""
    import requests

    try:
        yield
    except OciMissingError:
        raise missing(f"{url}, {digest}") from None
    except (requests.RequestException, ValueError, RuntimeError) as error:
        raise StoreError(
            url,
            expected="an OCI registry that takes this account",
            found=str(error) or type(error).__name__,
            fix="check the host, `docker login`, and that the account may do this",
        ) from error
