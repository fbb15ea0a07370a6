"""`specctl fit mars`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specctl.cli.app import fit_app
from specctl.cli.fit_sources import open_to_fit
from specctl.cli.options import (
    BatchOption,
    ConfidenceOption,
    DenyOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    FormatOption,
    JsonOption,
    LimitOption,
    LossOption,
    MaxLossOption,
    NewTokensOption,
    NumSeedsOption,
    OutOption,
    ResumeOption,
    RunsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    decode_settings,
    load_models,
)


@fit_app.command("mars")
def fit_mars(
    prompts: Annotated[
        list[str],
        typer.Argument(help="Prompt files, or 'embedded'; those with an answer are judged."),
    ],
    out: OutOption,
    shape: Annotated[
        str, typer.Option(help="Shape, maybe with a budget, by words or artifact.")
    ] = "eagle2",
    mode: Annotated[
        str, typer.Option(help="sound, alg1 (greedy, the paper) or code_v1 (as released).")
    ] = "sound",
    form: Annotated[
        str, typer.Option(help="ratio (paper), margin (nats) or prob_ratio.")
    ] = "ratio",
    thetas: Annotated[
        str | None,
        typer.Option(help="Thresholds, strictest first, comma-separated; default: by the form."),
    ] = None,
    deny: DenyOption = None,
    max_loss: MaxLossOption = 0.02,
    confidence: ConfidenceOption = 0.9,
    loss: LossOption = "one-sided",
    num_seeds: NumSeedsOption = 1,
    traces: Annotated[
        list[str] | None,
        typer.Option(
            help="Dense traces to screen the thresholds with; repeat for more; default: none."
        ),
    ] = None,
    max_diverging: Annotated[
        float, typer.Option(help="Do not run thresholds that change more of the traces' texts.")
    ] = 1.0,
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
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose the threshold of relaxed acceptance by what it costs in right answers."""
    from specctl import console
    from specctl.collect.prompts import load_prompt_files
    from specctl.runtime.domain import pair_domain
    from specctl.runtime.policy_spec import resolve_policy
    from specctl.train.mars import judge_sweep, sweep
    from specctl.train.mars_artifact import keep_report, mars_publication
    from specctl.train.mars_options import mars_config, plan_of
    from specctl.train.mars_report import build_report, render_report
    from specctl.train.publish import save_fit
    from specctl.train.runs import RunFolder

    asked = load_prompt_files(prompts, format=format, limit=limit)
    settings = decode_settings(max_new_tokens, temperature, top_k, top_p, seed)
    plan = plan_of(asked, settings, num_seeds, batch_size)
    pair = load_models(target, drafter, device, dtype, threads)
    base = resolve_policy(shape, pair.fingerprint, allow_lossy=True).policy  # its shape alone
    config = mars_config(
        plan,
        mode=mode,
        form=form,
        thetas=thetas,
        deny=deny,
        special_ids=pair.target.tokenizer.all_special_ids,
        max_loss=max_loss,
        confidence=confidence,
        loss=loss,
    )
    config, hazards = screen(traces or [], base, config, pair, max_diverging)
    place = runs or out.with_name(f"{out.name}.runs")
    folder = RunFolder.open(place, plan.header(pair.fingerprint), resume=resume)
    with console.progress("answers", (1 + len(config.thetas)) * len(asked) * num_seeds) as tick:
        found = sweep(pair, base, plan, config, folder, on_answer=tick)
    report = build_report(found, pair, plan, hazards)
    keep_report(report, place)
    judge_sweep(found).require_any([f"theta {theta:g}" for theta in config.thetas])
    artifact = save_fit(
        mars_publication(found, report, pair.fingerprint),
        out,
        pair.fingerprint,
        domain=pair_domain(pair, batch_size=batch_size),
    )
    console.show_fit(artifact, report, render_report, out, as_json=as_json)


def screen(
    traces: list[str], base: Any, config: Any, pair: Any, max_diverging: float
) -> tuple[Any, Any]:
    """The configuration without thresholds that change too many logged texts, and the hazards."""
    from specctl.replay.fit_inputs import logged_openings, open_dense
    from specctl.train.mars_options import screened

    if not traces:
        return config, None
    log = open_dense(open_to_fit(traces), pair.fingerprint)
    first = config.acceptance(config.thetas[0])
    return screened(config, logged_openings(log, base, first), max_diverging)
