"""`specctl show`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.interrupts import reads_only
from specctl.cli.options import JsonOption


@app.command()
@reads_only
def show(
    what: Annotated[
        str,
        typer.Argument(
            help="Folder of an artifact, of traces or of an import; traces also as s3://... and "
            "@sha256:...; an artifact of a registry as PLACE/NAME@ALIAS."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Print an artifact, a trace set or an import for a person."""
    from specctl import console
    from specctl.describe import describe_named

    described = describe_named(what)
    if as_json:
        console.show_json(described.to_json())
    else:
        console.show(described.render())
