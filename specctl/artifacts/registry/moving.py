"""Aliases: moved by compare-and-swap, rolled back by a new generation; nothing is deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specctl.artifacts.registry.entries import Logged, Move, Note
from specctl.artifacts.registry.holding import Hold
from specctl.artifacts.registry.log import Log, commit
from specctl.artifacts.registry.names import parse_alias, parse_digest
from specctl.artifacts.registry.resolving import check_published
from specctl.artifacts.registry.state import NameState
from specctl.artifacts.registry.trusting import check_artifact, check_entry, stands
from specctl.artifacts.registry.writing import Writer, hold_whole
from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError, UsageError


@dataclass(frozen=True)
class Moved(Logged):
    """The entry that an alias rests on after a move.

    Attributes:
        changed: whether this move wrote it; an alias that is there already is left as it is.
    """

    changed: bool = True


def promote(
    writer: Writer,
    name: str,
    alias: str,
    digest: str,
    *,
    expect: str | None = None,
    note: Note | None = None,
) -> Moved:
    """Points an alias to a published version, by compare-and-swap on where it points now.

    Where it points there already nothing is written, unless that renews a signature or an expiry.

    Args:
        expect: the digest that the alias must have; None takes what it has when this begins.

    Raises:
        RegistryError: E_ALIAS_CONFLICT with the current value if another moved it meanwhile,
            E_MISSING for a digest not published under the name, E_BUSY, E_TIMEOUT, E_LOG.
        ArtifactError: the version's content or a signature is not right.
    """
    log = writer.registry.known_log(name)
    parse_alias(alias)
    parse_digest(digest)
    current = log.state.expected(alias)[0]
    if expect is not None and current != expect:
        raise _conflict(name, alias, expect, current)
    return _commit(writer, log, _planned("alias", log, alias, digest), note or Note())


def rollback(writer: Writer, name: str, alias: str, *, note: Note, to: str | None = None) -> Moved:
    """Points an alias back to an older version; see `promote` where it is there already.

    Args:
        note: its reason must be given.
        to: the version; None is the one that the alias had before the version that it has now.

    Raises:
        RegistryError: E_NO_PREVIOUS; see also `promote`.
        UsageError: no reason.
    """
    if not (note.reason or "").strip():
        raise UsageError("--reason", expected="a reason", found="none", fix="say why")
    log = writer.registry.known_log(name)
    parse_alias(alias)
    to = parse_digest(to) if to is not None else _previous(log, alias)
    planned = _planned("rollback", log, alias, to)
    return _commit(writer, log, planned, note)


def _planned(
    kind: Literal["alias", "rollback"], log: Log[NameState], alias: str, digest: str
) -> Move:
    """The move that follows the alias's last one, as it is known now."""
    expected_digest, expected_generation = log.state.expected(alias)
    return Move(
        kind=kind,
        alias=alias,
        digest=digest,
        expected_digest=expected_digest,
        expected_generation=expected_generation,
    )


def _previous(log: Log[NameState], alias: str) -> str:
    """The version before the one that an alias has. Moves that renewed it only are passed over."""
    digest, generation = log.state.expected(alias)
    previous = digest
    while generation is not None and previous == digest:
        last = log.entries[generation].entry.action
        assert isinstance(last, Move)
        previous, generation = last.expected_digest, last.expected_generation
    if previous is None or previous == digest:
        raise RegistryError(
            "E_NO_PREVIOUS",
            f"{log.name}@{alias}",
            expected="an alias that was moved before",
            found="no such alias" if digest is None else "an alias of one version",
            fix="promote a version instead, or say --to",
        )
    return previous


def _commit(writer: Writer, log: Log[NameState], move: Move, note: Note) -> Moved:
    """Commits a move. A race lost to anything but this alias is run again."""
    registry, trust = writer.registry, writer.trusted(log.name)
    held = _hold_version(writer, log, move.digest, trust)

    def decide(state: NameState) -> Move | None:
        expected = state.expected(move.alias)
        if expected != (move.expected_digest, move.expected_generation):
            raise _conflict(log.name, move.alias, move.expected_digest, expected[0])
        return None if _is_there(writer, log, trust, move, note) else move

    before = writer.guard(held, trust, log)
    logged = commit(log, decide, writer.author, now=registry.clock.utc, note=note, before=before)
    if logged is not None:
        return Moved(logged.entry, logged.envelope, logged.digest)
    there = log.entries[log.state.aliases[move.alias].generation]
    return Moved(there.entry, there.envelope, there.digest, changed=False)


def _is_there(writer: Writer, log: Log[NameState], trust: Trust, move: Move, note: Note) -> bool:
    """Whether a move would change nothing: neither the version, nor an expiry, nor who signed."""
    if move.expected_generation is None or move.digest != move.expected_digest:
        return False
    there = log.entries[move.expected_generation]
    is_for_ever = note.expires is None and there.entry.expires is None
    keys = writer.author.keys
    return is_for_ever and stands(writer.registry, trust, log, there, keys)


def _hold_version(writer: Writer, log: Log[NameState], digest: str, trust: Trust) -> Hold:
    """Holds a version of the name, whole, and published and signed so that readers take it now."""
    registry = writer.registry
    check_published(log, digest)
    check_entry(registry, trust, log, log.entries[log.state.versions[digest]])
    held = hold_whole(writer, digest)
    check_artifact(registry, trust, log.name, digest, registry.content.signatures(digest))
    return held


def _conflict(name: str, alias: str, expected: str | None, found: str | None) -> RegistryError:
    return RegistryError(
        "E_ALIAS_CONFLICT",
        f"{name}@{alias}",
        expected=expected or "a new alias",
        found=found or "no such alias",
        fix="look at what it is now, and decide again",
    )
