"""`specctl replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.options import JsonOption, PoliciesOption, ReplayThreadsOption


@app.command()
def replay(
    traces: Annotated[list[Path], typer.Argument(help="One or more dense trace folders.")],
    policy: PoliciesOption,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            help="cost_model.json of `specctl profile`: adds times. Default: counts only."
        ),
    ] = None,
    baseline: Annotated[
        int, typer.Option(min=1, help="Which --policy the others are compared with, from 1.")
    ] = 1,
    by_category: Annotated[bool, typer.Option(help="Also a table for each category.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for replay.json; default: none.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap over prompts.")] = 0,
    threads: ReplayThreadsOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Score policies from dense traces, exactly, without the models.

    Counts are exact for lossless policies that the log supports; others are marked, with bounds.
    """
    from specctl import console
    from specctl.collect.reader import TraceSet
    from specctl.replay.results import group_names, notes, summary_table
    from specctl.replay.run import replay_policies

    opened = TraceSet.open(*traces)
    with console.progress("positions", opened.num_rows("rounds")) as tick:
        result = replay_policies(
            opened,
            policy,
            cost_model=cost_model,
            baseline=baseline,
            seed=seed,
            num_threads=threads,
            on_positions=tick,
            warn=console.warn,
        )
    if out is not None:
        result.write(out)
    if as_json:
        console.show_json(result.to_json())
        return
    groups = ["all", *(group_names(result.policies) if by_category else ())]
    for group in groups:
        console.show(summary_table(result, group))
    for line in notes(result):
        console.show(line)
