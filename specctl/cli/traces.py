"""`specctl traces ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.app import traces_app
from specctl.cli.interrupts import reads_only_without
from specctl.cli.options import JsonOption, TracesArgument, refuse_together, refuse_without

DAMAGED = 4
"""Exit code of `verify` where something is damaged, as of every refusal of traces."""
SetArgument = Annotated[str, typer.Argument(help="Trace set: a folder, or s3://bucket/prefix.")]


@traces_app.command("verify")
@reads_only_without("quarantine")
def verify_traces(
    traces: Annotated[
        str,
        typer.Argument(help="Trace set: a folder, or s3://bucket/prefix; @sha256:... a snapshot."),
    ],
    quarantine: Annotated[
        bool,
        typer.Option(help="Note damaged commits in the set, and take back notes that are mended."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every record and every byte of a set; exits with 4 where something is damaged."""
    from specctl import console
    from specctl.collect.verifying import verify

    with console.progress("files", None) as tick:
        found = verify(traces, quarantine=quarantine, on_segment=tick)
    if as_json:
        console.show_json(found.to_json())
    else:
        console.show(found.render())
    if not found.is_whole:
        raise typer.Exit(DAMAGED)


@traces_app.command("snapshot")
def snapshot_traces(
    context: typer.Context,
    traces: SetArgument,
    list_all: Annotated[
        bool, typer.Option("--list", help="Print the snapshots that there are; take none.")
    ] = False,
    without_damaged: Annotated[
        bool,
        typer.Option(help="Freeze what is whole, and say how many rows are missing."),
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave out a commit, by its path in the set or its digest; may be repeated. The "
            "way out where two commits hold different rows of a prompt. Default: none."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Freeze what a set holds now; `TRACES@sha256:...` opens it, whatever is written later."""
    from specctl import console
    from specctl.collect.header import read_header
    from specctl.collect.keys import check_keys
    from specctl.collect.opening import open_log
    from specctl.collect.places import open_place, split_reference
    from specctl.collect.snapshots import exclude, list_snapshots, take_snapshot

    refuse_together(context, "list_all", "without", "without_damaged")
    place = open_place(split_reference(traces)[0])
    read_header(place)
    if list_all:
        found = list_snapshots(place)
        console.show_lines(found if found or as_json else ["no snapshots"], as_json=as_json)
        return
    log = open_log(
        traces, damaged="skip" if without_damaged else "refuse", allow_repeats=bool(without)
    )
    log, excluded = exclude(log, without or ())
    check_keys([log])
    taken = take_snapshot(log, excluded)
    if as_json:
        console.show_json(taken.to_json())
    else:
        console.show(taken.render())


@traces_app.command("compact")
def compact_traces(
    context: typer.Context,
    traces: SetArgument,
    target_rows: Annotated[
        int, typer.Option(min=1, help="Rows of a joined commit, about; all are in memory at once.")
    ] = 2_000_000,
    prune: Annotated[
        bool,
        typer.Option(help="Afterwards remove files that no commit, snapshot or writer needs."),
    ] = False,
    grace_hours: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Age below which --prune leaves a file alone, hours. Shorter than a commit or a "
            "fit takes, it destroys what they are at: lower it only where nothing uses the set.",
        ),
    ] = 24.0,
    as_json: JsonOption = False,
) -> None:
    """Join small commits into large ones and drop equal repeats; different repeats are refused."""
    from specctl import console
    from specctl.collect import compacting

    refuse_without(context, "grace_hours", "prune")
    with console.progress("commits joined", None) as tick:
        done = compacting.compact(traces, target_rows=target_rows, on_commit=tick)
    if prune:
        done = done.pruned(*compacting.prune(traces, grace_s=grace_hours * 3600))
    if as_json:
        console.show_json(done.to_json())
    else:
        console.show(done.render())


@traces_app.command("merge")
def merge_traces(
    traces: TracesArgument,
    out: Annotated[
        str, typer.Option("--out", "-o", help="Set to write: a folder, or s3://bucket/prefix.")
    ],
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted merge.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write several sets of one pair and configuration into a new one."""
    from specctl import console
    from specctl.collect.merging import merge

    with console.progress("prompts", None) as tick:
        done = merge(traces, out, resume=resume, on_prompts=tick)
    if as_json:
        console.show_json(done.to_json())
    else:
        console.show(done.render())


@traces_app.command("export")
def export_traces(
    traces: TracesArgument,
    out: Annotated[str, typer.Option("--out", "-o", help="Local folder for rounds and nodes.")],
    format: Annotated[str, typer.Option(help="parquet or csv.")] = "parquet",
    tokens: Annotated[
        str, typer.Option(help="Token ids as they are stored (keep), or left out (drop).")
    ] = "drop",
    as_json: JsonOption = False,
) -> None:
    """Write plain tables for other tools: one file for rounds, one for nodes."""
    from specctl import console
    from specctl.collect.exporting import export, lost_ids
    from specctl.collect.reader import TraceSet

    opened = TraceSet.open(*traces)
    paths = export(opened, out, format=format, tokens=tokens)
    lost = lost_ids(opened, tokens)
    if lost is not None:
        console.warn(lost)
    console.show_lines([str(path) for path in paths], as_json=as_json)


@traces_app.command("role")
def role_of_traces(
    name: Annotated[str, typer.Argument(help="reader, collector or compactor.")],
    traces: Annotated[str, typer.Argument(help="Trace set: s3://bucket/prefix.")],
    as_json: JsonOption = False,
) -> None:
    """Print the IAM policy of a role in a set's bucket: JSON, with and without --json."""
    del as_json  # such a policy is JSON for people too
    from specctl import console
    from specctl.collect.roles import trace_role
    from specctl.stores.roles import iam_policy

    console.show_json(iam_policy(traces, trace_role(name)))
