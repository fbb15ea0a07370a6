"""`specctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.options import JsonOption


@app.command()
def report(
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")],
    traces: Annotated[
        list[str] | None,
        typer.Argument(help="Trace folders of one pair, dense or live; default: results alone."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="replay.json of `specctl replay`; default: none.")
    ] = None,
    ladder: Annotated[
        Path | None, typer.Option(help="ladder.json of `specctl ladder`; default: none.")
    ] = None,
    tune: Annotated[
        Path | None, typer.Option(help="tune.json of `specctl tune`; default: none.")
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(help="cost_model.json behind the results' times; default: none."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap over prompts.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page on traces and results: figures, words, caveats."""
    from specctl import console
    from specctl.logs.trace_set import TraceSet
    from specctl.replay.cost.files import cost_facts, load_cost_model
    from specctl.replay.trace_figures import num_passes, trace_figures
    from specctl.report import build_page, read_given, write_page
    from specctl.runtime.output import check_place

    check_place(out, "report")
    cost = None if cost_model is None else cost_facts(load_cost_model(cost_model))
    given = read_given(results, ladder, tune, cost)
    figures = None
    if traces:
        opened = TraceSet.open(*traces)
        total = num_passes(opened) * opened.num_rows("rounds")
        with console.progress("positions, all passes", total) as tick:
            figures = trace_figures(opened, seed=seed, on_positions=tick)
    page = build_page(figures, given)
    write_page(page, out)
    if as_json:
        console.show_json(page.to_json())
    else:
        console.show(f"wrote {out}")
