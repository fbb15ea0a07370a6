"""`specctl profile`."""

from __future__ import annotations

from dataclasses import replace
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
        str | None,
        typer.Option(
            help="Tokens verified per request, 1 first, comma-separated; by default "
            "1,2,5,8,16,32,64, of graphs 1,2,4,8,16,24,32,48,64.",
        ),
    ] = None,
    widths: Annotated[
        str, typer.Option(help="Nodes a drafted level per request, 1 first, comma-separated.")
    ] = "1,4,10",
    capture_limit: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens of a batch up to which another engine pads to the next of --tokens "
            "(captured graphs); 0: as this runtime, to its tiers with graphs, else not.",
        ),
    ] = 0,
    rounds: Annotated[
        str,
        typer.Option(
            help="What is timed: graphs, ordinary, or auto: graphs where this runtime decodes in "
            "them, which is on CUDA.",
        ),
    ] = "auto",
    quick: Annotated[bool, typer.Option(help="One pass instead of five.")] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what rounds cost on this machine (us), for replay and budgets; 1 to 2 minutes."""
    from specctl import console
    from specctl.replay.cost.files import COST_MODEL, save_cost_model
    from specctl.replay.cost.profile import (
        GRAPH_TOKENS,
        ProfileGrid,
        parse_axis,
        parse_rounds,
        render,
        summary_json,
        timed_rounds,
    )
    from specctl.replay.cost.profile import profile as measure
    from specctl.runtime.output import check_place

    check_place(out, COST_MODEL)
    choice = parse_rounds(rounds)
    grid = ProfileGrid(
        batch_sizes=parse_axis("--batch-sizes", batch_sizes),
        context_tokens=parse_axis("--contexts", contexts),
        tokens=parse_axis("--tokens", tokens) if tokens is not None else ProfileGrid.tokens,
        widths=parse_axis("--widths", widths),
        capture_limit_tokens=capture_limit,
    )
    grid = grid.quick() if quick else grid
    pair = load_models(target, drafter, device, dtype, threads)
    graphs = timed_rounds(choice, pair)
    if graphs is not None and tokens is None:
        grid = replace(grid, tokens=GRAPH_TOKENS)
    with console.progress("measurements", grid.num_steps) as tick:
        model = measure(pair, grid, graphs=graphs, on_step=tick)
    save_cost_model(model, out)
    if as_json:
        console.show_json(summary_json(model, out))
    else:
        console.show(render(model, out))
