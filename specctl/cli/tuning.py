"""`specctl tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.fitting import open_to_fit
from specctl.cli.options import (
    ArrivalRateOption,
    HeldOutOption,
    JsonOption,
    ObjectiveOption,
    ReplayThreadsOption,
    SlotsOption,
    TpotLimitOption,
)


@app.command()
def tune(
    traces: Annotated[
        list[str] | None,
        typer.Argument(help="One or more dense trace folders; default: none, for --show-grid."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for tune.json and the artifact, policy/; default: none."
        ),
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(help="cost_model.json of `specctl profile`; default: none, for --show-grid."),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy whose settings are searched, e.g. svip, ddd:top_k=8, eagle2+survival, or "
            "an artifact folder; repeat for more; default: static settings alone."
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of a setting, field=v1,v2, in place of the stated ones; repeat for more; "
            "default: the stated grids."
        ),
    ] = None,
    show_grid: Annotated[bool, typer.Option(help="Print the grids and stop.")] = False,
    batch_size: SlotsOption = 1,
    arrival_rate: ArrivalRateOption = None,
    objective: ObjectiveOption = "latency",
    tpot_limit_ms: TpotLimitOption = None,
    packing: Annotated[
        str,
        typer.Option(help="Verification of unequal trees: ragged (back to back) or padded."),
    ] = "ragged",
    held_out: HeldOutOption = 0.2,
    factor: Annotated[
        int, typer.Option(min=2, help="Halving: prompts grow and settings shrink by it.")
    ] = 3,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the split, the halving, the load, the bootstrap.")
    ] = 0,
    threads: ReplayThreadsOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Search policies' settings by replay for a load, report on held-out prompts, write the best.

    The best static setting always takes part, and is written unless another beats it.
    """
    from specctl import console
    from specctl.logs.trace_set import domain_of
    from specctl.replay.config import TuneConfig
    from specctl.replay.tune.candidates import listed_families
    from specctl.replay.tune.publish import (
        POLICY_FOLDER,
        grid_table,
        publish,
        result_table,
        tune_notes,
    )
    from specctl.replay.tune.tuning import prepare
    from specctl.runtime.output import prepare_folder

    if show_grid:
        console.show(grid_table(listed_families(family or (), grid or ())))
        return
    config = TuneConfig(
        families=tuple(family or ()),
        grids=tuple(grid or ()),
        batch_size=batch_size,
        arrival_rate_per_s=arrival_rate,
        objective=objective,
        tpot_limit_ms=tpot_limit_ms,
        packing=packing,
        held_out_frac=held_out,
        seed=seed,
        factor=factor,
    )
    opened = open_to_fit(traces or [])
    tuning = prepare(opened, config, cost_model, num_threads=threads, warn=console.warn)
    if out is not None:
        prepare_folder(out)
    with console.progress("scorings", tuning.num_scorings) as tick:
        tuned = tuning.run(on_setting=tick)
    result, artifact = tuned.result, None
    if out is not None:
        artifact = publish(tuned, out, opened.fingerprint, domain_of(opened), opened.snapshots)
    if as_json:
        digest = None if artifact is None else artifact.digest
        console.show_json({**result.to_json(), "artifact_digest": digest})
        return
    console.show(result_table(result))
    for line in tune_notes(result):
        console.show(line)
    if out is not None and artifact is not None:
        console.show(f"wrote {out / POLICY_FOLDER}  {artifact.digest}")
