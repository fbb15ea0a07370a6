"""`specctl collect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    TopKOption,
    TopPOption,
    decode_settings,
    load_models,
)


@app.command()
def collect(
    prompts: Annotated[str, typer.Argument(help="Prompt file, or 'embedded'.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Trace folder to write.")],
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    policy: Annotated[
        str, typer.Option(help="Static policy to decode with, e.g. eagle2:depth=6:top_k=8.")
    ] = "eagle2",
    resume: Annotated[bool, typer.Option(help="Go on with a folder of the same run.")] = False,
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
    """Decode prompts live and write per-round and per-node traces (Parquet)."""
    from specctl import console
    from specctl.collect.live import collect_live
    from specctl.collect.prompts import load_prompts
    from specctl.runtime.policy_spec import resolve_policy

    asked = load_prompts(prompts, format=format, limit=limit)
    settings = decode_settings(max_new_tokens, temperature, top_k, top_p, seed)
    pair = load_models(target, drafter, device, dtype, threads)
    named = resolve_policy(policy, pair.fingerprint)
    with console.progress("committed prompts", len(asked)) as tick:
        summary = collect_live(
            pair,
            asked,
            named.policy,
            settings,
            out,
            batch_size=batch_size,
            resume=resume,
            on_commit=lambda commit: tick(len(commit.prompt_ids)),
        )
    if as_json:
        console.show_json(summary.to_json())
    else:
        console.show(console.collect_lines(summary))
