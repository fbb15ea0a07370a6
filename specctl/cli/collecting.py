"""`specctl collect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.app import app
from specctl.cli.options import (
    BatchOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    FormatOption,
    JsonOption,
    LimitOption,
    NewTokensOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TopPOption,
    decode_settings,
    load_models,
)


@app.command()
def collect(
    prompts: Annotated[str, typer.Argument(help="Prompt file, or 'embedded'.")],
    out: Annotated[
        str,
        typer.Option("--out", "-o", help="Trace set to write: a folder, or s3://bucket/prefix."),
    ],
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    dense: Annotated[
        bool,
        typer.Option(
            "--dense/--live",
            help="Draft a full tree at every position of every response, for fitting and replay,"
            " or decode with a policy and record its rounds.",
        ),
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Live: static policy to decode with, e.g. eagle2:depth=6:top_k=8; default: eagle2."
        ),
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            help="Dense: JSON lines with each prompt's response, e.g. production logs;"
            " default: the target generates them."
        ),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Dense: levels drafted; default: 11.")] = None,
    width: Annotated[
        int | None,
        typer.Option(
            help="Dense: likeliest nodes expanded per level, besides those of every smaller"
            " static tree; default: --top-k."
        ),
    ] = None,
    nested: Annotated[
        bool,
        typer.Option(
            "--nested/--no-nested",
            help="Dense: also expand what smaller static trees would, so that replaying them "
            "is exact.",
        ),
    ] = True,
    full: Annotated[
        str | None,
        typer.Option(
            "--when-full",
            help="Live: where writing falls behind, 'block' lets decoding wait, 'drop' leaves out"
            " prompts, whole, and counts them; default: block.",
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="What the prompts are, e.g. chat; artifacts say it; default: unknown."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with a set of the same run.")] = False,
    shard: Annotated[
        str,
        typer.Option(help="Take part I of N of the prompts, where N processes share one set."),
    ] = "1/1",
    tokens: Annotated[
        str,
        typer.Option(
            help="Token ids: keep; hash, by a secret permutation (frequencies stay visible);"
            " or drop."
        ),
    ] = "keep",
    token_key: Annotated[
        Path | None,
        typer.Option(
            help="Key file of --tokens hash, made where absent; keep it elsewhere. Default: none."
        ),
    ] = None,
    format: FormatOption = "auto",
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    batch_size: BatchOption = 1,
    temperature: TemperatureOption = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Dense: children drafted per expanded node, default 10. Live: as --sample-top-k."
        ),
    ] = None,
    sample_top_k: Annotated[
        int | None, typer.Option(help="Sample among the N likeliest tokens; default: 0, all.")
    ] = None,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write traces (Parquet) of rounds decoded live, or of full trees at every position."""
    from specctl import console
    from specctl.collect.config import LIVE_POLICY, CollectConfig, Shard
    from specctl.collect.dense import collect_dense
    from specctl.collect.live import collect_live
    from specctl.collect.prompts import load_prompts
    from specctl.collect.responses import load_responses
    from specctl.collect.tokens import (
        check_key_file,
        check_tokens,
        prompt_naming,
        token_treatment,
    )
    from specctl.collect.trace_writer import check_place
    from specctl.logs.trace_files import open_place
    from specctl.runtime.policy_spec import check_policies, resolve_policy

    config = CollectConfig(
        dense=dense,
        policy=policy,
        responses=responses,
        depth=depth,
        width=width,
        nested=nested,
        when_full=full,
        workload=workload,
        resume=resume,
        shard=shard,
        tokens=tokens,
        token_key=token_key,
        top_k=top_k,
        sample_top_k=sample_top_k,
    )
    config.check()
    named = None if dense else resolve_policy(policy or LIVE_POLICY)
    check_tokens(tokens, token_key)
    part = Shard.parse(shard)
    place = open_place(out)
    check_place(place, resume=resume or part.count > 1)
    check_key_file(place, token_key)
    naming = prompt_naming(tokens, token_key)
    loaded = load_prompts(prompts, format=format, limit=limit, naming=naming)
    texts = None if responses is None else load_responses(responses, naming)
    settings = decode_settings(max_new_tokens, temperature, config.sampling_top_k, top_p, seed)
    pair = load_models(target, drafter, device, dtype, threads)
    summary: Any
    with console.progress(
        "finished prompts", sum(part.holds(prompt.prompt_id) for prompt in loaded)
    ) as tick:
        shared: Any = {
            "batch_size": batch_size,
            "resume": resume,
            "shard": part,
            "tokens": token_treatment(tokens, token_key, pair.target.model.vocab_size),
            "workload": workload,
            "on_commit": lambda segment: tick(len(segment.prompt_ids)),
        }
        if named is None:
            shape = config.dense_shape()
            summary = collect_dense(pair, loaded, settings, out, shape, responses=texts, **shared)
        else:
            check_policies([named], pair.fingerprint)
            shared["when_full"] = full or "block"
            summary = collect_live(pair, loaded, named.policy, settings, out, **shared)
    if as_json:
        console.show_json(summary.to_json())
    else:
        console.show(summary.render() if dense else console.collect_lines(summary))
