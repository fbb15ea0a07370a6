"""What a verb is about to write, made and checked once before its first write.

A version that was published stays published. So whatever is wrong with the words or the keys of a
command must be found before anything of it counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specctl.artifacts.signing import Trust, parse_envelope, parse_trust
from specctl.artifacts.signing.options import check_time
from specctl.errors import ArtifactError, InputError, UsageError
from specctl.registry.entries import (
    Action,
    Author,
    EntryPlace,
    Logged,
    Move,
    Note,
    Publish,
    Settings,
    write_entry,
)
from specctl.registry.log import Log
from specctl.registry.names import SETTINGS, parse_alias, parse_name
from specctl.registry.revising import check_follows, draft, says, standing
from specctl.registry.room import Registry
from specctl.registry.settling import settle
from specctl.registry.trusting import check_entry
from specctl.registry.writing import Writer


def note_of(reason: str | None, expires: str | None) -> Note:
    """What a writer says of an entry, checked.

    Raises:
        UsageError: an expiry of another form, or a past one.
    """
    return Note(reason, check_time(expires, "--expires"))


def rehearse_push(writer: Writer, name: str, digest: str, alias: str | None, note: Note) -> None:
    """Refuses a publication that is bound to fail, or whose alias is.

    Raises:
        RegistryError: E_NAME, E_ENTRY.
        ArtifactError: E_SIG, E_STALE: the author's keys may not publish, or not move the alias.
    """
    parse_name(name)
    actions: list[Publish | Move] = [Publish(digest=digest)]
    if alias is not None:
        actions.append(_first_move(parse_alias(alias), digest))
    _rehearse(writer, name, actions, note)


def read_settings(path: Path) -> bytes:
    """The trust record in a file.

    Raises:
        UsageError: it cannot be read.
        InputError: it is no trust record.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise UsageError(
            str(path), expected="a trust record", found=found, fix="check the path"
        ) from None
    try:
        parse_trust(data, str(path))
    except ArtifactError as error:
        raise InputError(
            str(path),
            expected=f"a trust record (JSON), {error.expected}",
            found=error.found,
            fix="correct it, or make one: specctl registry trust add --trust FILE",
        ) from None
    return data


def rehearse_settings(
    registry: Registry,
    record: bytes,
    author: Author,
    trust: Trust,
    note: Note,
    *,
    expect: int | None = None,
) -> None:
    """Refuses settings that would shut people out, or take back what others set.

    Args:
        expect: see `revising.write_settings`; where settings stand that say something else, it or
            the record must say what the record was made from.

    Raises:
        UsageError: the writer's own trust would refuse them, nobody signs them where those in
            force are signed, or nothing says what they were made from.
        RegistryError: E_ENTRY, E_SETTINGS_CONFLICT.
    """
    log, now = registry.settings_log(), registry.clock.utc()
    settings = _follow(registry.url, log.state.newest, record, expect)
    _refuse_unsigned(registry, log.state.newest, author)
    logged = _entry(registry, log, settings, author, note)
    try:
        settle(registry.url, [*log.entries, logged], trust, SETTINGS, now)
    except ArtifactError as error:
        raise UsageError(
            "--key",
            expected="settings that your own trust file believes, or nobody who trusts the same "
            f"root could use {registry.url}: {error.expected}",
            found=error.found,
            fix="sign them with --key ROOT; `specctl registry trust list` shows whom you trust",
        ) from None


def _follow(url: str, newest: Logged | None, record: bytes, expect: int | None) -> Settings:
    settings, made_from = draft(record, expect)
    if made_from is not None:
        check_follows(url, newest, settings, made_from)
    elif newest is not None and not says(newest, settings):
        raise UsageError(
            "--expect-generation",
            expected="the generation of the settings that the record was made from",
            found=f"none, where {standing(newest)} stands",
            fix="edit what `specctl registry settings --json` shows: it has its generation; or "
            "give the option, once your record has all that those settings say",
        )
    return settings


def _refuse_unsigned(registry: Registry, newest: Logged | None, author: Author) -> None:
    if newest is None or author.keys or not parse_envelope(newest.envelope).signatures:
        return
    raise UsageError(
        "--key",
        expected="a key that signs the settings, as those in force are signed",
        found="none",
        fix=f"sign them with --key ROOT: whoever trusts a root would refuse {registry.url}",
    )


def _first_move(alias: str, digest: str) -> Move:
    return Move(
        kind="alias", alias=alias, digest=digest, expected_generation=None, expected_digest=None
    )


def _rehearse(writer: Writer, name: str, actions: Iterable[Publish | Move], note: Note) -> None:
    registry, trust, log = writer.registry, writer.trusted(name), writer.registry.log(name)
    for action in actions:
        logged = _entry(registry, log, action, writer.author, note)
        check_entry(registry, trust, log, logged)


def _entry(registry: Registry, log: Log[Any], action: Action, author: Author, note: Note) -> Logged:
    """The entry as it would be written now, but for the digest of the one before."""
    place = EntryPlace(registry.marker.registry_id, log.name, len(log.entries), None)
    return write_entry(place, action, author, created=registry.clock.utc(), note=note)
