"""Aliases: moved by compare-and-swap, rolled back by a new generation; nothing is deleted."""

from __future__ import annotations

from typing import Literal

from specctl.artifacts.registry.entries import Logged, Move, Note
from specctl.artifacts.registry.holding import Hold
from specctl.artifacts.registry.log import Log, commit
from specctl.artifacts.registry.names import parse_alias, parse_digest
from specctl.artifacts.registry.resolving import check_published
from specctl.artifacts.registry.state import NameState
from specctl.artifacts.registry.trusting import ROLES, check_artifact, check_entry
from specctl.artifacts.registry.writing import Writer, hold_whole
from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError, UsageError


def promote(
    writer: Writer,
    name: str,
    alias: str,
    digest: str,
    *,
    expect: str | None = None,
    note: Note | None = None,
) -> Logged:
    """Points an alias to a published version, by compare-and-swap on where it points now.

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


def rollback(writer: Writer, name: str, alias: str, *, note: Note, to: str | None = None) -> Logged:
    """Points an alias back to an older version.

    Args:
        note: its reason must be given.
        to: the version; None is the one that the alias had before its last move.

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
    pointer = log.state.aliases.get(alias)
    last = log.entries[pointer.generation].entry.action if pointer else None
    if isinstance(last, Move) and last.expected_digest is not None:
        return last.expected_digest
    raise RegistryError(
        "E_NO_PREVIOUS",
        f"{log.name}@{alias}",
        expected="an alias that was moved before",
        found="an alias with one move" if pointer else "no such alias",
        fix="promote a version instead, or say --to",
    )


def _commit(writer: Writer, log: Log[NameState], move: Move, note: Note) -> Logged:
    """Commits a move. A race lost to anything but this alias is run again."""
    registry, trust = writer.registry, writer.trusted()
    held = _hold_version(writer, log, move.digest, trust)

    def decide(state: NameState) -> Move:
        expected = state.expected(move.alias)
        if expected != (move.expected_digest, move.expected_generation):
            raise _conflict(log.name, move.alias, move.expected_digest, expected[0])
        return move

    before = writer.guard(held, trust, log.name, ROLES[move.kind])
    logged = commit(log, decide, writer.author, now=registry.clock.utc, note=note, before=before)
    assert logged is not None
    return logged


def _hold_version(writer: Writer, log: Log[NameState], digest: str, trust: Trust) -> Hold:
    """Holds a version of the name, whole, published and signed as readers will ask."""
    registry = writer.registry
    check_published(log, digest)
    check_entry(registry, trust, log.name, log.entries[log.state.versions[digest]])
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
