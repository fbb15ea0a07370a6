"""Where the bytes of artifacts live: what a registry asks of any backend.

Everything is named by its digest and checked against it on every read. A backend decides nothing:
what exists is what the logs say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from specctl.artifacts.files import MAX_BYTES, check_name
from specctl.artifacts.manifest import MANIFEST, FileEntry, digest_of
from specctl.artifacts.signing import parse_envelope
from specctl.artifacts.signing.statement import STATEMENT_TYPE, Statement
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, SpecctlError
from specctl.policy.parse import describe_violation

OnBytes = Callable[[int], None]
"""Told the size in bytes of each file when it has been moved."""
MAX_SIGNATURES = 1024
"""Objects in the place of envelopes that are looked at, for one artifact. Whoever may write there
may add junk; so much of it hides nothing that is good."""
MAX_SIGNATURE_BYTES = 32 << 20
"""Of all of these together."""
_FILES = TypeAdapter(dict[str, FileEntry])


class Content(Protocol):
    """Artifacts by the digest of their manifest.

    `ArtifactError` is raised for what is there and is not what its digest says (E_DIGEST, E_SIZE)
    or is not there at all (E_MISSING), `StoreError` for a place that cannot be used.
    """

    url: str

    def publish(self, digest: str, files: Mapping[str, bytes], on_bytes: OnBytes) -> None:
        """Stores all files, the manifest last; what is there already is verified, not replaced.

        Args:
            files: by name, `config.json` among them; they are what the manifest lists.
        """

    def manifest(self, digest: str) -> bytes:
        """Bytes of `config.json`."""

    def fetch(self, digest: str, on_bytes: OnBytes) -> dict[str, bytes]:
        """All files by name, each checked against the manifest."""

    def signatures(self, digest: str) -> list[bytes]:
        """Envelopes with a statement of the manifest, under whatever name; none believed yet.

        What else lies there is passed over: it says nothing. `unfit_signatures` tells of it.
        """

    def add_signature(self, digest: str, envelope: bytes) -> None:
        """Stores an envelope; the same one again is fine."""

    def parts(self, digest: str) -> frozenset[str]:
        """The digests that must be kept for an artifact: its own, and what it is made of."""

    def held(self) -> Iterator[str]:
        """Digests of all that `remove` could remove; a listing, so it may be stale."""

    def remove(self, digest: str) -> None:
        """Deletes one manifest (with its signatures) or one blob; one that is gone is fine."""

    def verify(self, digest: str) -> None:
        """Reads one manifest or blob and recomputes its digest."""

    def unfit_signatures(self) -> Iterator[tuple[str, SpecctlError]]:
        """What lies in the place of an envelope and is none, by place, and why."""

    def foreign(self) -> Iterator[str]:
        """What lies among the content and nothing of ours has written, for messages."""


def checked(place: str, data: bytes, digest: str) -> bytes:
    """Returns bytes that are what their digest says.

    Raises:
        ArtifactError: E_DIGEST.
    """
    found = digest_of(data)
    if found != digest:
        raise ArtifactError(
            "E_DIGEST",
            place,
            expected=digest,
            found=found,
            fix="do not use it; delete that object and push again from a good copy",
        )
    return data


def missing(place: str) -> ArtifactError:
    """E_MISSING: a registry that does not hold what its log names."""
    return ArtifactError(
        "E_MISSING",
        place,
        expected="an object",
        found="none",
        fix="push the artifact again; `specctl registry fsck` says what else is missing",
    )


def listed_files(manifest: bytes) -> dict[str, FileEntry]:
    """The files that a manifest of any version lists, their names and sizes within the caps.

    Raises:
        ArtifactError: E_MANIFEST, E_SCHEMA, E_SIZE, E_PATH, E_NAME or E_EXTRA.
    """
    tree = parse_strict(manifest)
    try:
        files = _FILES.validate_python(tree.get("files") if isinstance(tree, dict) else None)
    except ValidationError as error:
        found = describe_violation(error)
        raise ArtifactError(
            "E_SCHEMA", f"{MANIFEST}, files", expected="names with digest and size", found=found
        ) from None
    for name, entry in files.items():
        _check_text(name)
        check_name(name)
        if name == MANIFEST:
            raise ArtifactError("E_EXTRA", MANIFEST, expected="not to list itself", found="itself")
        if entry.size_bytes > MAX_BYTES[name]:
            expected = f"at most {MAX_BYTES[name]} bytes"
            raise ArtifactError(
                "E_SIZE", name, expected=expected, found=f"{entry.size_bytes} bytes"
            )
    return files


def _check_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ArtifactError(
            "E_NAME", f"{MANIFEST}, files", expected="names of characters", found=ascii(name)
        ) from None


def check_envelope_of(place: str, envelope: bytes, digest: str) -> None:
    """Refuses bytes that hold no statement of a manifest; signatures are not checked.

    Raises:
        ArtifactError: E_SIG.
    """
    try:
        sealed = parse_envelope(envelope)
        parse_strict(sealed.payload)
        found = Statement.model_validate_json(sealed.payload).subject[0].digest.sha256
    except ArtifactError as error:
        raise _no_statement(place, digest, error.found) from None
    except ValidationError as error:
        raise _no_statement(place, digest, describe_violation(error)) from None
    if sealed.payload_type != STATEMENT_TYPE or f"sha256:{found}" != digest:
        raise _no_statement(place, digest, f"one of type {sealed.payload_type} of {found}")


def _no_statement(place: str, digest: str, found: str) -> ArtifactError:
    return ArtifactError(
        "E_SIG",
        place,
        expected=f"an envelope with a statement of {digest}",
        found=found,
        fix="it counts for nothing; find out who put it there and remove it",
    )


def check_files(digest: str, files: Mapping[str, bytes]) -> None:
    """Refuses files that are not those of the manifest with this digest.

    Raises:
        ArtifactError: E_DIGEST, E_EXTRA or E_MISSING.
    """
    checked(MANIFEST, files[MANIFEST], digest)
    listed = listed_files(files[MANIFEST])
    for name, entry in listed.items():
        if name not in files:
            raise ArtifactError("E_MISSING", name, expected="a listed file", found="none")
        checked(name, files[name], entry.digest)
    extra = sorted(files.keys() - listed.keys() - {MANIFEST})
    if extra:
        found = ", ".join(extra)
        raise ArtifactError("E_EXTRA", "files", expected="only listed files", found=found)


def known_parts(content: Content, digest: str) -> frozenset[str]:
    """`parts` of an artifact; of one whose manifest is not there, itself alone."""
    try:
        return content.parts(digest)
    except ArtifactError as error:
        if error.code != "E_MISSING":
            raise
    return frozenset([digest])


def was_collected(content: Content, digest: str, gone: Collection[str]) -> bool:
    """Whether garbage collection took an artifact, or some of it.

    Args:
        gone: digests that it deleted, `GarbageState.gone`.
    """
    return digest in gone or not known_parts(content, digest).isdisjoint(gone)
