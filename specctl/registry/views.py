"""A registry in words: rows of plain values for scripts, tables of them for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from specctl.artifacts.describe import Description
from specctl.artifacts.lookup import Candidate, Match
from specctl.artifacts.manifest import parse_manifest
from specctl.artifacts.signing import Trust, parse_envelope
from specctl.errors import ArtifactError
from specctl.plain_text import shown
from specctl.registry.entries import Keep, Logged, Mark, Move, Publish, Sweep
from specctl.registry.fsck import OF_AN_OBJECT
from specctl.registry.log import Log
from specctl.registry.names import Reference
from specctl.registry.resolving import deciding, named_digest
from specctl.registry.room import Registry
from specctl.registry.settling import settle
from specctl.registry.state import NameState
from specctl.registry.trusting import check_entry

Row = dict[str, Any]
_HEADERS = {
    "num_versions": "versions",
    "num_digests": "digests",
    "num_released": "pins released",
    "num_names": "names",
    "num_entries": "entries",
    "num_artifacts": "artifacts",
    "num_collected": "collected",
    "num_pins": "pins",
    "is_damage": "damage",
    "key_ids": "keys",
    "alias_expires": "alias expires",
    "refusal": "refused for",
}
"""Words for people, where the name of a field is none."""


def name_rows(registry: Registry) -> list[Row]:
    """One row a name: versions, aliases, newest generation, or why it cannot be read."""
    return [_name_row(registry, name) for name in registry.names()]


def _name_row(registry: Registry, name: str) -> Row:
    try:
        log = registry.log(name)
    except OF_AN_OBJECT as error:
        return {"name": name, "error": str(error)}
    aliases = {alias: pointer.digest for alias, pointer in sorted(log.state.aliases.items())}
    return {
        "name": name,
        "num_versions": len(log.state.versions),
        "generation": len(log.entries) - 1,
        "newest_digest": list(log.state.versions)[-1] if log.state.versions else None,
        "aliases": aliases,
    }


def version_rows(log: Log[NameState]) -> list[Row]:
    """One row a version, oldest first, with the aliases that point to it."""
    return [_version_row(log, digest) for digest in log.state.versions]


def _version_row(log: Log[NameState], digest: str) -> Row:
    """The entry of an alias may expire before that of the version, which stays loadable."""
    generation = log.state.versions[digest]
    entry = log.entries[generation].entry
    named = {a: p.generation for a, p in sorted(log.state.aliases.items()) if p.digest == digest}
    ends = {alias: log.entries[moved].entry.expires for alias, moved in named.items()}
    return {
        "digest": digest,
        "generation": generation,
        "published": entry.created,
        "expires": entry.expires,
        "actor": entry.actor,
        "aliases": list(named),
        "alias_expires": {alias: end for alias, end in ends.items() if end is not None},
    }


def entry_row(logged: Logged) -> Row:
    """One entry of a history."""
    entry, action = logged.entry, logged.entry.action
    digest = action.digest if isinstance(action, Publish | Move) else None
    previous = action.expected_digest if isinstance(action, Move) else None
    digests = action.digests if isinstance(action, Mark | Keep | Sweep) else None
    return {
        "name": entry.name,
        "generation": entry.generation,
        "kind": action.kind,
        "alias": action.alias if isinstance(action, Move) else None,
        "digest": digest,
        "previous_digest": previous,
        "num_digests": None if digests is None else len(digests),
        "created": entry.created,
        "expires": entry.expires,
        "actor": entry.actor,
        "reason": entry.reason,
        "key_ids": [one.key_id for one in parse_envelope(logged.envelope).signatures],
        "entry_digest": logged.digest,
    }


def match_row(match: Match) -> Row:
    """One result of a search, with every difference named."""
    return {
        "reference": match.reference,
        "digest": match.digest,
        "exact": match.exact,
        "by_name": match.by_name,
        "loadable": match.loadable,
        "refusal": match.refusal,
        "differences": [vars(difference) for difference in match.differences],
    }


def match_words(match: Match) -> Row:
    """The same for people: each difference as a sentence that says what may be wrong."""
    sentences = [one.sentence() for one in match.differences]
    return {**match_row(match), "exact": match.closeness(), "differences": sentences}


def candidates(
    registry: Registry, trust: Trust, on_unreadable: Callable[[str], None]
) -> Iterator[Candidate]:
    """What a search may find: what aliases point to, and the newest version of each name.

    What a pull would refuse for its entries is told with it; signatures of artifacts, which are
    not in the log, are left to the pull.

    Args:
        on_unreadable: takes the sentence of a name or version that is damaged, or of a newer
            specctl; the others are found all the same.
    """
    settings = registry.settings_log().entries
    for name in registry.names():
        try:
            log = registry.log(name)
        except OF_AN_OBJECT as error:
            on_unreadable(str(error))
            continue
        trusted, unsettled = _trust_here(registry, settings, trust, name)
        for digest, reference in _found(name, log.state):
            try:
                manifest = parse_manifest(registry.content.manifest(digest))
            except OF_AN_OBJECT as error:
                on_unreadable(f"{reference}: {error}")
                continue
            refusal = unsettled or _refusal(registry, trusted, log, reference)
            yield Candidate(str(reference), digest, manifest, refusal)


def _found(name: str, state: NameState) -> list[tuple[str, Reference]]:
    """Digest and reference of every alias, and of the newest version where none points to it.

    Each alias rests on an entry of its own: one that is refused says nothing of another.
    """
    found = [(p.digest, Reference(name, alias=a)) for a, p in sorted(state.aliases.items())]
    named = {digest for digest, _ in found}
    newest = [digest for digest in list(state.versions)[-1:] if digest not in named]
    return found + [(digest, Reference(name, digest=digest)) for digest in newest]


def _trust_here(
    registry: Registry, settings: Sequence[Logged], trust: Trust, name: str
) -> tuple[Trust, str | None]:
    """What the user trusts in a registry under a name, or why nothing of it is loaded."""
    try:
        return settle(registry.url, settings, trust, name, registry.clock.utc())[0], None
    except ArtifactError as error:
        return trust, _why(error)


def _refusal(
    registry: Registry, trust: Trust, log: Log[NameState], reference: Reference
) -> str | None:
    """Why the entries that a reference rests on are not believed now; None if they are."""
    try:
        for logged in deciding(log, reference, named_digest(log, reference)):
            check_entry(registry, trust, log, logged)
    except ArtifactError as error:
        return _why(error)
    return None


def _why(error: ArtifactError) -> str:
    return f"{error.code}: expected {error.expected}, found {error.found}"


def table(title: str, rows: Sequence[Row], columns: Iterable[str]) -> Description:
    """Rows as a table for people; every text of a stranger is made harmless.

    A column that says nothing in any row is left out. Digests are whole: no verb takes their
    beginnings.
    """
    names = [name for name in columns if any(_says(row.get(name)) for row in rows)]
    cells = tuple(tuple(_cell(row.get(name)) for name in names) for row in rows)
    return Description(title, (), tuple(_HEADERS.get(name, name) for name in names), cells)


def _says(value: Any) -> bool:
    return value is not None and value != {} and value != [] and value != ()


def _cell(value: Any) -> str:
    if not _says(value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(inner) for inner in value)
    return shown(str(value))
