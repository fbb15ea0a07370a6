"""Files of artifacts and signatures over them, by digest; each is recomputed on every read.

blobs/sha256/<hex>                     files of artifacts
manifests/sha256/<hex>.json            `config.json` of an artifact; <hex> is its identity
signatures/sha256/<hex>/<hex>.json     envelopes over a manifest, by their own digest

An object counts once a history names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from pydantic import TypeAdapter, ValidationError

from specctl.artifacts.files import (
    MAX_BYTES,
    check_contents,
    check_list,
    check_size,
    missing_file,
)
from specctl.artifacts.manifest import MANIFEST, FileEntry, digest_of
from specctl.artifacts.signing import parse_statement
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, SpecctlError
from specctl.records import describe_violation
from specctl.registry.names import typed
from specctl.stores import (
    KeyAbsentError,
    ObjectStore,
    ObjectTooLargeError,
    UnreadableError,
    ensure,
    read,
)

MAX_SIGNATURES, MAX_SIGNATURE_BYTES = 1024, 32 << 10
"""Envelopes read for one artifact, and the size of each. Writers can add junk; both limits are far
above honest use."""
_MEND = "do not use it; delete that object and push again from a good copy"
_FILES = TypeAdapter(dict[str, FileEntry])
_ENVELOPE = re.compile(r"signatures/sha256/[0-9a-f]{64}/([0-9a-f]{64})\.json")


def blob_key(digest: str) -> str:
    """Key of a file's bytes."""
    return f"blobs/sha256/{hex_of(digest)}"


def manifest_key(digest: str) -> str:
    """Key of an artifact's `config.json`."""
    return f"manifests/sha256/{hex_of(digest)}.json"


def signature_folder(digest: str) -> str:
    """Prefix of the envelopes over a manifest."""
    return f"signatures/sha256/{hex_of(digest)}"


def hex_of(digest: str) -> str:
    """The 64 digits of `sha256:<hex>`."""
    return digest.removeprefix("sha256:")


class Content:
    """The artifacts in a store.

    Methods raise `ArtifactError` for an object that is damaged (E_DIGEST, E_SIZE) or absent
    (E_MISSING), and `StoreError` for a store that cannot be used.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def publish(
        self, digest: str, files: Mapping[str, bytes], envelopes: Iterable[bytes] = ()
    ) -> None:
        """Stores blobs, then the manifest, then signatures. Existing objects are compared and kept.

        A reader that sees the manifest sees all its blobs.
        """
        check_files(digest, files)
        for name, data in files.items():
            if name != MANIFEST:
                ensure(self.store, blob_key(digest_of(data)), data)
        ensure(self.store, manifest_key(digest), files[MANIFEST])
        for envelope in envelopes:
            key = f"{signature_folder(digest)}/{hex_of(digest_of(envelope))}.json"
            ensure(self.store, key, envelope)

    def manifest(self, digest: str) -> bytes:
        """Bytes of `config.json`."""
        return self._get(manifest_key(digest), digest, MAX_BYTES[MANIFEST])

    def fetch(self, digest: str) -> dict[str, bytes]:
        """All files by name, each checked against the manifest."""
        files = {MANIFEST: self.manifest(digest)}
        for name, entry in listed_files(files[MANIFEST]).items():
            files[name] = self._get(blob_key(entry.digest), entry.digest, entry.size_bytes)
        return files

    def signatures(self, digest: str) -> list[bytes]:
        """Unverified envelopes with a statement of the manifest, under any name.

        Damaged ones are skipped; `damaged_signatures` lists them.
        """
        read = islice(self._envelopes(digest), MAX_SIGNATURES)
        return [envelope for _, envelope in read if isinstance(envelope, bytes)]

    def damaged_signatures(self, digest: str) -> Iterator[tuple[str, SpecctlError]]:
        """Keys of damaged envelopes, each with the reason."""
        for key, found in self._envelopes(digest):
            if not isinstance(found, bytes):
                yield key, found

    def _envelopes(self, digest: str) -> Iterator[tuple[str, bytes | SpecctlError]]:
        """Keys of the signature folder, each with its bytes or with the reason it is damaged."""
        for one in self.store.objects(signature_folder(digest)):
            named = _ENVELOPE.fullmatch(one.key)
            if named is None or one.size_bytes > MAX_SIGNATURE_BYTES:
                continue
            try:
                envelope = self._get(one.key, f"sha256:{named[1]}", MAX_SIGNATURE_BYTES)
                check_envelope(f"{self.store.url}, {one.key}", envelope, digest)
                yield one.key, envelope
            except (ArtifactError, UnreadableError) as error:
                yield one.key, error

    def _get(self, key: str, digest: str, max_bytes: int) -> bytes:
        place = f"{self.store.url}, {key}"
        try:
            data = read(self.store, key, max_bytes=max_bytes)
        except KeyAbsentError:
            missing = typed(self.store.url, "verify")
            fix = f"push the artifact again; {missing} names all that is missing"
            raise ArtifactError("E_MISSING", place, "the object is missing", hint=fix) from None
        except ObjectTooLargeError:
            raise ArtifactError(
                "E_SIZE", place, f"more than {max_bytes} bytes", hint=_MEND
            ) from None
        return checked(place, data, digest)


def checked(place: str, data: bytes, digest: str) -> bytes:
    """Returns the data if it has the digest (else E_DIGEST)."""
    found = digest_of(data)
    if found != digest:
        raise ArtifactError("E_DIGEST", place, f"its digest is {found}, not {digest}", hint=_MEND)
    return data


def check_files(digest: str, files: Mapping[str, bytes]) -> None:
    """Refuses files other than those of the manifest with this digest."""
    if MANIFEST not in files:
        raise missing_file(MANIFEST)
    checked(MANIFEST, files[MANIFEST], digest)
    check_contents(listed_files(files[MANIFEST]), files)


def listed_files(manifest: bytes) -> dict[str, FileEntry]:
    """The files that a manifest lists, with valid names and sizes."""
    tree = parse_strict(manifest)
    try:
        files = _FILES.validate_python(tree.get("files") if isinstance(tree, dict) else None)
    except ValidationError as error:
        problem = f"not a list of names with digest and size: {describe_violation(error)}"
        raise ArtifactError("E_SCHEMA", "files", problem) from None
    check_list(files)
    for name, entry in files.items():
        check_size(name, entry.size_bytes)
    return files


def check_envelope(place: str, envelope: bytes, digest: str) -> None:
    """Refuses an envelope without a statement of this manifest (E_SIG); verifies no signature."""
    try:
        about = parse_statement(envelope).about[0]
        problem = f"it is about {about}"
    except ArtifactError as error:
        about, problem = "", error.problem
    if about != digest:
        problem = f"no signed statement of {digest}: {problem}"
        fix = "it proves nothing; find out who put it there and remove it"
        raise ArtifactError("E_SIG", place, problem, hint=fix)
