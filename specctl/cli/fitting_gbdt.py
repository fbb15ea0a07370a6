"""`specctl fit gbdt`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specctl.cli.app import fit_app
from specctl.cli.node_options import (
    BetaOption,
    CapOption,
    DepthOption,
    FirstTopKOption,
    RecallOption,
    SecondTopKOption,
    open_nodes,
)
from specctl.cli.options import HeldOutOption, JsonOption, OutOption, TracesArgument


@fit_app.command("gbdt")
def fit_gbdt(
    traces: TracesArgument,
    out: OutOption,
    predicts: Annotated[
        str, typer.Option(help="conditional (given the parent's acceptance) or joint.")
    ] = "conditional",
    features: Annotated[
        str | None,
        typer.Option(
            help="Registry names, comma-separated; default: those of draft and text that pay "
            "(docs/gbdt.md)."
        ),
    ] = None,
    num_trees: Annotated[int, typer.Option(help="Trees at most, 1 to 1000.")] = 100,
    num_leaves: Annotated[int, typer.Option(help="Leaves of a tree, 2 to 63.")] = 31,
    min_rows: Annotated[int, typer.Option(help="Fewest nodes in a leaf.")] = 200,
    shrinkage: Annotated[float, typer.Option(help="Learning rate of boosting, in (0, 1].")] = 0.1,
    monotone: Annotated[
        bool,
        typer.Option(
            help="Let acceptance only rise with the drafter's probability, and fall with "
            "sibling_rank."
        ),
    ] = True,
    distill: Annotated[
        bool,
        typer.Option("--distill", help="Publish a network that learned from the trees."),
    ] = False,
    hidden: Annotated[
        int, typer.Option(help="Hidden units of that network, 2 to 48; also of its rival.")
    ] = 48,
    min_steps: Annotated[int, typer.Option(help="Steps of training a network at least.")] = 10_000,
    beta: BetaOption = None,
    recall: RecallOption = 0.8,
    depth: DepthOption = None,
    first_top_k: FirstTopKOption = None,
    second_top_k: SecondTopKOption = None,
    num_tokens: CapOption = None,
    negatives: Annotated[
        float | None,
        typer.Option(
            help="Rejected nodes per accepted one, 0 for all; default: 0, or 10 for joint."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of LightGBM.")] = 1,
    held_out: HeldOutOption = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of splits, sample, trees and network.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Fit boosted trees in the place of C2T's network, or a network taught by them."""
    from specctl import console
    from specctl.logs.trace_set import domain_of
    from specctl.train.gbdt_artifact import gbdt_publication
    from specctl.train.gbdt_report import render_report
    from specctl.train.options import gbdt_config
    from specctl.train.publish import save_fit

    opened, nodes = open_nodes(traces)
    config = gbdt_config(
        nodes.support,
        nodes={
            "features": features,
            "predicts": predicts,
            "depth": depth,
            "first_top_k": first_top_k,
            "second_top_k": second_top_k,
            "negatives": negatives,
        },
        trees={
            "num_trees": num_trees,
            "num_leaves": num_leaves,
            "min_rows": min_rows,
            "lr": shrinkage,
            "monotone": monotone,
            "threads": threads,
        },
        ffn={"hidden": hidden, "min_steps": min_steps},
        distill=distill,
        beta=beta,
        recall=recall,
        num_tokens=num_tokens,
        held_out_frac=held_out,
        seed=seed,
    )
    fitted = _fit(opened, nodes, config)
    artifact = save_fit(
        gbdt_publication(fitted, opened.fingerprint, opened.digest),
        out,
        opened.fingerprint,
        domain=domain_of(opened),
        snapshots=opened.snapshots,
    )
    console.show_fit(artifact, fitted.report, render_report, out, as_json=as_json)


def _fit(opened: Any, nodes: Any, config: Any) -> Any:
    """The fit, with progress over its passes of the log."""
    from dataclasses import replace

    from specctl import console
    from specctl.train.gbdt import NUM_PASSES, fit_gbdt

    with console.progress("positions", NUM_PASSES * opened.num_rows("rounds")) as tick:
        return fit_gbdt(replace(nodes, on_positions=tick), opened.prompt_ids, config)
