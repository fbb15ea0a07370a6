"""`specctl fit adasd`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.app import fit_app
from specctl.cli.fit_sources import open_to_fit
from specctl.cli.options import (
    BatchOption,
    ConfidenceOption,
    DenseTracesArgument,
    DenyOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    FormatOption,
    HeldOutOption,
    JsonOption,
    LimitOption,
    LossOption,
    MaxLossOption,
    NewTokensOption,
    NumSeedsOption,
    OutOption,
    ResumeOption,
    RunsOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    decode_settings,
    load_models,
)


@fit_app.command("adasd")
def fit_adasd(
    traces: DenseTracesArgument,
    out: OutOption,
    window: Annotated[
        int | None, typer.Option(help="Draft tokens at most; default 20, or the traces' depth.")
    ] = None,
    between: Annotated[
        str,
        typer.Option(help="Threshold: midpoint, rejected (paper), or both, tried."),
    ] = "both",
    weights: Annotated[
        str, typer.Option(help="Tokens that the warm start counts for, tried; 0 is cold.")
    ] = "0,4,8,16,64,256",
    min_samples: Annotated[
        int, typer.Option(help="Accepted and rejected tokens before a threshold acts.")
    ] = 8,
    half_life: Annotated[
        float | None, typer.Option(help="Tokens after which one weighs half; default: never.")
    ] = None,
    drop_last: Annotated[
        bool, typer.Option("--drop-last", help="Leave the uncertain token out; the paper keeps it.")
    ] = False,
    draft_cost: Annotated[
        float, typer.Option(min=0, help="Time of a drafted level over the target's forward.")
    ] = 0.1,
    cost_model: Annotated[
        Path | None,
        typer.Option(help="cost_model.json of `specctl profile`; default: --draft-cost decides."),
    ] = None,
    held_out: HeldOutOption = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split by prompt and of sampling.")] = 0,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            help="Prompt files with answers, or 'embedded': certify the acceptance on them. "
            "Default: no acceptance, a lossless artifact.",
        ),
    ] = None,
    variant: Annotated[str, typer.Option(help="Acceptance threshold: base, A, B or C.")] = "base",
    clips: Annotated[
        str | None, typer.Option(help="Clips of it, smallest first; default 0.1 to 0.6.")
    ] = None,
    deny: DenyOption = None,
    max_loss: MaxLossOption = 0.02,
    confidence: ConfidenceOption = 0.9,
    loss: LossOption = "one-sided",
    num_seeds: NumSeedsOption = 1,
    runs: RunsOption = None,
    resume: ResumeOption = False,
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    format: FormatOption = "auto",
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    batch_size: BatchOption = 1,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Warm start of AdaSD's stop, and the certified clip of its acceptance."""
    from specctl import console
    from specctl.logs.trace_set import domain_of
    from specctl.policy import Policy
    from specctl.train.adasd_artifact import adasd_publication
    from specctl.train.adasd_options import clip_config, stop_config
    from specctl.train.adasd_report import AdasdReport, render_report
    from specctl.train.publish import save_fit

    opened = open_to_fit(traces)
    clock, unit = cost_clock(cost_model, draft_cost, opened)

    def config(depth: int) -> Any:
        return stop_config(
            depth,
            window=window,
            between=between,
            weights=weights,
            min_samples=min_samples,
            half_life=half_life,
            keep_last=not drop_last,
            held_out_frac=held_out,
            seed=seed,
            cost=unit,
        )

    stop = fit_the_stop(opened, config, clock)
    policy, clip = Policy(shape=stop.shape), None
    if prompts:
        settings = decode_settings(max_new_tokens, temperature, top_k, top_p, seed)
        pair = load_models(target, drafter, device, dtype, threads)
        config_of_clips = clip_config(
            clips=clips,
            deny=deny,
            special_ids=pair.target.tokenizer.all_special_ids,
            max_loss=max_loss,
            confidence=confidence,
            loss=loss,
            num_seeds=num_seeds,
            variant=variant,
            min_samples=min_samples,
            half_life=half_life,
        )
        place = runs or out.with_name(f"{out.name}.runs")
        policy, clip = certify_the_clip(
            pair,
            opened.fingerprint,
            stop,
            config_of_clips,
            asked=(prompts, format, limit),
            decoding=(settings, num_seeds, batch_size),
            folder=(place, resume),
        )
    report = AdasdReport(stop=stop, clip=clip)
    fingerprint = opened.fingerprint
    publication = adasd_publication(policy, report, fingerprint, opened.digest)
    artifact = save_fit(
        publication, out, fingerprint, domain=domain_of(opened), snapshots=opened.snapshots
    )
    console.show_fit(artifact, report, render_report, out, as_json=as_json)


def cost_clock(cost_model: Path | None, draft_cost: float, traces: Any) -> tuple[Any, str]:
    """What a round takes, and in what unit."""
    from specctl import console
    from specctl.replay.cost.model import replay_clock
    from specctl.replay.fit_inputs import target_steps
    from specctl.replay.run import open_cost_model

    model = open_cost_model(cost_model, traces, console.warn)
    if model is None:
        unit = f"target steps, a drafted level costing {draft_cost:g}"
        return target_steps(draft_cost), unit
    return replay_clock(model), f"us of cost model {model.digest}"


def fit_the_stop(traces: Any, config: Any, clock: Any) -> Any:
    """The stop's fit; the traces are read once."""
    from specctl import console
    from specctl.logs.chain_log import read_chains
    from specctl.logs.tree_log import DenseLog
    from specctl.replay.fit_inputs import DISTANCE, prompt_costs, tokens_tested
    from specctl.train.adasd import fit_stop

    log = DenseLog.open(traces)
    settled = config(log.support.depth)
    with console.progress("positions", traces.num_rows("rounds")) as tick:
        chains = read_chains(log, extra=(DISTANCE,), on_positions=tick)

    def measure(policies: Any) -> Any:
        return prompt_costs(chains, policies, clock)

    return fit_stop(tokens_tested(chains, settled.window), measure, settled)


def certify_the_clip(
    pair: Any,
    fingerprint: Any,
    stop: Any,
    config: Any,
    *,
    asked: tuple[Any, ...],
    decoding: tuple[Any, ...],
    folder: tuple[Path, bool],
) -> tuple[Any, Any]:
    """The whole policy under the clip that the contract certifies, and the report of the sweep."""
    from specctl import console
    from specctl.collect.prompts import load_prompt_files
    from specctl.train.adasd_clip import (
        check_runs,
        clip_report,
        judge_clips,
        keep_clips,
        sweep_clips,
    )
    from specctl.train.mars_options import plan_of
    from specctl.train.runs import RunFolder

    sources, format, limit = asked
    plan = plan_of(load_prompt_files(sources, format=format, limit=limit), *decoding)
    check_runs(plan, pair.fingerprint, fingerprint)
    runs = RunFolder.open(folder[0], plan.header(pair.fingerprint), resume=folder[1])
    num_answers = (1 + len(config.clips)) * len(plan.prompts) * plan.num_seeds
    with console.progress("answers", num_answers) as tick:
        found = sweep_clips(pair, stop.shape, stop.distance, plan, config, runs, on_answer=tick)
    report = clip_report(found, pair, plan)
    keep_clips(report, folder[0])
    judge_clips(found).require_any([f"clip {clip:g}" for clip in config.clips])
    assert report.chosen is not None, "one that the contract holds for"
    return found.policy(report.chosen), report
