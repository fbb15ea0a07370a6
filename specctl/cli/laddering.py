"""`specctl ladder`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.options import DenseTracesArgument, JsonOption


@app.command()
def ladder(
    traces: DenseTracesArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for ladder.json and ladder.png.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", "-p", help="Policy to place on the ladder; repeat for more; default: none."
        ),
    ] = None,
    cost_model: Annotated[
        Path | None, typer.Option(help="cost_model.json of `specctl profile`; default: --linear.")
    ] = None,
    linear: Annotated[
        str | None,
        typer.Option(
            help="Instead of --cost-model, rates in us, e.g. "
            "verify_fixed_us=5000,verify_token_us=20,verify_cached_token_us=0,"
            "draft_fixed_us=300,draft_token_us=5,step_us=200; default: none."
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Load, requests; each pays its share of a batch of equals.")
    ] = 1,
    held_out: Annotated[
        float, typer.Option(help="Share of prompts that are measured, not tuned on, in (0, 1).")
    ] = 0.5,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the split by prompt, the fits and the bootstrap.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Place policies between plain decoding and the best that is possible (tokens/s)."""
    from specctl import console
    from specctl.logs.trace_set import TraceSet
    from specctl.replay.config import LadderConfig
    from specctl.replay.ladder.build import choose_cost, run_ladder
    from specctl.replay.ladder.show import ladder_notes, ladder_table, write_ladder
    from specctl.runtime.output import prepare_folder

    config = LadderConfig(held_out_frac=held_out, seed=seed)
    opened = TraceSet.open(*traces)
    model = choose_cost(cost_model, linear, opened, console.warn)
    prepare_folder(out)
    result = run_ladder(
        opened,
        opened.prompt_ids,
        model,
        policy or (),
        batch_size=batch_size,
        config=config,
        progress=console.progress,
    )
    write_ladder(result, out)
    if as_json:
        console.show_json(result.to_json())
        return
    console.show(ladder_table(result))
    for line in ladder_notes(result):
        console.show(line)
    console.show(f"wrote {out}")
