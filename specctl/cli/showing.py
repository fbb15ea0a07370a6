"""`specctl show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.options import JsonOption


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="Folder of an artifact, of traces or of an import.")],
    as_json: JsonOption = False,
) -> None:
    """Print an artifact, a trace set or an import for a person."""
    from specctl import console
    from specctl.describe import describe_path

    described = describe_path(path)
    if as_json:
        console.show_json(described.to_json())
    else:
        console.show(described.render())
