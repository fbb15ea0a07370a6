"""`specctl traces ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl import console
from specctl.cli.app import traces_app
from specctl.cli.options import TracesArgument, refuse_together
from specctl.cli.verbs import verb
from specctl.collect import exporting, rewriting, verifying
from specctl.console import Answer
from specctl.logs.trace_files import open_place, read_header, split_reference
from specctl.logs.trace_set import TraceSet, list_snapshots
from specctl.records import option
from specctl.trace import token_mode

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


@verb(traces_app, "verify", examples="""specctl traces verify traces""")
def verify_traces(traces: SetArgument) -> Answer:
    """Read every byte and every row of a set; exits with 4 where something is damaged."""
    with console.progress("segments", None) as tick:
        found = verifying.verify(traces, on_segment=tick)

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
    context: typer.Context,
    traces: SetArgument,
    *,
    list_all: bool = option(False, "Print the snapshots that there are; take none", name="--list"),
    skip_damaged: SkipDamagedOption = False,
) -> Answer:
    """Freeze what a set holds now; `TRACES@sha256:...` opens it, whatever is written later."""
    refuse_together(context, "list_all", "skip_damaged")
    if list_all:
        place = open_place(split_reference(traces)[0])
        read_header(place)
        found = list_snapshots(place)
        return Answer(found, [found or ["no snapshots"]])
    [listing] = TraceSet.open(traces, skip_damaged=skip_damaged).parts
    taken = rewriting.take_snapshot(listing)
    return Answer(taken.to_json(), [taken.render()])


def _rewrite(
    traces: list[str], out: str, segment_rows: int, *, skip_damaged: bool, resume: bool
) -> Answer:
    with console.progress("prompts", None) as tick:
        done = rewriting.rewrite(
            traces,
            out,
            resume=resume,
            segment_rows=segment_rows,
            skip_damaged=skip_damaged,
            on_prompts=tick,
        )
    return Answer(done.to_json(), [done.render()])


@verb(traces_app, "merge", examples="""specctl traces merge monday tuesday -o both""")
def merge_traces(
    traces: TracesArgument,
    out: NewSetOption,
    segment_rows: SegmentRowsOption = 2_000_000,
    skip_damaged: SkipDamagedOption = False,
    resume: ResumeOption = False,
) -> Answer:
    """Write several sets of one pair and configuration into a new one, each prompt once."""
    return _rewrite(traces, out, segment_rows, skip_damaged=skip_damaged, resume=resume)


@verb(
    traces_app,
    "resegment",
    examples="""specctl traces resegment traces -o fewer --segment-rows 4000000""",
)
def resegment_traces(
    traces: SetArgument,
    out: NewSetOption,
    segment_rows: SegmentRowsOption = 2_000_000,
    skip_damaged: SkipDamagedOption = False,
    resume: ResumeOption = False,
) -> Answer:
    """Write a set into a new one with segments of another size and without repeats."""
    return _rewrite([traces], out, segment_rows, skip_damaged=skip_damaged, resume=resume)


@verb(traces_app, "export", examples="""specctl traces export traces -o tables --format csv""")
def export_traces(
    traces: TracesArgument,
    out: Annotated[str, typer.Option("--out", "-o", help="Local folder for rounds and nodes.")],
    format: str = option("parquet", "parquet or csv"),
    tokens: str = option("drop", "Token ids as they are stored (keep), or left out (drop)"),
    skip_damaged: SkipDamagedOption = False,
) -> Answer:
    """Write plain tables for other tools: one file for rounds, one for nodes."""
    opened = TraceSet.open(*traces, skip_damaged=skip_damaged)
    paths = [str(path) for path in exporting.export(opened, out, format=format, tokens=tokens)]
    if tokens == "keep" and token_mode(opened.header.collect) == "drop":
        console.warn(
            "--tokens keep: the ids were dropped when this was collected; their columns are empty"
        )
    for line in rewriting.missing_lines(opened.damages):
        console.warn(line)
    return Answer(paths, [paths])
