"""Options that the fits of node scorers share, and the nodes that they read."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specctl.cli.fit_sources import open_to_fit

BetaOption = Annotated[
    float | None,
    typer.Option(help="Acceptance probability to prune below, in [0, 1]; default: by --recall."),
]
RecallOption = Annotated[
    float,
    typer.Option(
        help="Share of accepted tokens that beta keeps on the training prompts, in (0, 1)."
    ),
]
DepthOption = Annotated[
    int | None, typer.Option(help="Levels to draft at most; default: the traces', at most 11.")
]
FirstTopKOption = Annotated[
    int | None,
    typer.Option(help="Likeliest children scored per node; default: the traces', at most 10."),
]
SecondTopKOption = Annotated[
    int | None, typer.Option(help="Nodes expanded per level; default: the traces', at most 10.")
]
CapOption = Annotated[
    int | None, typer.Option(help="Most tokens to verify, root counted; default: no cap.")
]


def open_nodes(traces: list[str]) -> tuple[Any, Any]:
    """The trace set, and its nodes as fits read them."""
    from specctl.logs.logged_nodes import logged_nodes

    opened = open_to_fit(traces)
    return opened, logged_nodes(opened)
