"""`specctl traces ...`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specctl.cli.app import reads_only, traces_app
from specctl.cli.options import JsonOption, TracesArgument, refuse_together

DAMAGED = 4
"""Exit code of `verify` where something is damaged, as of every refusal of traces."""
SetArgument = Annotated[
    str,
    typer.Argument(help="Trace set: a folder, or s3://bucket/prefix; @sha256:... a snapshot."),
]
NewSetOption = Annotated[
    str, typer.Option("--out", "-o", help="New set to write: a folder, or s3://bucket/prefix.")
]
SegmentRowsOption = Annotated[
    int, typer.Option(min=1, help="Rows of a segment, about; all are in memory at once.")
]
SkipDamagedOption = Annotated[
    bool,
    typer.Option("--skip-damaged", help="Leave out damaged segments, and say what is missing."),
]
ResumeOption = Annotated[bool, typer.Option(help="Go on with a set that was begun like this.")]


@traces_app.command("verify")
@reads_only
def verify_traces(traces: SetArgument, as_json: JsonOption = False) -> None:
    """Read every byte and every row of a set; exits with 4 where something is damaged."""
    from specctl import console
    from specctl.collect.verifying import verify

    with console.progress("segments", None) as tick:
        found = verify(traces, on_segment=tick)
    _show(found, as_json=as_json)
    if not found.is_whole:
        raise typer.Exit(DAMAGED)


@traces_app.command("snapshot")
def snapshot_traces(
    context: typer.Context,
    traces: SetArgument,
    list_all: Annotated[
        bool, typer.Option("--list", help="Print the snapshots that there are; take none.")
    ] = False,
    skip_damaged: SkipDamagedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Freeze what a set holds now; `TRACES@sha256:...` opens it, whatever is written later."""
    from specctl import console
    from specctl.collect.rewriting import take_snapshot
    from specctl.logs.trace_files import open_place, read_header, split_reference
    from specctl.logs.trace_set import TraceSet, list_snapshots

    refuse_together(context, "list_all", "skip_damaged")
    if list_all:
        place = open_place(split_reference(traces)[0])
        read_header(place)
        found = list_snapshots(place)
        console.show_lines(found if found or as_json else ["no snapshots"], as_json=as_json)
        return
    [listing] = TraceSet.open(traces, skip_damaged=skip_damaged).parts
    _show(take_snapshot(listing), as_json=as_json)


@traces_app.command("merge")
def merge_traces(
    traces: TracesArgument,
    out: NewSetOption,
    segment_rows: SegmentRowsOption = 2_000_000,
    skip_damaged: SkipDamagedOption = False,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write several sets of one pair and configuration into a new one, each prompt once."""
    _rewrite(traces, out, segment_rows, skip_damaged=skip_damaged, resume=resume, as_json=as_json)


@traces_app.command("resegment")
def resegment_traces(
    traces: SetArgument,
    out: NewSetOption,
    segment_rows: SegmentRowsOption = 2_000_000,
    skip_damaged: SkipDamagedOption = False,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a set into a new one with segments of another size and without repeats."""
    _rewrite([traces], out, segment_rows, skip_damaged=skip_damaged, resume=resume, as_json=as_json)


def _rewrite(
    traces: list[str], out: str, rows: int, *, skip_damaged: bool, resume: bool, as_json: bool
) -> None:
    from specctl import console
    from specctl.collect.rewriting import rewrite

    with console.progress("prompts", None) as tick:
        done = rewrite(
            traces,
            out,
            resume=resume,
            segment_rows=rows,
            skip_damaged=skip_damaged,
            on_prompts=tick,
        )
    _show(done, as_json=as_json)


@traces_app.command("export")
def export_traces(
    traces: TracesArgument,
    out: Annotated[str, typer.Option("--out", "-o", help="Local folder for rounds and nodes.")],
    format: Annotated[str, typer.Option(help="parquet or csv.")] = "parquet",
    tokens: Annotated[
        str, typer.Option(help="Token ids as they are stored (keep), or left out (drop).")
    ] = "drop",
    skip_damaged: SkipDamagedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write plain tables for other tools: one file for rounds, one for nodes."""
    from specctl import console
    from specctl.collect.exporting import export
    from specctl.collect.rewriting import missing_lines
    from specctl.logs.trace_set import TraceSet
    from specctl.trace import token_mode

    opened = TraceSet.open(*traces, skip_damaged=skip_damaged)
    paths = export(opened, out, format=format, tokens=tokens)
    if tokens == "keep" and token_mode(opened.header.collect) == "drop":
        console.warn(
            "--tokens keep: the ids were dropped when this was collected; their columns are empty"
        )
    for line in missing_lines(opened.damages):
        console.warn(line)
    console.show_lines([str(path) for path in paths], as_json=as_json)


def _show(result: Any, *, as_json: bool) -> None:
    from specctl import console

    if as_json:
        console.show_json(result.to_json())
    else:
        console.show(result.render())
