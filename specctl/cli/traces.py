"""`specctl traces ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.app import traces_app
from specctl.cli.options import refuse_together
from specctl.cli.verbs import verb
from specctl.collect.verifying import take_snapshot, verify
from specctl.console import Answer
from specctl.logs.trace_files import open_place, read_header, split_reference
from specctl.logs.trace_set import TraceSet, list_snapshots
from specctl.records import option

DAMAGED = 4
"""Exit code of `verify` for a damaged set, as of every error of traces."""
SetArgument = Annotated[
    str,
    typer.Argument(help="Trace set: a folder, or s3://bucket/prefix; @sha256:... a snapshot."),
]


@verb(traces_app, "verify", examples="""specctl traces verify traces""")
def verify_traces(traces: SetArgument) -> Answer:
    """Check every byte and every row of a set.

    Exits with 4 if it is damaged.
    """
    found = verify(traces)

    def end() -> None:
        if not found.is_whole:
            raise typer.Exit(DAMAGED)

    return Answer(found.to_json(), [found.render()], end)


@verb(
    traces_app,
    "snapshot",
    examples="""specctl traces snapshot traces
specctl traces snapshot traces --list""",
)
def snapshot_traces(
    traces: SetArgument,
    *,
    list_all: bool = option(False, "List snapshots instead of taking one", name="--list"),
    skip_damaged: bool = option(False, "Leave out damaged segments, and report the missing rows"),
) -> Answer:
    """Freeze the present content of a set.

    `TRACES@sha256:...` opens it later.
    """
    refuse_together(list=list_all, skip_damaged=skip_damaged)
    if list_all:
        place = open_place(split_reference(traces)[0])
        read_header(place)
        found = list_snapshots(place)
        return Answer(found, [found or ["no snapshots"]])
    [listing] = TraceSet.open(traces, skip_damaged=skip_damaged).parts
    taken = take_snapshot(listing)
    return Answer(taken.to_json(), [taken.render()])
