"""Rows of plain values about a registry, and tables of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specctl.artifacts.card import Description
from specctl.artifacts.manifest import Domain, parse_manifest
from specctl.artifacts.signing import parse_envelope
from specctl.errors import ArtifactError, shown
from specctl.registry.log import READ_AHEAD, Log, Logged, Move
from specctl.registry.names import Reference, contains
from specctl.registry.opening import Registry
from specctl.registry.resolving import check_entry, pointers, resolve_in
from specctl.registry.trust import Trust
from specctl.registry.verifying import OBJECT_ERRORS

Row = dict[str, Any]
logger = logging.getLogger(__name__)
SEARCHED = (
    *("reference", "digest", "target", "target_digest", "drafter", "drafter_digest"),
    *("hardware", "dtype", "workload"),
)
"""Columns that a search compares words with."""
_HEADERS = {
    "num_versions": "versions",
    "num_names": "names",
    "num_entries": "entries",
    "num_artifacts": "artifacts",
    "generation": "entry",
    "key_id": "key",
    "batch_size": "batch size",
    "context_tokens": "context tokens",
    "refusal": "refused for",
}


def name_rows(registry: Registry, trust: Trust) -> list[Row]:
    """One row per name: versions, aliases and newest generation, or the reason it is unreadable."""
    rows: list[Row] = []
    for name, log in histories(registry):
        if isinstance(log, Exception):
            rows.append({"name": name, "error": str(log)})
            continue
        versions = list(log.state.versions)
        rows.append(
            {
                "name": name,
                "num_versions": len(versions),
                "generation": len(log.entries) - 1,
                "newest_digest": versions[-1] if versions else None,
                "aliases": (at := {one: at.digest for one, at in pointers(log, trust).items()}),
                "refused": [one for one in at if _refusal(log, Reference(name, one), trust)],
            }
        )
    return rows


def histories(registry: Registry) -> Iterator[tuple[str, Log | Exception]]:
    """Every name, sorted, with its history or the reason it is unreadable.

    Histories are read in parallel: each request to a bucket takes about a tenth of a second.
    """

    def read(name: str) -> tuple[str, Log | Exception]:
        try:
            return name, registry.log(name)
        except OBJECT_ERRORS as error:
            return name, error

    with ThreadPoolExecutor(READ_AHEAD) as pool:
        yield from pool.map(read, registry.names())


def version_rows(log: Log, trust: Trust) -> list[Row]:
    """One row per version, oldest first, with the aliases that point to it."""
    rows = []
    for number, (digest, [generation, *_]) in enumerate(log.state.versions.items(), start=1):
        aliases = [alias for alias, at in pointers(log, trust).items() if at.digest == digest]
        version = Reference(log.name, digest=digest)
        named = {f"v{number}": version} | {one: Reference(log.name, one) for one in aliases}
        entry = log.entries[generation].entry
        row = {
            "version": f"v{number}",
            "digest": digest,
            "generation": generation,
            "published": entry.created,
            "actor": entry.actor,
            "aliases": aliases,
            "refused": [word for word, one in named.items() if _refusal(log, one, trust)],
        }
        rows.append(row)
    return rows


def _refusal(log: Log, reference: Reference, trust: Trust) -> str | None:
    """The reason for which a pull would refuse the entries of a reference."""
    try:
        resolve_in(log, reference, trust)
    except ArtifactError as error:
        return f"{error.code}: {error.problem}"
    return None


def log_rows(log: Log, trust: Trust) -> list[Row]:
    """The entries of a history, with the reason for which a trust file does not accept them."""
    rows = []
    for logged in log.entries:
        row = {**entry_row(logged), "refusal": None}
        try:
            check_entry(trust, logged)
        except ArtifactError as error:
            row["refusal"] = f"{error.code}: {error.problem}"
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
        "created": entry.created,
        "actor": entry.actor,
        "reason": entry.reason,
        "key_id": parse_envelope(logged.envelope).key_id,
        "entry_digest": logged.digest,
    }


def search(registry: Registry, trust: Trust, words: Sequence[str]) -> Iterator[Row]:
    """Versions that match every word, among the aliased ones and the newest of each name.

    A row has the pair and domain of the artifact and, as `refusal`, the reason for which a pull
    would refuse its entries; signatures of artifacts are not checked. Damaged names and versions
    are skipped with a warning.

    Args:
        words: parts of the reference, a digest, or the name of a model, device or workload.
    """
    for name, log in histories(registry):
        if isinstance(log, Exception):
            logger.warning("%s", log)
            continue
        aliases = pointers(log, trust)
        found = [(at.digest, Reference(name, alias)) for alias, at in aliases.items()]
        newest = list(log.state.versions)[-1:]
        if newest and newest[0] not in {digest for digest, _ in found}:
            found.append((newest[0], Reference(name, digest=newest[0])))
        for digest, reference in found:
            try:
                row = _made_on(registry.content.manifest(digest))
            except OBJECT_ERRORS as error:
                logger.warning("%s: %s", reference, error)
                continue
            refusal = _refusal(log, reference, trust)
            row = {"reference": str(reference), "digest": digest, **row, "refusal": refusal}
            text = " ".join(str(row[name] or "") for name in SEARCHED)
            if all(contains(text, word) for word in words):
                yield row


def _made_on(data: bytes) -> Row:
    """Pair and domain of a manifest; None for unknown fields."""
    manifest = parse_manifest(data)
    domain = (manifest.domain or Domain()).model_dump(mode="json")
    known = ("hardware", "dtype", "batch_size", "context_tokens", "workload")
    return {
        "target": manifest.pair.target,
        "target_digest": manifest.pair.target_digest,
        "drafter": manifest.pair.drafter,
        "drafter_digest": manifest.pair.drafter_digest,
        **{name: domain[name] for name in known},
    }


def table(title: str, rows: Sequence[Row], columns: str) -> Description:
    """A table of rows without the columns that are always empty; text is made printable.

    Args:
        columns: names of columns; those behind `|` are shown only with `--wide`.
    """
    main, _, more = (part.split() for part in columns.partition("|"))
    names = [name for name in (*main, *more) if any(_is_given(row.get(name)) for row in rows)]
    cells = tuple(tuple(_cell(row.get(name)) for name in names) for row in rows)
    heads, wide = (tuple(_HEADERS.get(name, name) for name in part) for part in (names, more))
    return Description(title, (), heads, cells, wide=wide)


def _is_given(value: Any) -> bool:
    return value is not None and value not in ({}, [], ())


def _cell(value: Any) -> str:
    if not _is_given(value):
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(inner) for inner in value)
    return shown(str(value))
