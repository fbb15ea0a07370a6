"""`specctl registry`: pins, settings, garbage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli.interrupts import NOTHING, commits_where, in_history, reads_only
from specctl.cli.options import JsonOption
from specctl.cli.registry import (
    ActorOption,
    ExpiresOption,
    KeyOption,
    ReasonOption,
    ReferenceArgument,
    RegistryOption,
    TrustOption,
    author_of,
    registry_app,
    show_rows,
    writer_of,
)

if TYPE_CHECKING:
    from specctl.registry import Author, Note, Registry
    from specctl.registry.entries import Logged


@registry_app.command("pin")
def pin(
    reference: ReferenceArgument,
    registry: RegistryOption,
    reason: Annotated[str, typer.Option(help="Why, for the history.")],
    actor: ActorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep an artifact from garbage collection until it is unpinned."""
    from specctl import registry as room
    from specctl.registry.resolving import named

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
    from specctl.registry import open_registry
    from specctl.registry.pins import release_pins
    from specctl.registry.resolving import named

    opened = open_registry(registry)
    digest, who = named(opened, reference), author_of(actor, None).actor
    released = release_pins(opened, digest, actor=who, reason=reason)
    row = {"digest": digest, "num_released": released}
    show_rows(reference, [row], "digest num_released", as_json=as_json)


@registry_app.command("pins")
@reads_only
def pins(registry: RegistryOption, as_json: JsonOption = False) -> None:
    """List the pins in force: who keeps what, since when and why."""
    from specctl.registry import open_registry
    from specctl.registry.pins import pins

    opened = open_registry(registry)
    rows = [one.pin.model_dump(mode="json") for one in pins(opened) if not one.is_released]
    columns = "digest actor created reason"
    show_rows(opened.url, rows, columns, as_json=as_json, empty="no pins")


@registry_app.command("settings")
@commits_where(lambda given: in_history("_settings") if given["record"] else NOTHING)
def settings(
    registry: RegistryOption,
    record: Annotated[
        Path | None,
        typer.Argument(help="Trust record (JSON) to set; default: show the one in force."),
    ] = None,
    expect_generation: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Generation of the settings that the record was made from; default: the one in "
            "the record, as --json shows it.",
        ),
    ] = None,
    key: KeyOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = None,
    expires: ExpiresOption = None,
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show or set which names must be signed, and by whom."""
    from specctl.registry import open_registry
    from specctl.registry.rehearsing import note_of

    note = note_of(reason, expires)
    opened = open_registry(registry)
    if record is None:
        _show_settings(opened, as_json=as_json)
    else:
        author = author_of(actor, key)
        logged = _set_settings(opened, record, author, note, trust, expect_generation)
        _tell_set(logged, as_json=as_json)


def _set_settings(
    opened: Registry,
    record: Path,
    author: Author,
    note: Note,
    trust: Path | None,
    expect: int | None,
) -> Logged:
    from specctl.artifacts.signing import Trust
    from specctl.registry.rehearsing import read_settings, rehearse_settings
    from specctl.registry.revising import write_settings

    data = read_settings(record)
    rehearse_settings(opened, data, author, Trust.load(trust), note, expect=expect)
    return write_settings(opened, data, author, note=note, expect=expect)


def _tell_set(logged: Logged, *, as_json: bool) -> None:
    from specctl import console
    from specctl.registry.views import entry_row

    row = entry_row(logged)
    if as_json:
        console.show_json(row)
    else:
        signed = f"signed by {', '.join(row['key_ids'])}" if row["key_ids"] else "not signed"
        console.show_lines([f"set, generation {row['generation']}, {signed}"], as_json=False)


def _show_settings(opened: Registry, *, as_json: bool) -> None:
    """The trust record in force: as JSON it can be edited and set again."""
    from specctl import console
    from specctl.registry.revising import current_settings, settings_json

    if as_json:
        console.show_json(current_settings(opened))
    elif (newest := opened.settings_log().state.newest) is None:
        console.show_lines([f"{opened.url}: no settings yet"], as_json=False)
    else:
        _tell_set(newest, as_json=False)
        console.show_json(settings_json(newest))


@registry_app.command("gc")
@commits_where(lambda _: in_history("_gc") + "; a sweep that had begun ends by gc --sweep --resume")
def gc(
    registry: RegistryOption,
    mark: Annotated[bool, typer.Option("--mark", help="Mark what nothing reaches.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Delete what was marked before.")] = False,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Hours that a mark must have stood before its sweep.")
    ] = 24.0,
    retention_days: Annotated[
        float,
        typer.Option(min=0.0, help="Days for which every entry of a history keeps what it names."),
    ] = 90.0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Before --sweep, end one whose process is known to be dead."),
    ] = False,
    actor: ActorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Collect garbage in two phases: --mark now, --sweep after the grace."""
    from specctl import console
    from specctl.registry import collecting, open_registry
    from specctl.registry.asked import garbage_times_s

    opened, author = open_registry(registry), author_of(actor, None)
    grace_s, retention_s = garbage_times_s(opened, grace, retention_days, is_sweeping=sweep)
    with console.progress("objects removed", None) as tick:
        done = collecting.collect(
            opened,
            author,
            is_marking=mark,
            is_sweeping=sweep,
            grace_s=grace_s,
            retention_s=retention_s,
            resume=resume,
            on_removed=tick,
        )
    rows = [{"digest": digest, "done": word} for word, digests in done for digest in digests]
    nothing = " and ".join(word for word, _ in done)
    empty = f"nothing was {nothing}"
    show_rows(opened.url, rows, "done digest", as_json=as_json, empty=empty)
