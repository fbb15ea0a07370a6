"""Recomputes chains, digests and signatures, of a whole registry or of one reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from specctl.errors import ArtifactError, CodedError, RegistryError, SpecctlError
from specctl.registry.content import Content
from specctl.registry.log import LOGS, Log, Logged, Move
from specctl.registry.names import Reference, name_of, typed
from specctl.registry.opening import Registry
from specctl.registry.resolving import (
    accepted_signatures,
    check_entry,
    deciding_entries,
    named_digest,
    pointers,
    publication,
)
from specctl.registry.trust import Trust, UntrustedError
from specctl.stores import ObjectTooLargeError, UnreadableError

OBJECT_ERRORS = (ArtifactError, RegistryError, UnreadableError, ObjectTooLargeError)
"""Errors that concern one object; others concern the store."""
_MEND = "restore what is damaged from a copy; delete no entry of a history (docs/operators.md)"


@dataclass(frozen=True)
class Finding:
    """A fault of a registry, or an entry or artifact that the reader's trust file refuses."""

    code: str
    place: str
    found: str
    state: Literal["damage", "not accepted"] = "damage"


@dataclass
class Audit:
    """The number of objects checked, and the findings."""

    num_names: int = 0
    num_entries: int = 0
    num_artifacts: int = 0  # each digest once
    findings: list[Finding] = field(default_factory=list)

    @property
    def damage(self) -> list[Finding]:
        """The findings that are faults."""
        return [one for one in self.findings if one.state == "damage"]

    def sentence(self, url: str) -> str:
        """`no damage: 2 names, 5 entries, 2 artifacts checked`."""
        damage, refused = len(self.damage), len(self.findings) - len(self.damage)
        verdict = f"damage at {_count(damage, 'place')}" if damage else "no damage"
        counts = (
            _count(self.num_names, "name"),
            _count(self.num_entries, "entry", "entries"),
            _count(self.num_artifacts, "artifact"),
        )
        sentence = f"{verdict}: {', '.join(counts)} checked"
        if refused:
            sentence += (
                f"; your trust file does not accept {_count(refused, 'place')}; {_sign(url)}"
            )
        return sentence

    def refuse(self, url: str, reference: str | None = None) -> None:
        """Raises the first finding of damage; of a reference, which is wanted, the first of all."""
        found = self.damage or (self.findings if reference else [])
        if not found:
            return
        first, number = found[0], _count(len(found), "finding")
        fix = _MEND if self.damage else _sign(url)
        problem = f"{first.state}: {number}, the first at {first.place}: {first.found}"
        raise ArtifactError(first.code, reference or url, problem, hint=fix)


def verify(registry: Registry, trust: Trust, reference: Reference | None = None) -> Audit:
    """Checks every version of every history, or the history and version of a reference.

    Raises:
        RegistryError: the reference does not resolve.
        StoreError: the store does not answer, or refuses access.
    """
    done = Audit()
    if reference is not None:
        log = registry.known_log(reference.name)
        digest = named_digest(log, reference, trust)
        entries = deciding_entries(log, reference, digest, trust)
        done.num_names, done.num_entries, done.num_artifacts = 1, len(log.entries), 1
        done.findings += _version(log, trust, digest, entries)
        return done
    digests, segments = set[str](), list[str]()
    try:
        segments = sorted({*registry.segments(), *registry.remembered()})
    except UnreadableError as error:
        done.findings.append(_finding(f"{registry.url}, {LOGS}", error))
    for segment in segments:
        try:
            log = registry.log(name_of(segment))
        except OBJECT_ERRORS as error:
            place = f"{registry.url}, {LOGS}/{segment}"
            if isinstance(error, RegistryError) and error.code == "E_LOG":
                place = error.field  # the entry
            done.findings.append(_finding(place, error))
            continue
        done.num_names += bool(log.entries)
        done.num_entries += len(log.entries)
        aliases = pointers(log, trust).values()
        for digest in log.state.versions:
            moves = {at.generation for at in aliases if at.digest == digest}
            published = publication(log, trust, digest)
            entries = (published, *(log.entries[one] for one in sorted(moves)))
            done.findings += _version(log, trust, digest, entries)
            digests.add(digest)
    done.num_artifacts = len(digests)
    done.findings = list(dict.fromkeys(done.findings))
    return done


def _version(log: Log, trust: Trust, digest: str, entries: Sequence[Logged]) -> Iterator[Finding]:
    """Content, signatures and entries of one version."""
    place, content = f"{log.name}@{digest}", Content(log.store)
    checks: list[tuple[str, Callable[[], Any]]] = [
        (place, lambda: content.fetch(digest)),
        (place, lambda: accepted_signatures(log, trust, digest)),
    ]
    for logged in entries:
        action = logged.entry.action
        alias = f"@{action.alias}" if isinstance(action, Move) else ""
        where = f"{log.name}{alias}, generation {logged.entry.generation}"
        checks.append((where, partial(check_entry, trust, logged)))
    for where, check in checks:
        try:
            check()
        except OBJECT_ERRORS as error:
            yield _finding(where, error)
    try:
        for key, damage in content.damaged_signatures(digest):
            yield _finding(key, damage)
    except UnreadableError as error:
        yield _finding(place, error)


def _finding(place: str, error: SpecctlError) -> Finding:
    code = getattr(error, "code", "E_STORE")
    found = error.problem if isinstance(error, CodedError) else error.message
    if code in ("E_DIGEST", "E_MISSING", "E_SIZE") and isinstance(error, ArtifactError):
        found += "" if place in error.field else f": {error.field}"
    state: Literal["damage", "not accepted"]
    state = "not accepted" if isinstance(error, UntrustedError) else "damage"
    return Finding(code, place, found, state)


def _sign(url: str) -> str:
    command = typed(url, "push", "FOLDER", "NAME", "--alias", "ALIAS", "--key", "KEY")
    return f"sign again what you still need, with a trusted key: {command}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
