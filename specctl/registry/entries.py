"""Entries of a log: strict, canonical, chained, sealed in a DSSE envelope, signed or not."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue, ValidationError

from specctl.artifacts.facts import Digest, Name, UtcTime
from specctl.artifacts.manifest import digest_of
from specctl.artifacts.privacy import check_record
from specctl.artifacts.signing import add_signature, envelope_bytes, parse_envelope
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, RegistryError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json, describe_violation
from specctl.registry.layout import MAX_GENERATION, REGISTRY_VERSION, Nonce

if TYPE_CHECKING:
    from specctl.artifacts.signing import SigningKey

ENTRY_TYPE = "application/vnd.specctl.registry.entry+json"
MAX_DIGESTS = 4000
"""In one entry of the garbage log; more are marked by the next mark."""
Generation = Annotated[int, Field(ge=0, le=MAX_GENERATION)]
Alias = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Digests = Annotated[tuple[Digest, ...], Field(min_length=1, max_length=MAX_DIGESTS)]


class Publish(Record):
    """A version of the name."""

    kind: Literal["publish"] = "publish"
    digest: Digest


class Move(Record):
    """An alias now points to a version; a rollback is a move with a reason.

    Attributes:
        expected_generation: of the move that this one follows; None where the alias is new.
        expected_digest: what the alias pointed to; None where it is new.
    """

    kind: Literal["alias", "rollback"]
    alias: Alias
    digest: Digest
    expected_generation: Generation | None
    expected_digest: Digest | None


class Settings(Record):
    """The trust record of the registry (docs/artifact-format.md); the newest one counts."""

    kind: Literal["settings"] = "settings"
    settings: dict[str, JsonValue]


class Mark(Record):
    """Digests that nothing reached; they may be swept once the grace has passed."""

    kind: Literal["mark"] = "mark"
    digests: Digests


class Keep(Record):
    """Digests that somebody uses: no longer marked, and where they were collected, there again."""

    kind: Literal["keep"] = "keep"
    digests: Digests


class Sweep(Record):
    """Digests that are being deleted from now on; nobody may begin to use them."""

    kind: Literal["sweep"] = "sweep"
    digests: Digests


class Swept(Record):
    """The end of that deletion."""

    kind: Literal["swept"] = "swept"
    sweep_generation: Generation


Action = Publish | Move | Settings | Mark | Keep | Sweep | Swept


class Entry(Record):
    """One generation of one log; docs/registry.md explains the fields."""

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
    """An entry as it stands in a log, with its envelope and the envelope's digest."""

    entry: Entry
    envelope: bytes
    digest: str


def settings_of(logged: Logged) -> dict[str, JsonValue]:
    """The trust record that an entry of settings holds, as plain JSON."""
    assert isinstance(logged.entry.action, Settings)
    return logged.entry.action.settings


@dataclass(frozen=True)
class EntryPlace:
    """The one place in the world where an entry may stand."""

    registry_id: str
    name: str
    generation: int
    prev_digest: str | None


@dataclass(frozen=True)
class Author:
    """Who writes entries.

    Attributes:
        actor: for people, e.g. `ann@host`; not proof of anything.
        keys: each signs the entries; none leaves them unsigned.
    """

    actor: str
    keys: tuple[SigningKey, ...] = ()


@dataclass(frozen=True)
class Note:
    """What a writer says of an entry.

    Attributes:
        expires: UTC, `2027-01-31T12:00:00Z`; readers refuse the entry after it.
    """

    reason: str | None = None
    expires: str | None = None


def write_entry(
    place: EntryPlace,
    action: Action,
    author: Author,
    *,
    created: str,
    note: Note,
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
        raise unfit("log entry", error) from None
    content = entry.model_dump(mode="json")
    check_record("log entry", content)
    payload = canonical_json(content).encode()
    sealed = envelope_bytes(ENTRY_TYPE, payload)
    for key in author.keys:
        sealed = add_signature(sealed, key)
    return Logged(entry, sealed, digest_of(sealed))


def unfit(what: str, error: ValidationError) -> RegistryError:
    """E_ENTRY: something that this user asked to write and that no reader would take."""
    return RegistryError(
        "E_ENTRY",
        what,
        expected="1 to 256 plain characters of text, times as 2026-01-31T12:00:00Z",
        found=describe_violation(error),
        fix="correct that field",
    )


def read_entry(envelope: bytes, place: EntryPlace, where: str) -> Logged:
    """The entry in an envelope that was found at a place. Signatures are not checked here.

    Args:
        where: the store and key, for messages.

    Raises:
        RegistryError: E_LOG for anything but an entry of exactly this place.
    """
    try:
        entry = _parse(envelope)
    except ArtifactError as error:
        raise broken(where, error.expected, error.found) from None
    except ValidationError as error:
        expected = f"an entry of registry version {REGISTRY_VERSION}"
        raise broken(where, expected, describe_violation(error)) from None
    for field, wanted in vars(place).items():
        if getattr(entry, field) != wanted:
            raise broken(where, f"{field} {wanted}", str(getattr(entry, field)))
    return Logged(entry, envelope, digest_of(envelope))


def _parse(envelope: bytes) -> Entry:
    sealed = parse_envelope(envelope)
    if sealed.payload_type != ENTRY_TYPE:
        raise ArtifactError("E_SIG", "", expected=ENTRY_TYPE, found=sealed.payload_type)
    tree, again = parse_strict(sealed.payload), envelope_bytes(**vars(sealed))
    if canonical_json(tree).encode() != sealed.payload or again != envelope:
        raise ArtifactError("E_SIG", "", expected="canonical JSON", found="other bytes")
    return Entry.model_validate_json(sealed.payload)


def broken(where: str, expected: str, found: str) -> RegistryError:
    """E_LOG: a log that cannot be believed."""
    return RegistryError(
        "E_LOG",
        where,
        expected=expected,
        found=found,
        fix="run `specctl registry fsck`; restore the log from a backup",
    )
