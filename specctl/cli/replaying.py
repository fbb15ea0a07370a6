"""`specctl replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.interrupts import reads_only_without
from specctl.cli.options import (
    ArrivalRateOption,
    JsonOption,
    PoliciesOption,
    ReplayThreadsOption,
    TimesOption,
)


@app.command()
@reads_only_without("out")
def replay(
    traces: Annotated[
        list[str],
        typer.Argument(help="One or more dense trace folders, or one of `specctl import`."),
    ],
    policy: PoliciesOption,
    cost_model: TimesOption = None,
    baseline: Annotated[
        int, typer.Option(min=1, help="Which --policy the others are compared with, from 1.")
    ] = 1,
    by_category: Annotated[bool, typer.Option(help="Also a table for each category.")] = False,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Prompts decoded together at most; above 1 the batch is simulated. An import runs "
            "in waves, each until it is empty.",
        ),
    ] = 1,
    arrival_rate: ArrivalRateOption = None,
    tpot_limit_ms: Annotated[
        float | None,
        typer.Option(
            help="Goodput of a simulated batch: time per output token, ms; default: none."
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafter of an import to replay; repeat for more; default: all."),
    ] = None,
    k_table: Annotated[
        str | None,
        typer.Option(
            help="Draft tokens by batch size for an import, first to last size and tokens, e.g. "
            "'[[1,4,5],[5,64,1]]'; default: none."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for replay.json; default: none.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap and of the load.")] = 0,
    threads: ReplayThreadsOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Score policies from dense traces or an import, exactly, without the models.

    Counts are exact for lossless policies that the log supports; others are marked, with bounds.
    Of an import, which holds chains: ar, chain:num_draft_tokens=K and oracle.
    """
    from specctl import console
    from specctl.logs.trace_set import TraceSet
    from specctl.replay.config import ReplayConfig
    from specctl.replay.results import write_result
    from specctl.replay.run import replay_folders
    from specctl.runtime.output import prepare_folder

    if out is not None:
        prepare_folder(out)
    config = ReplayConfig(
        policies=tuple(policy),
        cost_model=cost_model,
        baseline=baseline,
        by_category=by_category,
        batch_size=batch_size,
        arrival_rate_per_s=arrival_rate,
        tpot_limit_ms=tpot_limit_ms,
        drafters=tuple(drafter or ()),
        k_table=k_table,
        seed=seed,
        num_threads=threads,
    )
    result = replay_folders(
        traces, config, TraceSet.open, progress=console.progress, warn=console.warn
    )
    if out is not None:
        write_result(result, out)
    if as_json:
        console.show_json(result.to_json())
        return
    for part in result.shown():
        console.show(part)
