"""`specctl compose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.options import JsonOption


@app.command()
def compose(
    policy: Annotated[
        str,
        typer.Argument(
            help="A shape's artifact or words, then + a budget and + an acceptance, by words or "
            "by artifact, e.g. hetero/+echo/+mars/."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Artifact folder to write.")],
    allow_lossy: Annotated[
        bool, typer.Option(help="Accept policies that change the text.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a shape, a budget and an acceptance of several artifacts as one artifact."""
    from specctl import console
    from specctl.artifacts.describe import describe_artifact
    from specctl.console import render
    from specctl.runtime.compose import compose as write
    from specctl.runtime.policy_spec import resolve_policy

    artifact = write(resolve_policy(policy, allow_lossy=allow_lossy), policy, out)
    if as_json:
        manifest = artifact.manifest.model_dump(mode="json")
        written = {"out": str(out), "artifact_digest": artifact.digest, "manifest": manifest}
        console.show_json(written)
    else:
        console.show(render(describe_artifact(artifact)))
        console.show(f"wrote {out}  {artifact.digest}")
