"""`specctl fit ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.app import fit_app
from specctl.cli.fit_sources import open_to_fit
from specctl.cli.options import HeldOutOption, JsonOption, OutOption, TracesArgument


@fit_app.command("cart")
def fit_cart(
    traces: TracesArgument,
    out: OutOption,
    base: Annotated[
        str | None,
        typer.Option(
            help="Static tree to extend, for dense traces; default: eagle2. Live traces keep "
            "the tree that they were collected with."
        ),
    ] = None,
    label: Annotated[str, typer.Option(help="tcr (paper) or accepted.")] = "tcr",
    filter: Annotated[str, typer.Option(help="fully_accepted (paper) or all.")] = "fully_accepted",
    method: Annotated[str, typer.Option(help="cart (paper) or exact (1-D optimum).")] = "cart",
    max_leaf_depth: Annotated[int, typer.Option(help="Tree levels; 3 give 8 bins.")] = 3,
    gammas: Annotated[
        str, typer.Option(help="Size factor of each low-entropy bin, comma-separated.")
    ] = "0.3,0.6,1.0",
    alpha: Annotated[
        int | None, typer.Option(help="Extra levels of the first bin; default ceil(depth/2).")
    ] = None,
    index_base: Annotated[int, typer.Option(help="First i in alpha - i: 0 (settled) or 1.")] = 0,
    cap_tokens: Annotated[bool, typer.Option(help="Never submit more than the base size.")] = False,
    min_rows: Annotated[int, typer.Option(help="Fewest rounds in a bin.")] = 5,
    held_out: HeldOutOption = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split by prompt and of ties.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Fit HeteroSpec's entropy bins and write them as an artifact."""
    from specctl import console
    from specctl.logs.trace_set import domain_of
    from specctl.replay.fit_inputs import rounds_to_fit
    from specctl.train.cart import fit_cart as fit
    from specctl.train.cart_artifact import cart_publication
    from specctl.train.options import cart_config
    from specctl.train.publish import save_fit
    from specctl.train.report import render_report

    opened = open_to_fit(traces)
    with console.progress("positions", opened.num_rows("rounds")) as tick:
        found = rounds_to_fit(opened, base, on_positions=tick)
    config = cart_config(
        found.policy,
        label=label,
        filter=filter,
        method=method,
        max_leaf_depth=max_leaf_depth,
        gammas=gammas,
        alpha=alpha,
        index_base=index_base,
        cap_tokens=cap_tokens,
        min_rows=min_rows,
        held_out_frac=held_out,
        seed=seed,
    )
    fitted = fit(found.rounds, config)
    pair = opened.fingerprint
    artifact = save_fit(
        cart_publication(fitted, pair, opened.digest),
        out,
        pair,
        domain=domain_of(opened),
        snapshots=opened.snapshots,
    )
    if found.num_left_out:
        console.warn(f"{found.num_left_out} positions have no label and were left out")
    console.show_fit(artifact, fitted.report, render_report, out, as_json=as_json)
