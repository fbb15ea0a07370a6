"""`specctl registry floors`: how far this user has seen each history, and how to forget that."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specctl.cli.options import JsonOption
from specctl.cli.registry import RegistryOption, registry_app, show_rows

floors_app = typer.Typer(
    no_args_is_help=True, help="See how far histories were seen: older ones are refused."
)
registry_app.add_typer(floors_app, name="floors")


@floors_app.command("list")
def floors_list(registry: RegistryOption, as_json: JsonOption = False) -> None:
    """Show the floors of a registry, and those that were forgotten; it is not asked."""
    from specctl.registry.floors import Floors
    from specctl.registry.urls import registry_url

    floors, url = Floors(), registry_url(registry)
    rows: list[dict[str, Any]] = [
        {**vars(floor), "forgotten": None, "reason": None} for floor in floors.known(url)
    ]
    for one in floors.forgotten(url):
        for generation, digest in zip(one.generations, one.digests, strict=True):
            seen = {"name": one.name, "generation": generation, "digest": digest}
            rows.append({**seen, "forgotten": one.forgotten, "reason": one.reason})
    columns = "name generation digest forgotten reason"
    show_rows(url, rows, columns, as_json=as_json)


@floors_app.command("forget")
def floors_forget(
    name: Annotated[str, typer.Argument(help="A name, or _settings, as E_ROLLBACK has it.")],
    registry: RegistryOption,
    reason: Annotated[str, typer.Option(help="Why; kept beside the floors.")],
    as_json: JsonOption = False,
) -> None:
    """Believe the history of a name anew, once its owner said that it was mended."""
    from specctl import console
    from specctl.registry.floors import Floors
    from specctl.registry.urls import registry_url

    forgotten = Floors().forget(registry_url(registry), name, reason)
    if as_json:
        console.show_json([vars(floor) for floor in forgotten])
    else:
        told = ", ".join(f"generation {one.generation} ({one.digest})" for one in forgotten)
        console.show(f"forgot of {name}: {told or 'what was no floor'}")
