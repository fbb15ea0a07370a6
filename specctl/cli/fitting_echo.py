"""`specctl fit echo`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.app import fit_app
from specctl.cli.fit_sources import open_to_fit
from specctl.cli.options import (
    DenseTracesArgument,
    HeldOutOption,
    JsonOption,
    OutOption,
    ReplayThreadsOption,
    TimesOption,
)


@fit_app.command("echo")
def fit_echo(
    traces: DenseTracesArgument,
    out: OutOption,
    depth: Annotated[int, typer.Option(help="Levels drafted at most.")] = 8,
    width: Annotated[int, typer.Option(help="W_dflt, nodes kept per level.")] = 3,
    max_width: Annotated[
        int, typer.Option(help="W_max, nodes of a level whose gate closed; children per node.")
    ] = 10,
    num_tokens: Annotated[
        int, typer.Option(help="Nodes a request submits at most, root counted.")
    ] = 48,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="K_max, nodes a batch verifies per round, roots counted: adds ECHO's budget; "
            "default: none."
        ),
    ] = None,
    delta: Annotated[
        float, typer.Option(help="Area under the ROC curve that makes a level a sweet spot.")
    ] = 0.8,
    max_gates: Annotated[int, typer.Option(help="Gates at most.")] = 3,
    thresholds: Annotated[
        str,
        typer.Option(help="youden, or cost: the least predicted time on the training prompts."),
    ] = "youden",
    cost_model: TimesOption = None,
    min_rows: Annotated[
        int, typer.Option(help="Positions of each class that a level needs to be judged.")
    ] = 50,
    held_out: HeldOutOption = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split by prompt and of intervals.")] = 0,
    threads: ReplayThreadsOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Fit ECHO's sparse gates from dense traces and write them as an artifact."""
    from specctl import console
    from specctl.logs.trace_set import domain_of
    from specctl.logs.tree_log import DenseLog
    from specctl.replay.cost.model import replay_clock
    from specctl.replay.fit_inputs import Replayer, gate_rows
    from specctl.replay.run import open_cost_model
    from specctl.train.echo import fit_echo as fit
    from specctl.train.echo_artifact import echo_publication
    from specctl.train.echo_config import echo_config
    from specctl.train.echo_report import render_report
    from specctl.train.publish import save_fit

    config = echo_config(
        depth=depth,
        width=width,
        max_width=max_width,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        delta=delta,
        max_gates=max_gates,
        thresholds=thresholds,
        min_rows=min_rows,
        held_out_frac=held_out,
        seed=seed,
    )
    opened = open_to_fit(traces)
    model = open_cost_model(cost_model, opened, console.warn)
    log = DenseLog.open(opened)
    replayer = Replayer(log, None if model is None else replay_clock(model), threads)
    with console.progress("positions", opened.num_rows("rounds")) as tick:
        found = gate_rows(log, config.open_shape, num_threads=threads, on_positions=tick)
    fitted = fit(found.rows, config, replayer, num_left_out=found.num_left_out)
    pair = opened.fingerprint
    artifact = save_fit(
        echo_publication(fitted, pair, opened.digest),
        out,
        pair,
        domain=domain_of(opened),
        snapshots=opened.snapshots,
    )
    if found.num_left_out:
        console.warn(f"{found.num_left_out} positions have no label and were left out")
    console.show_fit(artifact, fitted.report, render_report, out, as_json=as_json)
