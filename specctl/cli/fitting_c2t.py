"""`specctl fit c2t`."""

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


@fit_app.command("c2t")
def fit_c2t(
    traces: TracesArgument,
    out: OutOption,
    predicts: Annotated[
        str,
        typer.Option(
            help="conditional (given the parent, multiplied along paths) or joint (paper)."
        ),
    ] = "conditional",
    features: Annotated[
        str | None,
        typer.Option(
            help="Node features, comma-separated; default: draft_logp,parent_entropy,depth, and "
            "joint_prob in place of draft_logp for joint (paper)."
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden units, 2 to 48.")] = 48,
    beta: BetaOption = None,
    recall: RecallOption = 0.8,
    depth: DepthOption = None,
    first_top_k: FirstTopKOption = None,
    second_top_k: SecondTopKOption = None,
    keep_leaves: Annotated[
        bool,
        typer.Option(
            help="Verify also nodes that reach beta beyond the second Top-K; without: the paper."
        ),
    ] = True,
    num_tokens: CapOption = None,
    negatives: Annotated[
        float, typer.Option(help="Rejected nodes sampled per accepted one; 0 takes all.")
    ] = 10.0,
    max_rows: Annotated[int, typer.Option(help="Nodes held in memory at most.")] = 10_000_000,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the sampled nodes.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Nodes a step.")] = 1024,
    min_steps: Annotated[
        int, typer.Option(help="Steps at least; few nodes are passed over more often.")
    ] = 10_000,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam at the start.")] = 1e-2,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads of torch; more than 1 is rarely faster.")
    ] = 1,
    held_out: HeldOutOption = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of split, sample and weights.")] = 0,
    study: Annotated[
        bool,
        typer.Option(
            "--study",
            help="Also ablate features, sweep hidden sizes, transfer between categories and "
            "fine-tune; 13 more fits and four a category. By default none.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fit C2T's network, which prunes draft trees while they grow, and write it as an artifact."""
    from specctl import console
    from specctl.logs.trace_set import domain_of
    from specctl.train.c2t_artifact import c2t_publication
    from specctl.train.c2t_table import render_report
    from specctl.train.options import c2t_config
    from specctl.train.publish import save_fit

    opened, nodes = open_nodes(traces)
    config = c2t_config(
        nodes.support,
        nodes={
            "features": features,
            "predicts": predicts,
            "depth": depth,
            "first_top_k": first_top_k,
            "second_top_k": second_top_k,
            "negatives": negatives,
            "max_rows": max_rows,
            "seed": seed,
        },
        ffn={
            "hidden": hidden,
            "epochs": epochs,
            "min_steps": min_steps,
            "batch_size": batch_size,
            "lr": lr,
            "seed": seed,
            "threads": threads,
        },
        beta=beta,
        recall=recall,
        num_tokens=num_tokens,
        keep_leaves=keep_leaves,
        held_out_frac=held_out,
        seed=seed,
    )
    fitted = _fit(opened, nodes, config, study=study)
    pair = opened.fingerprint
    artifact = save_fit(
        c2t_publication(fitted, pair, opened.digest),
        out,
        pair,
        domain=domain_of(opened),
        snapshots=opened.snapshots,
    )
    console.show_fit(artifact, fitted.report, render_report, out, as_json=as_json)


def _fit(opened: Any, nodes: Any, config: Any, *, study: bool) -> Any:
    """The fit, and its studies where they are wanted, with progress."""
    from dataclasses import replace

    from specctl import console
    from specctl.train.c2t import fit_c2t
    from specctl.train.c2t_study import check_study, run_study
    from specctl.train.scored_fit import NUM_PASSES

    if study:
        check_study(config)
    total = NUM_PASSES * opened.num_rows("rounds")
    with console.progress("positions", total) as tick:
        fitted = fit_c2t(replace(nodes, on_positions=tick), opened.prompt_ids, config)
    if not study:
        return fitted
    with console.progress("fits of the study", None) as tick:
        found = run_study(nodes, fitted, on_fit=tick)
    return replace(fitted, report=fitted.report.model_copy(update={"study": found}))
