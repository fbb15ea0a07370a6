"""Recomputes everything a registry says, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specctl.artifacts.registry.entries import Logged, Move
from specctl.artifacts.registry.layout import LOGS, generation_of
from specctl.artifacts.registry.log import Log
from specctl.artifacts.registry.names import RESERVED, Reference, name_of_segment
from specctl.artifacts.registry.pins import pins
from specctl.artifacts.registry.resolving import deciding, named_digest
from specctl.artifacts.registry.room import Registry
from specctl.artifacts.registry.state import NameState
from specctl.artifacts.registry.trusting import check_artifact, check_entry, effective_trust
from specctl.artifacts.signing import Trust
from specctl.errors import ArtifactError, RegistryError, SpecctlError


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        is_damage: false for what only takes room (orphans) or waits (an unfinished sweep).
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
    """
    trusted = trust
    try:
        trusted = effective_trust(registry, trust)
    except SpecctlError as error:
        yield _finding("settings", error)
    yield from _foreign(registry)
    logs, named = [], set[str]()
    for segment in registry.segments():
        log = _log(registry, segment)
        if isinstance(log, Finding):
            yield log
        elif log.name not in RESERVED:
            logs.append(log)
            named |= set(log.state.versions)
    yield from _objects(registry, named, on_checked)
    for log in logs:
        yield from _versions(registry, trusted, log, on_checked)
    yield from _pinned(registry)
    yield from _sweep_under_way(registry)


def verify(registry: Registry, reference: Reference, trust: Trust) -> Iterator[Finding]:
    """The same for one reference: its history, its content, its signatures.

    Raises:
        RegistryError: a reference that means nothing here.
    """
    trusted = effective_trust(registry, trust)
    log = registry.known_log(reference.name)
    digest = named_digest(log, reference)
    entries = deciding(log, reference, digest)
    yield from _version(registry, trusted, log.name, digest, entries)


def _log(registry: Registry, segment: str) -> Log[Any] | Finding:
    place = f"{registry.store.url}, {LOGS}/{segment}"
    try:
        return registry.any_log(name_of_segment(segment))
    except SpecctlError as error:
        return _finding(place, error)


def _foreign(registry: Registry) -> Iterator[Finding]:
    for place in registry.content.foreign():
        yield Finding("E_EXTRA", place, "an object that nothing of ours has written")
    for one in registry.store.objects(LOGS):
        if one.key.count("/") != 2 or generation_of(one.key) is None:
            yield Finding("E_EXTRA", one.key, "an object that nothing of ours has written")


def _objects(
    registry: Registry, named: set[str], on_checked: Callable[[], None]
) -> Iterator[Finding]:
    """Every object is what its name says, and somebody needs it."""
    needed = set(named)
    for digest in sorted(named):
        try:
            needed |= registry.content.parts(digest)
        except ArtifactError:
            continue  # told with the version
    for digest in list(registry.content.held()):
        try:
            registry.content.verify(digest)
        except SpecctlError as error:
            yield _finding(digest, error)
        on_checked()
        if digest not in needed:
            yield Finding("W_ORPHAN", digest, "no log names it", is_damage=False)


def _versions(
    registry: Registry, trust: Trust, log: Log[NameState], on_checked: Callable[[], None]
) -> Iterator[Finding]:
    pointers = {one.digest: one.generation for one in log.state.aliases.values()}
    for digest, generation in log.state.versions.items():
        generations = {generation} | ({pointers[digest]} if digest in pointers else set())
        entries = [log.entries[one] for one in sorted(generations)]
        yield from _version(registry, trust, log.name, digest, entries)
        on_checked()


def _version(
    registry: Registry, trust: Trust, name: str, digest: str, entries: list[Logged]
) -> Iterator[Finding]:
    place = f"{name}@{digest}"
    is_aliased = any(isinstance(logged.entry.action, Move) for logged in entries)
    if not is_aliased and digest in registry.garbage_log().state.collected:
        yield Finding("W_COLLECTED", place, "collected as garbage", is_damage=False)
        return
    checks: list[Callable[[], Any]] = [
        lambda: registry.content.fetch(digest, lambda _: None),
        lambda: check_artifact(registry, trust, name, digest, registry.content.signatures(digest)),
    ]
    checks += [_entry_check(registry, trust, name, logged) for logged in entries]
    for check in checks:
        try:
            check()
        except SpecctlError as error:
            yield _finding(place, error)


def _entry_check(registry: Registry, trust: Trust, name: str, logged: Logged) -> Callable[[], None]:
    return lambda: check_entry(registry, trust, name, logged)


def _pinned(registry: Registry) -> Iterator[Finding]:
    try:
        for one in pins(registry):
            if not one.is_released:
                registry.content.parts(one.pin.digest)
    except SpecctlError as error:
        yield _finding("pins", error)


def _sweep_under_way(registry: Registry) -> Iterator[Finding]:
    try:
        generation = registry.garbage_log().state.sweep_generation
    except RegistryError:
        return  # told with the logs
    if generation is not None:
        yield Finding("W_SWEEP", f"sweep {generation}", "not ended", is_damage=False)


def _finding(place: str, error: SpecctlError) -> Finding:
    code = getattr(error, "code", "E_STORE")
    return Finding(code, place, f"expected {error.expected}, found {error.found}")
