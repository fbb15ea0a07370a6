"""`specctl run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.interrupts import reads_only_without
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
    refuse_together,
)
from specctl.cli.run_table import comparison_table, equality_line, run_title


@app.command()
@reads_only_without("out")
def run(
    context: typer.Context,
    prompts: Annotated[str, typer.Argument(help="Prompt file, or 'embedded'.")] = "embedded",
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    policy: Annotated[
        str,
        typer.Option(
            help="ar, chain, eagle2 (with :field=value), an artifact folder, REGISTRY/NAME@ALIAS."
        ),
    ] = "eagle2",
    compare: Annotated[
        str | None,
        typer.Option(
            help="Several policies, comma-separated, on the same prompts; default: --policy alone."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for results.json and the texts; default: write none."
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option(help="Print the text of each prompt as it comes.")
    ] = False,
    allow_lossy: Annotated[
        bool, typer.Option(help="Accept policies that change the text.")
    ] = False,
    allow_mismatch: Annotated[
        bool,
        typer.Option(
            help="Accept lossless artifacts of another pair, hardware, number format or batch size."
        ),
    ] = False,
    offline: Annotated[
        bool,
        typer.Option(help="Take policies of registries from the cache: what they meant last."),
    ] = False,
    decisions: Annotated[
        str,
        typer.Option(
            help="What computes what a policy learned: auto, fused (CUDA kernels), torch, onnx."
        ),
    ] = "auto",
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
    """Decode prompts under one policy, or compare several in one run."""
    from specctl import console
    from specctl.collect.prompts import load_prompts
    from specctl.runtime.compare import compare_policies
    from specctl.runtime.domain import expectation
    from specctl.runtime.output import prepare_folder
    from specctl.runtime.policy_spec import check_policies, resolve_policies
    from specctl.runtime.results import write_results
    from specctl.runtime.runnable import check_decisions

    refuse_together(context, "compare", "policy")
    backend = check_decisions(decisions)
    if out is not None:
        prepare_folder(out)
    on_tokens = console.token_printer(stream=stream, batch_size=batch_size, as_json=as_json)
    asked = load_prompts(prompts, format=format, limit=limit)
    settings = decode_settings(max_new_tokens, temperature, top_k, top_p, seed)
    # Before minutes of loading models: a mistyped policy shows at once.
    named = resolve_policies(compare or policy, allow_lossy=allow_lossy, offline=offline)
    pair = load_models(target, drafter, device, dtype, threads)
    expect = expectation(pair, batch_size, allow_mismatch=allow_mismatch, warn=console.warn)
    check_policies(named, expect)
    with console.progress("decoded prompts", len(asked) * len(named)) as tick:
        comparison = compare_policies(
            pair,
            named,
            asked,
            settings,
            batch_size=batch_size,
            decisions=backend,
            on_prompt=lambda _: tick(),
            on_tokens=on_tokens and on_tokens(pair.target.tokenizer),
        )
    rows = [result.summary() for result in comparison.results]
    if out is not None:
        write_results(out, comparison.results, pair, settings, batch_size, backend)
    if as_json:
        console.show_json(rows)
    else:
        console.show(comparison_table(rows, run_title(pair, len(asked), settings)))
        console.show(equality_line(rows))
    for row in rows:
        if row["fallback_calls"]:
            console.warn(
                f"{row['policy']} failed in {row['fallback_calls']} of {row['calls']} calls, "
                "which a static plan decided; the text is not touched by that"
            )
    if comparison.is_interrupted:
        raise KeyboardInterrupt
