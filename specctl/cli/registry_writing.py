"""`specctl registry`: the verbs that write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli.interrupts import commits
from specctl.cli.options import JsonOption
from specctl.cli.registry import (
    ActorOption,
    AliasArgument,
    ExpiresOption,
    KeyOption,
    NameArgument,
    ReasonOption,
    RegistryOption,
    TrustOption,
    registry_app,
    writer_of,
)

if TYPE_CHECKING:
    from specctl.registry.entries import Logged


def _show_entry(logged: Logged, *, as_json: bool, **more: object) -> None:
    """An entry that was written, or that was there already; `more` is for programs alone."""
    from specctl import console
    from specctl.registry.views import entry_row

    row = entry_row(logged)
    if as_json:
        console.show_json({**row, **more})
    else:
        place = f"{row['name']}@{row['alias']}" if row["alias"] else row["name"]
        there = "" if more.get("changed", True) else "already there: "
        said = f"{row['kind']} {place} {row['digest'] or ''}, generation {row['generation']}"
        console.show(there + said)


@registry_app.command("init")
def init(
    registry: RegistryOption,
    publish_limit: Annotated[
        int,
        typer.Option(
            help="Longest publication, seconds, 305 (one request) to 604800 (a week); the grace of "
            "`gc` is at least twice it."
        ),
    ] = 3600,
    as_json: JsonOption = False,
) -> None:
    """Make a place a registry, once it has shown that it refuses to overwrite."""
    from specctl import console
    from specctl.registry import init_registry

    made = init_registry(registry, publish_limit_s=publish_limit)
    if as_json:
        console.show_json({"url": made.url, **made.marker.model_dump(mode="json")})
    else:
        console.show(f"registry {made.marker.registry_id} at {made.url}")


@registry_app.command("push")
@commits
def push(
    folder: Annotated[Path, typer.Argument(help="Artifact folder.")],
    name: NameArgument,
    registry: RegistryOption,
    alias: Annotated[
        str | None, typer.Option(help="Alias to point to it afterwards; default: none.")
    ] = None,
    key: KeyOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = None,
    expires: ExpiresOption = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish an artifact under a name; it is loaded first, so what is bad is not published."""
    from specctl import console
    from specctl import registry as room
    from specctl.artifacts.manifest import MANIFEST, parse_manifest
    from specctl.registry.names import parse_name
    from specctl.registry.rehearsing import note_of, rehearse_push
    from specctl.registry.unlike import unlike

    note = note_of(reason, expires)
    parse_name(name)  # before the artifact is loaded, which takes seconds
    writer = writer_of(registry, actor, key, trust)
    package = room.read_package(folder)
    rehearse_push(writer, name, package.digest, alias, note)
    warnings = unlike(name, parse_manifest(package.files[MANIFEST]))
    for line in warnings:
        console.warn(line)
    with console.progress("bytes", package.size_bytes) as tick:
        logged = room.push(writer, package, name, note=note, on_bytes=tick)
    if alias is not None:
        moved = room.promote(writer, name, alias, package.digest, note=note)
        logged = moved if moved.changed else logged
    _show_entry(logged, as_json=as_json, warnings=warnings)


@registry_app.command("promote")
@commits
def promote(
    name: NameArgument,
    alias: AliasArgument,
    version: Annotated[
        str, typer.Argument(help="sha256:HEX, another alias, or the artifact's folder as ./FOLDER.")
    ],
    registry: RegistryOption,
    expect: Annotated[
        str | None,
        typer.Option(
            help="Digest sha256:HEX that the alias must have; default: what it has at the start."
        ),
    ] = None,
    key: KeyOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = None,
    expires: ExpiresOption = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point an alias to a version, unless another moved it meanwhile."""
    from specctl import registry as room
    from specctl.registry.asked import asked_version, expected_digest
    from specctl.registry.rehearsing import note_of

    note, expected = note_of(reason, expires), expected_digest(expect)
    writer = writer_of(registry, actor, key, trust)
    digest = asked_version(writer.registry, name, version)
    moved = room.promote(writer, name, alias, digest, expect=expected, note=note)
    _show_entry(moved, as_json=as_json, changed=moved.changed)


@registry_app.command("rollback")
@commits
def rollback(
    name: NameArgument,
    alias: AliasArgument,
    registry: RegistryOption,
    reason: Annotated[str, typer.Option(help="Why, for the history.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="sha256:HEX, another alias or ./FOLDER, one that it had before; default: the one "
            "before the one it has."
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            help="Digest sha256:HEX to go back from; done once, however often it is said. "
            "Default: what it has at the start."
        ),
    ] = None,
    key: KeyOption = None,
    actor: ActorOption = None,
    expires: ExpiresOption = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point an alias back to an older version: a new generation, nothing is deleted."""
    from specctl import registry as room
    from specctl.registry.asked import asked_version, expected_digest
    from specctl.registry.rehearsing import note_of

    note, expected = note_of(reason, expires), expected_digest(expect)
    writer = writer_of(registry, actor, key, trust)
    digest = None if to is None else asked_version(writer.registry, name, to)
    moved = room.rollback(writer, name, alias, note=note, to=digest, expect=expected)
    _show_entry(moved, as_json=as_json, changed=moved.changed)
