"""`specctl drift` and `recalibrate`: whether a deployed policy still fits, and a better one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specctl import console
from specctl.cli.app import app
from specctl.cli.options import DenseTracesArgument, ReplayThreadsOption, open_to_fit
from specctl.cli.registry import WriterConfig
from specctl.cli.verbs import Given, verb
from specctl.console import Answer
from specctl.errors import UsageError, check_choice
from specctl.policy import Policy, as_chain
from specctl.records import option
from specctl.replay.config import TuneConfig

ALARM = 9
"""Exit code of `drift` where the alarm rang."""


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
        typer.Option(min=8, help="Of the traffic, prompts to compare the others with; 8 units."),
    ] = 200,
    unit: str = option(
        "prompt",
        "Unit that could stand in another's place while nothing changes: prompt, hour, day or "
        "conversation",
    ),
    dense: list[str] | None = option(
        None,
        "Recent dense traces, which price the change where the alarm rings; repeat for more",
        default="none",
    ),
    cost_model: Path | None = option(
        None, "cost_model.json or a named clock: prices it in time too", default="counts only"
    ),
    false_alarm_prob: Annotated[
        float, typer.Option(help="Most probability of a false alarm, over the whole watch.")
    ] = 0.05,
    out: Path | None = option(None, "Folder for drift.json", name="--out -o", default="none"),
    metrics: Path | None = option(
        None, "Text file of Prometheus to write, for a node exporter", default="none"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed that breaks ties of equal figures.")] = 0,
) -> Answer:
    """Watch whether a deployed policy still fits its traffic.

    Exits with 9 where the alarm rang, and says which signal moved, since when and by how much.

    Run it as often as you like: a false alarm has probability --false-alarm-prob over all runs.
    """
    from specctl.runtime.output import json_bytes, prepare_folder, write_whole
    from specctl.watch.drift import prometheus
    from specctl.watch.run import watch_traces
    from specctl.watch.signals import UNITS

    check_choice("--unit", unit, UNITS)
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
    threads: ReplayThreadsOption = 2,
) -> Answer:
    """Refit a deployed policy on recent traces; keep it only if it is better.

    Compared on held-out recent prompts with the deployed policy and the best static setting.

    With --promote it is published and the alias moved; `registry rollback` undoes that.
    """
    import inspect
    import os

    from specctl.cli import fitting
    from specctl.cli import registry as publishing
    from specctl.cli.judging import engine_of
    from specctl.cli.verbs import options_of
    from specctl.logs.trace_set import domain_of
    from specctl.policy import StaticTree
    from specctl.registry.names import parse_new_alias
    from specctl.replay.tune.publish import POLICY_FOLDER, publish
    from specctl.replay.tune.tuning import prepare
    from specctl.runtime.output import json_bytes, prepare_folder, write_whole
    from specctl.runtime.words import resolve_policy, words_of
    from specctl.watch import recalibrate as room

    settings: TuneConfig = config.build(families=family or ())
    name, _, alias = (promote or "").rpartition("@")
    place = registry or os.environ.get("SPECCTL_REGISTRY")
    if promote is not None:
        parse_new_alias(alias)
        if not place:
            expected, fix = "a registry", "name it, or set SPECCTL_REGISTRY"
            raise UsageError(f"--promote: expected {expected}, found none", hint=fix)
    opened = open_to_fit(traces)
    named = resolve_policy(policy, opened.fingerprint, allow_lossy=True)
    manifest = named.parts[0][1].manifest if named.artifact_digest else None
    families = settings.families or room.families_to_search(named.policy, manifest)
    fit = dict(manifest.fit or {}) if manifest is not None else {}
    kind = {"cart": "hetero"}.get(str(fit.get("kind")), str(fit.get("kind")))
    prepare_folder(out)
    if kind in fitting.FITS and not settings.families:
        again, model = fitting.FITS[kind]
        taken = inspect.signature(again).parameters
        paths = {one.name: one.path for one in options_of(model) if one.name in taken}
        stored = room.stored_options(fit, paths)
        stored |= {"held_out": settings.held_out_frac, "seed": settings.seed}
        if kind == "hetero":
            base = StaticTree.model_validate(fit["base"])
            stored["base"] = words_of(Policy(shape=base))
        with console.progress("refit", None):
            again(traces=traces, out=out / "fit", **stored)
        families = (str(out / "fit"),)
    served_by = settings.for_engine or fit.get("for_engine")
    searched = settings.model_copy(update={"families": families, "for_engine": served_by})
    engine = engine_of(searched)
    engine |= {"num_threads": threads, "beside": [replace(named, label=policy)]}
    tuning = prepare(opened, searched, cost_model, warn=console.warn, **engine)
    deployed = as_chain(named.policy) if served_by == "vllm" else named.policy
    found = room.compare(tuning, deployed, policy)
    data, parts = {**found.to_json(), "promoted": None}, found.shown()
    if found.is_better:
        publish(found.tuned, out, opened.fingerprint, domain_of(opened), opened.snapshots)
        parts.append(f"wrote {out / POLICY_FOLDER}")
    if found.is_better and promote is not None:
        reason = (
            f"recalibrated on {opened.digest[:19]}: x {found.against_deployed.text('.3f')} of the "
            f"deployed policy, x {found.against_static.text('.3f')} of the best static setting"
        )
        given = {**writing.values, "reason": reason}
        moved = publishing.push(
            folder=out / POLICY_FOLDER, name=name, registry=place, alias=alias, **given
        )
        assert moved is not None
        data["promoted"], parts = moved.data, [*parts, *moved.parts]
    write_whole(out / "recalibration.json", json_bytes(data), "recalibration")
    return Answer(data, parts)
