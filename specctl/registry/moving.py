"""Aliases: moved by compare-and-swap, rolled back by a new generation; nothing is deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError, UsageError
from specctl.registry.entries import Logged, Move, Note
from specctl.registry.holding import Hold
from specctl.registry.log import Log, commit
from specctl.registry.names import parse_alias, parse_digest
from specctl.registry.resolving import check_published
from specctl.registry.state import NameState, Pointer
from specctl.registry.trusting import check_artifact, check_entry, stands
from specctl.registry.writing import Writer, hold_whole
from specctl.stores.interface import UnknownOutcomeError

MAX_NAMED = 3
"""Versions that a refusal names, newest first."""


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


def rollback(
    writer: Writer,
    name: str,
    alias: str,
    *,
    note: Note,
    to: str | None = None,
    expect: str | None = None,
) -> Moved:
    """Points an alias back to an older version; see `promote` where it is there already.

    Args:
        note: its reason must be given.
        to: one of the versions that the alias had before; None is the one right before the version
            that it has now. What was rolled back from is none of them any more.
        expect: the version to go back from. Where the alias's last move was a rollback from it,
            this one is done already: so it may be said again after a lost answer, or by two people.

    Raises:
        RegistryError: E_NO_PREVIOUS; see also `promote`.
        UsageError: no reason.
        UnknownOutcomeError: it cannot be told whether it was done; say it again with `expect`.
    """
    if not (note.reason or "").strip():
        raise UsageError("--reason", expected="a reason", found="none", fix="say why")
    log = writer.registry.known_log(name)
    parse_alias(alias)
    at = log.state.aliases.get(alias)
    if expect is not None and (at is None or at.digest != expect):
        return _done(log, alias, expect, to)
    digest = _previous(name, alias, at, parse_digest(to) if to is not None else None)
    try:
        return _commit(writer, log, _planned("rollback", log, alias, digest), note)
    except UnknownOutcomeError as lost:
        assert at is not None
        raise UnknownOutcomeError(
            lost.what,
            expected=lost.expected,
            found=lost.found,
            fix=f"say it again with --expect {at.digest}: where it was done, that changes nothing",
        ) from None


def _done(log: Log[NameState], alias: str, expect: str, to: str | None) -> Moved:
    """The rollback that took an alias away from a version, if that was its last move.

    Raises:
        RegistryError: E_ALIAS_CONFLICT.
    """
    at = log.state.aliases.get(alias)
    last = None if at is None else log.entries[at.generation]
    action = None if last is None else last.entry.action
    if (
        last is None
        or not isinstance(action, Move)
        or (action.kind, action.expected_digest) != ("rollback", expect)
        or to not in (None, action.digest)
    ):
        raise _conflict(log.name, alias, expect, None if at is None else at.digest)
    return Moved(last.entry, last.envelope, last.digest, changed=False)


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


def _previous(name: str, alias: str, at: Pointer | None, to: str | None) -> str:
    """The version to go back to: the one before, or one that the alias had and still goes back to.

    Raises:
        RegistryError: E_NO_PREVIOUS.
    """
    if at is None or (to is None and at.below is None):
        raise _no_previous(
            name,
            alias,
            "an alias that was moved before",
            "no such alias" if at is None else "an alias with nothing older to go back to",
        )
    if to is None:
        assert at.below is not None
        return at.below.digest
    if at.find(to) is None:
        older = list(dict.fromkeys(one.digest for one in at.history() if one is not at))
        named = ", ".join(older[:MAX_NAMED]) or "none"
        more = f" and {len(older) - MAX_NAMED} more" if len(older) > MAX_NAMED else ""
        raise _no_previous(name, alias, f"a version that it had before: {named}{more}", to)
    return to


def _no_previous(name: str, alias: str, expected: str, found: str) -> RegistryError:
    return RegistryError(
        "E_NO_PREVIOUS",
        f"{name}@{alias}",
        expected=expected,
        found=found,
        fix="to point it to one that it never had, or was rolled back from: specctl registry "
        "promote",
    )


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
