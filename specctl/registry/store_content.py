"""Content in an object store, laid out as `layout` says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice

from specctl.artifacts.files import MAX_BYTES
from specctl.artifacts.manifest import MANIFEST, digest_of
from specctl.artifacts.signing import MAX_ENVELOPE_BYTES
from specctl.errors import ArtifactError, SpecctlError
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
from specctl.registry.layout import (
    BLOBS,
    MANIFESTS,
    SIGNATURES,
    blob_key,
    manifest_key,
    signature_folder,
)
from specctl.stores import KeyAbsentError, ObjectStore, StoredObject
from specctl.stores.creating import ensure, read
from specctl.stores.interface import ObjectTooLargeError, UnreadableError

_KEY = re.compile(rf"(?:{BLOBS}/([0-9a-f]{{64}})|{MANIFESTS}/([0-9a-f]{{64}})\.json)")
_SIGNATURE = re.compile(rf"{SIGNATURES}/[0-9a-f]{{64}}/[0-9a-f]{{64}}\.json")


class StoreContent:
    """Content in an object store, laid out as `layout` says."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.url = store.url

    def publish(self, digest: str, files: Mapping[str, bytes], on_bytes: OnBytes) -> None:
        """See `Content`. A reader that sees the manifest sees every blob of it."""
        check_files(digest, files)
        for name, data in files.items():
            if name != MANIFEST:
                ensure(self.store, blob_key(digest_of(data)), data)
                on_bytes(len(data))
        ensure(self.store, manifest_key(digest), files[MANIFEST])
        on_bytes(len(files[MANIFEST]))

    def manifest(self, digest: str) -> bytes:
        """See `Content`."""
        return self._get(manifest_key(digest), digest, MAX_BYTES[MANIFEST])

    def fetch(self, digest: str, on_bytes: OnBytes) -> dict[str, bytes]:
        """See `Content`."""
        files = {MANIFEST: self.manifest(digest)}
        for name, entry in listed_files(files[MANIFEST]).items():
            files[name] = self._get(blob_key(entry.digest), entry.digest, entry.size_bytes)
            on_bytes(entry.size_bytes)
        return files

    def signatures(self, digest: str) -> list[bytes]:
        """See `Content`. `MAX_SIGNATURES` and `MAX_SIGNATURE_BYTES` bound what is read."""
        left = MAX_SIGNATURE_BYTES
        found = []
        for one in islice(self._envelopes(signature_folder(digest)), MAX_SIGNATURES):
            left -= one.size_bytes
            if left < 0:
                break
            with suppress(ArtifactError, UnreadableError):
                found.append(self._envelope(one.key))
        return found

    def _envelopes(self, prefix: str) -> Iterator[StoredObject]:
        """Objects that have the key and the size of an envelope."""
        for one in self.store.objects(prefix):
            if _SIGNATURE.fullmatch(one.key) and one.size_bytes <= MAX_ENVELOPE_BYTES:
                yield one

    def _envelope(self, key: str) -> bytes:
        """The envelope under a key; E_DIGEST, E_SIG for anything else."""
        manifest, name = key.removesuffix(".json").split("/")[-2:]
        envelope = self._get(key, f"sha256:{name}", MAX_ENVELOPE_BYTES)
        check_envelope_of(f"{self.url}, {key}", envelope, f"sha256:{manifest}")
        return envelope

    def unfit_signatures(self) -> Iterator[tuple[str, SpecctlError]]:
        """See `Content`."""
        for one in self.store.objects(SIGNATURES):
            if _SIGNATURE.fullmatch(one.key):
                try:
                    self._envelope(one.key)
                except SpecctlError as error:
                    yield one.key, error

    def add_signature(self, digest: str, envelope: bytes) -> None:
        """See `Content`."""
        name = digest_of(envelope).removeprefix("sha256:")
        ensure(self.store, f"{signature_folder(digest)}/{name}.json", envelope)

    def parts(self, digest: str) -> frozenset[str]:
        """See `Content`."""
        listed = listed_files(self.manifest(digest))
        return frozenset([digest, *(entry.digest for entry in listed.values())])

    def held(self) -> Iterator[str]:
        """See `Content`."""
        for prefix in (MANIFESTS, BLOBS):
            for one in self.store.objects(prefix):
                found = _KEY.fullmatch(one.key)
                if found:
                    yield f"sha256:{found[1] or found[2]}"

    def remove(self, digest: str) -> None:
        """See `Content`. Signatures go first: what they leave behind is `held`, they are not."""
        for one in list(self.store.objects(signature_folder(digest))):
            if _SIGNATURE.fullmatch(one.key):
                self.store.delete(one.key)
        self.store.delete(manifest_key(digest))
        self.store.delete(blob_key(digest))

    def foreign(self) -> Iterator[str]:
        """See `Content`."""
        for prefix in (MANIFESTS, BLOBS, SIGNATURES):
            for one in self.store.objects(prefix.split("/")[0]):
                if not (_KEY.fullmatch(one.key) or _SIGNATURE.fullmatch(one.key)):
                    yield one.key

    def verify(self, digest: str) -> None:
        """See `Content`. Bytes that are manifest and blob at once are checked as both."""
        keys = (manifest_key(digest), blob_key(digest))
        refusals = [refusal for key in keys if (refusal := self._refusal(key, digest))]
        absent = [refusal for refusal in refusals if refusal.code == "E_MISSING"]
        for refusal in refusals:
            if refusal not in absent or len(absent) == len(keys):
                raise refusal

    def _refusal(self, key: str, digest: str) -> ArtifactError | None:
        try:
            self._get(key, digest, max(MAX_BYTES.values()))
        except ArtifactError as refusal:
            return refusal
        return None

    def _get(self, key: str, digest: str, max_bytes: int) -> bytes:
        place = f"{self.url}, {key}"
        try:
            data = read(self.store, key, max_bytes=max_bytes)
        except KeyAbsentError:
            raise missing(place) from None
        except ObjectTooLargeError as error:
            raise ArtifactError(
                "E_SIZE", place, expected=error.expected, found=error.found
            ) from None
        return checked(place, data, digest)
