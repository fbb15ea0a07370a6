"""`specctl registry`: pins, settings, garbage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.options import JsonOption
from specctl.cli.registry import (
    ActorOption,
    KeyOption,
    ReasonOption,
    ReferenceArgument,
    RegistryOption,
    author_of,
    registry_app,
    show_rows,
    writer_of,
)


@registry_app.command("pin")
def pin(
    reference: ReferenceArgument,
    registry: RegistryOption,
    reason: Annotated[str, typer.Option(help="Why, for the history.")],
    actor: ActorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep an artifact from garbage collection until it is unpinned."""
    from specctl.artifacts import registry as room
    from specctl.artifacts.registry.resolving import named

    writer = writer_of(registry, actor)
    made = room.pin(writer, named(writer.registry, reference), reason=reason)
    show_rows(reference, [made.model_dump()], "digest actor reason", as_json=as_json)


@registry_app.command("unpin")
def unpin(
    reference: ReferenceArgument,
    registry: RegistryOption,
    reason: Annotated[str, typer.Option(help="Why, for the history.")],
    actor: ActorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Release all pins of an artifact."""
    from specctl.artifacts.registry import open_registry
    from specctl.artifacts.registry.pins import release_pins
    from specctl.artifacts.registry.resolving import named

    opened = open_registry(registry)
    digest, who = named(opened, reference), author_of(actor, None).actor
    released = release_pins(opened, digest, actor=who, reason=reason)
    row = {"digest": digest, "num_released": released}
    show_rows(reference, [row], "digest num_released", as_json=as_json)


@registry_app.command("settings")
def settings(
    registry: RegistryOption,
    record: Annotated[
        Path | None,
        typer.Argument(help="Trust record (JSON) to set; default: show the one in force."),
    ] = None,
    key: KeyOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = None,
) -> None:
    """Show or set which names must be signed, and by whom (JSON)."""
    from specctl import console
    from specctl.artifacts.registry import open_registry
    from specctl.artifacts.registry.trusting import current_settings, set_settings

    opened = open_registry(registry)
    if record is not None:
        set_settings(opened, record, author_of(actor, key), reason=reason)
    console.show_json(current_settings(opened))


@registry_app.command("gc")
def gc(
    registry: RegistryOption,
    mark: Annotated[bool, typer.Option("--mark", help="Mark what nothing reaches.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Delete what was marked before.")] = False,
    grace: Annotated[
        float, typer.Option(help="Hours that a mark must have stood before its sweep.")
    ] = 24.0,
    retention_days: Annotated[
        float, typer.Option(help="Days for which every entry of a history keeps what it names.")
    ] = 90.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Finish a sweep whose process is known to be dead.")
    ] = False,
    actor: ActorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Collect garbage in two phases: --mark now, --sweep after the grace."""
    from specctl import console
    from specctl.artifacts.registry import garbage, open_registry

    opened, author = open_registry(registry), author_of(actor, None)
    with console.progress("objects removed", None) as tick:
        done = garbage.collect(
            opened,
            author,
            is_marking=mark,
            is_sweeping=sweep,
            grace_s=grace * 3600,
            retention_s=retention_days * 24 * 3600,
            resume=resume,
            on_removed=tick,
        )
    rows = [{"digest": digest, "done": word} for word, digests in done for digest in digests]
    show_rows(opened.url, rows, "done digest", as_json=as_json, whole=True)
