"""Which signatures a registry's entries and artifacts need, and whether they have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from specctl.artifacts.registry.entries import ENTRY_TYPE, Author, Logged, Note, Settings
from specctl.artifacts.registry.log import BeforeCommit, commit
from specctl.artifacts.registry.names import SETTINGS
from specctl.artifacts.registry.room import Registry
from specctl.artifacts.signing import Role, parse_trust
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, UsageError
from specctl.policy.parse import canonical_json

if TYPE_CHECKING:
    from specctl.artifacts.signing import Trust

ROLES: dict[str, Role] = {"publish": "publisher", "alias": "promoter", "rollback": "promoter"}


def effective_trust(registry: Registry, trust: Trust) -> Trust:
    """What a user trusts here: the own record, and what the registry's settings add to it.

    Requirements and revocations of the settings always count, for they only tighten. Keys count
    where a root that the user trusts signed them; who trusts a root takes no settings without it.

    Raises:
        ArtifactError: E_SIG or E_STALE for settings that a trusted root did not sign.
    """
    newest, settings = registry.settings_log().state.newest, current_settings(registry)
    if newest is None:
        return trust
    record = parse_trust(canonical_json(settings).encode())
    verified = None
    if any("root" in key.roles for key in trust.record.keys):
        verified = trust.verify(
            newest.envelope, ENTRY_TYPE, name=SETTINGS, role="root", now=registry.clock.utc()
        )
    return trust.with_delegated(record, verified)


def write_settings(
    registry: Registry, record: bytes, author: Author, *, reason: str | None
) -> Logged:
    """Commits a trust record as the registry's settings.

    Raises:
        ArtifactError: a record that is none.
        RegistryError: E_BUSY.
    """
    parse_trust(record)
    settings = Settings(settings=parse_strict(record))
    logged = commit(
        registry.settings_log(),
        lambda _: settings,
        author,
        now=registry.clock.utc,
        note=Note(reason),
    )
    assert logged is not None
    return logged


def set_settings(registry: Registry, path: Path, author: Author, *, reason: str | None) -> Logged:
    """`write_settings` of a file.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        record = path.read_bytes()
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise UsageError(
            str(path), expected="a trust record", found=found, fix="check the path"
        ) from None
    return write_settings(registry, record, author, reason=reason)


def current_settings(registry: Registry) -> dict[str, JsonValue] | None:
    """The trust record in force as plain JSON; None where none was ever set."""
    newest = registry.settings_log().state.newest
    if newest is None:
        return None
    assert isinstance(newest.entry.action, Settings)
    return newest.entry.action.settings


def check_entry(registry: Registry, trust: Trust, name: str, logged: Logged) -> None:
    """Refuses an entry without the signature that its name requires.

    Raises:
        ArtifactError: E_SIG, E_STALE.
    """
    check_envelope(registry, trust, name, ROLES[logged.entry.action.kind])(logged.envelope)


def check_envelope(registry: Registry, trust: Trust, name: str, role: Role) -> BeforeCommit:
    """A check of entries that are about to be committed: what readers would refuse is not."""

    def check(envelope: bytes) -> None:
        if trust.requires(name):
            now = registry.clock.utc()
            trust.verify(envelope, ENTRY_TYPE, name=name, role=role, now=now)

    return check


def check_artifact(
    registry: Registry, trust: Trust, name: str, digest: str, envelopes: Sequence[bytes]
) -> None:
    """Refuses an artifact without the signature that its name requires.

    Raises:
        ArtifactError: E_SIG, E_STALE.
    """
    if trust.requires(name):
        trust.verify_artifact(envelopes, digest, name=name, now=registry.clock.utc())


def check_fresh(registry: Registry, logged: Logged, where: str) -> None:
    """Refuses an entry past its `expires`: a frozen registry would show it for ever.

    Raises:
        ArtifactError: E_STALE.
    """
    expires, now = logged.entry.expires, registry.clock.utc()
    if expires is not None and expires <= now:
        raise ArtifactError(
            "E_STALE",
            f"{registry.url}, {where}, generation {logged.entry.generation}",
            expected=f"an entry that is valid at {now}",
            found=f"one that expired at {expires}",
            fix="have it promoted anew",
        )
