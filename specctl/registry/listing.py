"""A registry as rows of plain values for scripts, and as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specctl.artifacts.compatibility import Candidate, Match
from specctl.artifacts.describe import Description
from specctl.artifacts.manifest import parse_manifest, utc_now
from specctl.artifacts.signing import parse_envelope
from specctl.errors import ArtifactError, shown
from specctl.registry.log import READ_AHEAD, Log, Logged, Move
from specctl.registry.names import Reference
from specctl.registry.opening import Registry
from specctl.registry.resolving import resolve_in
from specctl.registry.trust import Trust
from specctl.registry.verifying import OBJECT_ERRORS

Row = dict[str, Any]
_HEADERS = {
    "num_versions": "versions",
    "num_names": "names",
    "num_entries": "entries",
    "num_artifacts": "artifacts",
    "is_damage": "damage",
    "key_id": "key",
    "key_ids": "keys",
    "alias_expires": "alias expires",
    "refusal": "refused for",
}


def name_rows(registry: Registry) -> list[Row]:
    """One row a name: versions, aliases, newest generation, or the reason it cannot be read."""
    rows: list[Row] = []
    for name, log in histories(registry):
        if not isinstance(log, Log):
            rows.append({"name": name, "error": str(log)})
            continue
        versions = list(log.state.versions)
        row = {
            "name": name,
            "num_versions": len(versions),
            "generation": len(log.entries) - 1,
            "newest_digest": versions[-1] if versions else None,
            "aliases": {alias: at.digest for alias, at in log.state.aliases.items()},
        }
        rows.append(row)
    return rows


def histories(registry: Registry) -> Iterator[tuple[str, Log | Exception]]:
    """Every name with its history, or with the reason that it cannot be read, in order of names.

    Many are read at once: a bucket takes some tenth of a second for each request.
    """

    def read(name: str) -> tuple[str, Log | Exception]:
        try:
            return name, registry.log(name)
        except OBJECT_ERRORS as error:
            return name, error

    with ThreadPoolExecutor(READ_AHEAD) as pool:
        yield from pool.map(read, registry.names())


def version_rows(log: Log) -> list[Row]:
    """One row a version, oldest first, with the aliases that point to it.

    The entry of an alias may expire before that of the version, which stays loadable.
    """
    rows = []
    for number, (digest, generation) in enumerate(log.state.versions.items(), start=1):
        aliases = {
            alias: log.entries[at.generation].entry.expires
            for alias, at in log.state.aliases.items()
            if at.digest == digest
        }
        entry = log.entries[generation].entry
        row = {
            "version": f"v{number}",
            "digest": digest,
            "generation": generation,
            "published": entry.created,
            "expires": entry.expires,
            "actor": entry.actor,
            "aliases": list(aliases),
            "alias_expires": {alias: end for alias, end in aliases.items() if end is not None},
        }
        rows.append(row)
    return rows


def entry_row(logged: Logged) -> Row:
    """One entry of a history."""
    entry, action = logged.entry, logged.entry.action
    move = action if isinstance(action, Move) else None
    return {
        "name": entry.name,
        "generation": entry.generation,
        "kind": action.kind,
        "alias": move and move.alias,
        "digest": action.digest,
        "previous_digest": move and move.expected_digest,
        "created": entry.created,
        "expires": entry.expires,
        "actor": entry.actor,
        "reason": entry.reason,
        "key_ids": [one.key_id for one in parse_envelope(logged.envelope).signatures],
        "entry_digest": logged.digest,
    }


def key_rows(trust: Trust) -> list[Row]:
    """One row a trusted or revoked key."""
    return [
        {
            "key_id": key.key_id,
            "state": key.state(utc_now()),
            "roles": key.roles,
            "names": key.names,
            "until": key.not_after,
            "comment": key.comment or None,
        }
        for key in trust.keys
    ]


def match_row(match: Match, *, as_json: bool) -> Row:
    """One result of a search; for people each difference is a sentence with its consequence."""
    differences: list[Any] = [vars(one) if as_json else one.sentence() for one in match.differences]
    return {
        "reference": match.candidate.reference,
        "digest": match.candidate.digest,
        "exact": match.exact if as_json else match.closeness(),
        "by_name": match.by_name,
        "loadable": match.loadable,
        "refusal": match.candidate.refusal,
        "differences": differences,
    }


def candidates(
    registry: Registry, trust: Trust, on_unreadable: Callable[[str], None]
) -> Iterator[Candidate]:
    """The versions that a search may find: those of aliases, and the newest of each name.

    A version whose entries a pull would refuse carries the reason. Signatures of artifacts, which
    are not in the log, are left to the pull.

    Args:
        on_unreadable: receives a sentence about a damaged name or version; others are found.
    """
    for name, log in histories(registry):
        if not isinstance(log, Log):
            on_unreadable(str(log))
            continue
        found = [(at.digest, Reference(name, alias)) for alias, at in log.state.aliases.items()]
        newest = list(log.state.versions)[-1:]
        if newest and newest[0] not in {digest for digest, _ in found}:
            found.append((newest[0], Reference(name, digest=newest[0])))
        for digest, reference in found:
            try:
                manifest = parse_manifest(registry.content.manifest(digest))
            except OBJECT_ERRORS as error:
                on_unreadable(f"{reference}: {error}")
                continue
            refusal = None
            try:
                resolve_in(log, reference, trust)
            except ArtifactError as error:
                refusal = f"{error.code}: expected {error.expected}, found {error.found}"
            yield Candidate(str(reference), digest, manifest, refusal)


def table(title: str, rows: Sequence[Row], columns: Iterable[str]) -> Description:
    """Rows as a table for people; text from other writers is made printable.

    A column that is empty in all rows is left out.
    """
    names = [name for name in columns if any(_is_given(row.get(name)) for row in rows)]
    cells = tuple(tuple(_cell(row.get(name)) for name in names) for row in rows)
    return Description(title, (), tuple(_HEADERS.get(name, name) for name in names), cells)


def _is_given(value: Any) -> bool:
    return value is not None and value != {} and value != [] and value != ()


def _cell(value: Any) -> str:
    if not _is_given(value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(inner) for inner in value)
    return shown(str(value))
