"""`specctl profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.options import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    load_models,
)


@app.command()
def profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="Cost model to write.")] = Path(
        "cost_model.json"
    ),
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    batch_sizes: Annotated[
        str, typer.Option(help="Requests decoded together, 1 first, comma-separated.")
    ] = "1,2,4,8",
    contexts: Annotated[
        str, typer.Option(help="Text before the root, tokens, comma-separated.")
    ] = "64,256",
    tokens: Annotated[
        str, typer.Option(help="Tokens verified per request, 1 first, comma-separated.")
    ] = "1,2,5,8,16,32,64",
    widths: Annotated[
        str, typer.Option(help="Nodes a drafted level per request, 1 first, comma-separated.")
    ] = "1,4,10",
    capture_limit: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens of a batch up to which your engine pads to the next of --tokens "
            "(captured graphs); 0: none, as this runtime.",
        ),
    ] = 0,
    quick: Annotated[bool, typer.Option(help="One pass instead of five.")] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what rounds cost on this machine (us), for replay and budgets; 1 to 2 minutes."""
    from specctl import console
    from specctl.replay.cost.files import WHAT, save_cost_model
    from specctl.replay.cost.points import ProfileGrid, parse_axis
    from specctl.replay.cost.profile import profile as measure
    from specctl.replay.cost.summary import render, summary_json
    from specctl.runtime.output import check_place

    check_place(out, WHAT)
    grid = ProfileGrid(
        batch_sizes=parse_axis("--batch-sizes", batch_sizes),
        context_tokens=parse_axis("--contexts", contexts),
        tokens=parse_axis("--tokens", tokens),
        widths=parse_axis("--widths", widths),
        capture_limit_tokens=capture_limit,
    )
    grid = grid.quick() if quick else grid
    pair = load_models(target, drafter, device, dtype, threads)
    with console.progress("measurements", grid.num_steps) as tick:
        model = measure(pair, grid, on_step=tick)
    save_cost_model(model, out)
    if as_json:
        console.show_json(summary_json(model, out))
    else:
        console.show(render(model, out))
