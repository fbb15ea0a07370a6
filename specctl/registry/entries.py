"""Entries of a history: strict records, canonical, chained by digest, in a DSSE envelope."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field, ValidationError

from specctl.artifacts.manifest import Digest, Name, UtcTime, digest_of
from specctl.artifacts.privacy import check_record
from specctl.artifacts.signing import add_signature, envelope_bytes, parse_envelope
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, RegistryError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json, describe_violation

if TYPE_CHECKING:
    from specctl.artifacts.signing import SigningKey

REGISTRY_VERSION: Final = 1
ENTRY_TYPE = "application/vnd.specctl.registry.entry+json"
MAX_GENERATION = 10**12 - 1
"""Twelve digits, far below 2^53: a log cannot be fast-forwarded to where numbers end."""
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""128 random bits."""
Generation = Annotated[int, Field(ge=0, le=MAX_GENERATION)]
Alias = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class Publish(Record):
    """A version of the name."""

    kind: Literal["publish"] = "publish"
    digest: Digest


class Move(Record):
    """An alias that now points to a version.

    Attributes:
        expected_generation: of the move before this one; None where the alias is new.
        expected_digest: the version before this one; None where the alias is new.
    """

    kind: Literal["alias", "rollback"]
    alias: Alias
    digest: Digest
    expected_generation: Generation | None
    expected_digest: Digest | None


Action = Publish | Move


class Entry(Record):
    """One generation of one history; docs/registry.md explains the fields."""

    registry_version: Literal[1]
    registry_id: Nonce
    name: Name
    generation: Generation
    prev_digest: Digest | None
    nonce: Nonce
    actor: Name
    created: UtcTime
    expires: UtcTime | None
    reason: Name | None
    action: Annotated[Action, Field(discriminator="kind")]


@dataclass(frozen=True)
class Logged:
    """An entry, its envelope as stored, and the envelope's digest."""

    entry: Entry
    envelope: bytes
    digest: str


@dataclass(frozen=True)
class EntryPlace:
    """The one place where an entry may stand."""

    registry_id: str
    name: str
    generation: int
    prev_digest: str | None


@dataclass(frozen=True)
class Author:
    """The writer of entries.

    Attributes:
        actor: for people, e.g. `ann@host`; proves nothing.
        keys: each signs the entries; none leaves them unsigned.
    """

    actor: str
    keys: tuple[SigningKey, ...] = ()


@dataclass(frozen=True)
class Note:
    """A writer's note on an entry.

    Attributes:
        expires: UTC, `2027-01-31T12:00:00Z`; readers refuse the entry after it.
    """

    reason: str | None = None
    expires: str | None = None


def write_entry(
    place: EntryPlace, action: Action, author: Author, *, created: str, note: Note
) -> Logged:
    """A new entry for a place.

    Raises:
        RegistryError: E_ENTRY for text that an entry may not hold.
        ArtifactError: E_PRIVACY for a secret in it: a history is never rewritten.
    """
    try:
        entry = Entry(
            registry_version=REGISTRY_VERSION,
            **vars(place),
            nonce=secrets.token_hex(16),
            actor=author.actor,
            created=created,
            expires=note.expires,
            reason=note.reason,
            action=action,
        )
    except ValidationError as error:
        raise RegistryError(
            "E_ENTRY",
            "log entry",
            expected="1 to 256 plain characters of text, times as 2026-01-31T12:00:00Z",
            found=describe_violation(error),
            fix="correct that field",
        ) from None
    content = entry.model_dump(mode="json")
    check_record("log entry", content)
    sealed = envelope_bytes(ENTRY_TYPE, canonical_json(content).encode())
    for key in author.keys:
        sealed = add_signature(sealed, key)
    return Logged(entry, sealed, digest_of(sealed))


def parse_entry(envelope: bytes) -> Entry:
    """The entry in an envelope; signatures are not verified.

    Raises:
        ArtifactError: E_SIG for anything but a canonical envelope with a canonical entry.
    """
    sealed = parse_envelope(envelope)
    if sealed.payload_type != ENTRY_TYPE:
        raise ArtifactError("E_SIG", "entry", expected=ENTRY_TYPE, found=sealed.payload_type)
    tree, again = parse_strict(sealed.payload), envelope_bytes(**vars(sealed))
    if canonical_json(tree).encode() != sealed.payload or again != envelope:
        raise ArtifactError("E_SIG", "entry", expected="canonical JSON", found="other bytes")
    try:
        return Entry.model_validate_json(sealed.payload)
    except ValidationError as error:
        raise ArtifactError(
            "E_SIG",
            "entry",
            expected=f"an entry of registry version {REGISTRY_VERSION}",
            found=describe_violation(error),
        ) from None


def read_entry(envelope: bytes, place: EntryPlace, where: str) -> Logged:
    """The entry in an envelope that was found at a place; signatures are not verified.

    Args:
        where: store and key, for messages.

    Raises:
        RegistryError: E_LOG for anything but an entry of exactly this place.
    """
    try:
        entry = parse_entry(envelope)
    except ArtifactError as error:
        raise broken_log(where, error.expected, error.found) from None
    for field, wanted in vars(place).items():
        if getattr(entry, field) != wanted:
            raise broken_log(where, f"{field} {wanted}", str(getattr(entry, field)))
    return Logged(entry, envelope, digest_of(envelope))


def broken_log(where: str, expected: str, found: str) -> RegistryError:
    """E_LOG: a history that cannot be trusted."""
    return RegistryError(
        "E_LOG",
        where,
        expected=expected,
        found=found,
        fix="run `specctl registry verify`; restore the history from a copy",
    )
