"""Recomputes everything a registry says, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specctl.artifacts.signing import Trust
from specctl.errors import ArtifactError, RegistryError, SpecctlError
from specctl.registry.content import was_collected
from specctl.registry.entries import Logged, Move
from specctl.registry.layout import LOGS, PINS, SIGNATURES, TOP, generation_of
from specctl.registry.log import Log
from specctl.registry.names import RESERVED, SETTINGS, Reference, name_of_segment
from specctl.registry.pins import pins
from specctl.registry.resolving import deciding, named_digest
from specctl.registry.room import Registry
from specctl.registry.settling import created_of_binding, effective_trust, settle
from specctl.registry.state import GarbageState, NameState
from specctl.registry.trusting import check_artifact, check_entry
from specctl.stores.interface import ObjectTooLargeError, UnreadableError
from specctl.stores.local import LocalStore

EXPIRED = "E_STALE"
OF_AN_OBJECT = (ArtifactError, RegistryError, UnreadableError, ObjectTooLargeError)
"""Errors that say that something is there and wrong, or was lost; any other is no damage."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        is_damage: false for what only takes room (orphans), waits (an unfinished sweep) or has
            expired, which readers refuse and a new entry or signature mends.
    """

    code: str
    place: str
    found: str
    is_damage: bool = True


def fsck(
    registry: Registry, trust: Trust, *, on_checked: Callable[[], None] = lambda: None
) -> Iterator[Finding]:
    """Every history, every object, every alias, every required signature, every pin.

    Args:
        on_checked: told after each object and each version.

    Raises:
        StoreError: the store does not answer, or refuses: what it holds is not known then.
    """
    _, unsettled = _trusted(registry, trust, SETTINGS)
    yield from unsettled
    yield from _all_of(_foreign(registry), registry.store.url)
    logs: list[Log[Any]] = []
    unread = list(_all_of(_logs(registry, logs), LOGS))
    yield from unread
    named = {digest for log in logs for digest in log.state.versions}
    orphan = "no log names it" if not unread else "no log that can be read names it"
    yield from _all_of(_objects(registry, named, orphan, on_checked), registry.content.url)
    yield from _all_of(_signatures(registry), SIGNATURES)
    for log in logs:
        trusted, found = _trusted(registry, trust, log.name)
        yield from found - unsettled
        unsettled |= found
        yield from _versions(registry, trusted, log, on_checked)
    yield from _all_of(_pinned(registry), PINS)
    sweep_generation = _garbage(registry).sweep_generation
    if sweep_generation is not None:
        place = f"sweep {sweep_generation}"
        yield Finding("W_SWEEP", place, "not ended", is_damage=False)


def verify(registry: Registry, reference: Reference, trust: Trust) -> Iterator[Finding]:
    """The same for one reference: its history, its content, its signatures.

    Raises:
        RegistryError: a reference that means nothing here.
        ArtifactError: settings that nobody may rely on, see `effective_trust`.
        StoreError: as `fsck`.
    """
    trusted = effective_trust(registry, trust, reference.name)
    log = registry.known_log(reference.name)
    digest = named_digest(log, reference)
    entries = deciding(log, reference, digest)
    yield from _version(registry, trusted, log, digest, entries)


def _all_of(findings: Iterator[Finding], place: str) -> Iterator[Finding]:
    """The findings; an error that ends them early is one, too."""
    try:
        yield from findings
    except SpecctlError as error:
        yield _finding(place, error)


def _trusted(registry: Registry, trust: Trust, name: str) -> tuple[Trust, set[Finding]]:
    """What is trusted under a name, and what is wrong with the settings that decide about it."""
    try:
        return effective_trust(registry, trust, name), set()
    except SpecctlError as error:
        return _last_settled(registry, trust, name), {_finding("settings", error)}


def _last_settled(registry: Registry, trust: Trust, name: str) -> Trust:
    """The trust as it was when the deciding settings were made, if they have only expired since."""
    try:
        settings, now = registry.settings_log().entries, registry.clock.utc()
        then = created_of_binding(registry.url, settings, trust, name, now)
        return settle(registry.url, settings, trust, name, then)[0]
    except OF_AN_OBJECT:
        return trust  # told as the finding of settings


def _garbage(registry: Registry) -> GarbageState:
    """What garbage collection did, as far as that can be read; it is one of the logs checked."""
    try:
        return registry.garbage_log().state
    except SpecctlError as error:
        _of_an_object(error)
        return GarbageState()


def _logs(registry: Registry, logs: list[Log[Any]]) -> Iterator[Finding]:
    """Adds the histories of names that can be read, and tells of all others."""
    for segment in registry.segments():
        log = _log(registry, segment)
        if isinstance(log, Finding):
            yield log
        elif log.name not in RESERVED:
            logs.append(log)


def _log(registry: Registry, segment: str) -> Log[Any] | Finding:
    place = f"{registry.store.url}, {LOGS}/{segment}"
    try:
        return registry.any_log(name_of_segment(segment))
    except SpecctlError as error:
        if isinstance(error, RegistryError) and error.code == "E_LOG":
            place = error.field  # the entry
        return _finding(place, error)


def _foreign(registry: Registry) -> Iterator[Finding]:
    if isinstance(registry.store, LocalStore):
        for name in registry.store.top():
            if name not in TOP:
                yield Finding("E_EXTRA", name, "an entry that is not of a registry's layout")
    for place in registry.content.foreign():
        yield Finding("E_EXTRA", place, "an object that nothing of ours has written")
    for one in registry.store.objects(LOGS):
        if one.key.count("/") != 2 or generation_of(one.key) is None:
            yield Finding("E_EXTRA", one.key, "an object that nothing of ours has written")


def _objects(
    registry: Registry, named: set[str], orphan: str, on_checked: Callable[[], None]
) -> Iterator[Finding]:
    """Every object is what its name says, and somebody needs it; `orphan` is said where not."""
    needed = set(named)
    for digest in sorted(named):
        with suppress(*OF_AN_OBJECT):  # told with the version
            needed |= registry.content.parts(digest)
    for digest in list(registry.content.held()):
        try:
            registry.content.verify(digest)
        except SpecctlError as error:
            yield _finding(digest, error)
        on_checked()
        if digest not in needed:
            yield Finding("W_ORPHAN", digest, orphan, is_damage=False)


def _signatures(registry: Registry) -> Iterator[Finding]:
    for place, error in registry.content.unfit_signatures():
        yield _finding(place, error)


def _versions(
    registry: Registry,
    trust: Trust,
    log: Log[NameState],
    on_checked: Callable[[], None],
) -> Iterator[Finding]:
    pointers = log.state.aliases.values()
    for digest, generation in log.state.versions.items():
        moves = {pointer.generation for pointer in pointers if pointer.digest == digest}
        entries = [log.entries[one] for one in sorted({generation} | moves)]
        yield from _version(registry, trust, log, digest, entries)
        on_checked()


def _version(
    registry: Registry,
    trust: Trust,
    log: Log[NameState],
    digest: str,
    entries: list[Logged],
) -> Iterator[Finding]:
    place = f"{log.name}@{digest}"
    error = _content_error(registry, digest)
    if error is not None:
        is_aliased = any(isinstance(logged.entry.action, Move) for logged in entries)
        if not is_aliased and _was_collected(registry, digest, error):
            yield Finding("W_COLLECTED", place, "collected as garbage", is_damage=False)
            return
        yield _finding(place, error)
    checks: list[tuple[str, Callable[[], Any]]] = [
        (
            place,
            lambda: check_artifact(
                registry, trust, log.name, digest, registry.content.signatures(digest)
            ),
        ),
    ]
    checks += [_entry_check(registry, trust, log, logged) for logged in entries]
    for where, check in checks:
        try:
            check()
        except SpecctlError as error:
            yield _finding(where, error)


def _content_error(registry: Registry, digest: str) -> SpecctlError | None:
    try:
        registry.content.fetch(digest, lambda _: None)
    except SpecctlError as error:
        return error
    return None


def _was_collected(registry: Registry, digest: str, error: SpecctlError) -> bool:
    """Whether an artifact is not whole because garbage collection took it, or some of it.

    That is asked once it is missed: a sweep may have begun while the rest was checked.
    """
    if getattr(error, "code", "") != "E_MISSING":
        return False
    try:
        return was_collected(registry.content, digest, _garbage(registry).gone)
    except SpecctlError as other:
        _of_an_object(other)
        return False


def _entry_check(
    registry: Registry, trust: Trust, log: Log[NameState], logged: Logged
) -> tuple[str, Callable[[], None]]:
    """Where an entry stands, and its check."""
    action = logged.entry.action
    what = f"@{action.alias}" if isinstance(action, Move) else ""
    where = f"{log.name}{what}, generation {logged.entry.generation}"
    return where, lambda: check_entry(registry, trust, log, logged)


def _pinned(registry: Registry) -> Iterator[Finding]:
    for one in pins(registry):
        if not one.is_released:
            try:
                registry.content.parts(one.pin.digest)
            except SpecctlError as error:
                yield _finding(f"{PINS}, {one.pin.digest}", error)


def _of_an_object(error: SpecctlError) -> None:
    """Lets pass what says that something is wrong in a registry; ends the check by any other.

    Raises:
        SpecctlError: the error: a store that does not answer, say, is no damage to what it holds.
    """
    if not isinstance(error, OF_AN_OBJECT):
        raise error


def _finding(place: str, error: SpecctlError) -> Finding:
    _of_an_object(error)
    code = getattr(error, "code", "E_STORE")
    found = f"expected {error.expected}, found {error.found}"
    if isinstance(error, ArtifactError) and code == "E_MISSING":
        found += f": {error.field}"  # a version has many objects
    return Finding(code, place, found, is_damage=code != EXPIRED)
