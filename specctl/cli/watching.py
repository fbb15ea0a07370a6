"""`specctl drift` and `recalibrate`: a watch over a deployed policy, and its refit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.app import app
from specctl.cli.options import THREADS, DenseTracesArgument, open_to_fit
from specctl.cli.registry import WriterConfig
from specctl.cli.verbs import Given, verb
from specctl.console import Answer
from specctl.errors import UsageError, check_choice
from specctl.progress import set_chunk_threads
from specctl.records import option
from specctl.replay.config import TuneConfig

ALARM = 9
"""Exit code of `drift` after an alarm."""


@verb(
    app,
    examples="""specctl drift traces --policy eagle2
specctl drift traces --policy NAME@prod --reference march --metrics drift.prom""",
    wide=True,
)
def drift(
    traces: Annotated[
        list[str],
        typer.Argument(help="Trace folders of the traffic that the policy served, live."),
    ],
    *,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="The deployed policy: words or an artifact.")
    ],
    reference: list[str] | None = option(
        None,
        "Traces to compare with, of that policy or dense; repeat for more",
        default="the first prompts of the traffic itself",
    ),
    reference_prompts: Annotated[
        int,
        typer.Option(min=8, help="First prompts of the traffic, to compare later ones with."),
    ] = 200,
    unit: str = option(
        "prompt",
        "Unit of the test, exchangeable while nothing changes: prompt, hour, day or conversation",
    ),
    dense: list[str] | None = option(
        None,
        "Recent dense traces, to price the change after an alarm; repeat for more",
        default="none",
    ),
    cost_model: Path | None = option(
        None, "cost_model.json or a named clock: prices it in time too", default="counts only"
    ),
    false_alarm_prob: Annotated[
        float, typer.Option(help="Bound on the probability of a false alarm in the whole watch.")
    ] = 0.05,
    out: Path | None = option(None, "Folder for drift.json", name="--out -o", default="none"),
    metrics: Path | None = option(
        None, "Prometheus text file to write, for a node exporter", default="none"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed that breaks ties of equal figures.")] = 0,
) -> Answer:
    """Watch whether a deployed policy still fits its traffic.

    Exits with 9 after an alarm, with the signal that moved, since when and by how much.

    Run it as often as you like: --false-alarm-prob holds over all runs together.
    """
    from specctl.durable import check_place, prepare_folder, write_whole
    from specctl.records import json_bytes
    from specctl.replay.cost.files import load_cost_model
    from specctl.watch.drift import prometheus, watch_traces
    from specctl.watch.signals import UNITS

    check_choice("--unit", unit, UNITS)
    if cost_model is not None:
        load_cost_model(cost_model)
    if metrics is not None:
        check_place(metrics, "metrics")
    if out is not None:
        prepare_folder(out)
    found, parts = watch_traces(
        traces,
        policy,
        reference=reference,
        reference_prompts=reference_prompts,
        unit=unit,
        dense=dense,
        cost_model=cost_model,
        alpha=false_alarm_prob,
        seed=seed,
    )
    if out is not None:
        write_whole(out / "drift.json", json_bytes(found.to_json()), "drift")
    if metrics is not None:
        write_whole(metrics, prometheus(found, policy).encode(), "metrics")

    def end() -> None:
        if found.alarm:
            raise typer.Exit(ALARM)

    return Answer(found.to_json(), parts, end)


@verb(
    app,
    config=TuneConfig,
    writing=WriterConfig,
    without=(
        "config.families",
        "config.grids",
        "config.packing",
        "config.factor",
        "writing.actor",
        "writing.reason",
        "writing.trust",
    ),
    examples="""specctl recalibrate recent -p hetero --cost-model cost_model.json -o again
specctl recalibrate recent -p NAME@prod --cost-model line -o again""",
    wide=True,
)
def recalibrate(
    traces: DenseTracesArgument,
    *,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="The deployed policy: words or an artifact.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder for recalibration.json and the artifact, policy/."
        ),
    ],
    cost_model: Annotated[
        Path, typer.Option(help="cost_model.json of `specctl profile`, or a named clock.")
    ],
    promote: str | None = option(
        None,
        "NAME@ALIAS in the --registry, to publish a candidate under and point to it",
        default="none",
    ),
    registry: str | None = option(
        None,
        "Registry to publish in, folder or s3://bucket/prefix",
        default="SPECCTL_REGISTRY",
        group="advanced",
    ),
    family: list[str] | None = option(
        None,
        "Policy whose settings are searched, or an artifact; repeat for more",
        default="those that the deployed policy was chosen from",
    ),
    config: Given,
    writing: Given,
    threads: int = THREADS,
) -> Answer:
    """Refit a policy on recent traces; keep only a better one.

    Held-out recent prompts compare it with the deployed policy and the best static setting.

    --promote publishes it and moves the alias; `registry rollback` undoes that.
    """
    import os

    from specctl.cli import registry as publishing
    from specctl.durable import prepare_folder, write_whole
    from specctl.records import json_bytes
    from specctl.registry import open_registry
    from specctl.registry.names import parse_name, parse_new_alias
    from specctl.replay.tune.verdict import POLICY_FOLDER
    from specctl.runtime.words import resolve_policy
    from specctl.watch import recalibrate as room

    settings: TuneConfig = config.build(families=family or ())
    name, _, alias = (promote or "").rpartition("@")
    place = registry or os.environ.get("SPECCTL_REGISTRY")
    if promote is not None:
        parse_name(name)
        parse_new_alias(alias)
        if not place:
            raise UsageError("--promote needs --registry, or SPECCTL_REGISTRY")
        open_registry(place)  # before the search
    opened = open_to_fit(traces)
    named = resolve_policy(policy, opened.fingerprint, allow_lossy=True)
    prepare_folder(out)
    set_chunk_threads(threads)
    found = room.recalibrate(opened, named, policy, settings, cost_model, out)
    data: dict[str, Any] = {**found.to_json(), "promoted": None}
    parts = room.recalibration_parts(data)
    if found.is_better:
        parts.append(f"wrote {out / POLICY_FOLDER}")
    if found.is_better and promote is not None:
        reason = (
            f"recalibrated on {opened.digest[:19]}: x {found.against_deployed.text('.3f')} of the "
            f"deployed policy, x {found.against_static.text('.3f')} of the best static setting"
            f"{data['proviso'] or ''}"
        )
        given = {**writing.values, "reason": reason, "registry": place, "alias": alias}
        moved = publishing.push(folder=out / POLICY_FOLDER, name=name, **given)
        assert moved is not None
        data["promoted"], parts = moved.data, [*parts, *moved.parts]
    write_whole(out / "recalibration.json", json_bytes(data), "recalibration")
    return Answer(data, parts)
