"""The command line: one function a verb, no logic. Heavy imports stay inside the verbs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.errors import SpecctlError

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells count."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Collect, fit, compare and run policies for tree speculative decoding.",
)
fit_app = typer.Typer(no_args_is_help=True, help="Fit a policy from traces.")
app.add_typer(fit_app, name="fit")

TargetOption = Annotated[str, typer.Option(help="Target: folder, hub id, or 'embedded'.")]
DrafterOption = Annotated[
    str,
    typer.Option(help="Drafter: EAGLE-3 head or small model, 'embedded[:small]', or 'none'."),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[
    str, typer.Option(help="auto (float32 on CPU, bfloat16 on CUDA), float32, bfloat16, float16.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads of torch; default: torch's own choice.")
]
FormatOption = Annotated[
    str,
    typer.Option(help="Prompt format: auto, text, jsonl, spec-bench, humaneval, gsm8k, sharegpt."),
]
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Use the first N prompts; default: all.")
]
NewTokensOption = Annotated[int, typer.Option(min=1, help="Tokens to emit per turn at most.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Prompts decoded together.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Sample among the N likeliest tokens; 0 for all.")]
TopPOption = Annotated[float, typer.Option(help="Sample within this nucleus mass, in (0, 1].")]
SeedOption = Annotated[int, typer.Option(help="Seed; every request draws its own stream from it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def _version(value: bool) -> None:  # noqa: FBT001  typer's callback form
    if value:
        from specctl import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def specctl(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Offline calibration and a lean runtime for tree speculative decoding."""


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
    settings = _settings(max_new_tokens, temperature, top_k, top_p, seed)
    pair = _load(target, drafter, device, dtype, threads)
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


@fit_app.command("cart")
def fit_cart(
    traces: Annotated[list[Path], typer.Argument(help="One or more trace folders of one pair.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Artifact folder to write.")],
    label: Annotated[str, typer.Option(help="tcr (paper) or accepted.")] = "tcr",
    filter: Annotated[str, typer.Option(help="fully_accepted (paper) or all.")] = "fully_accepted",
    method: Annotated[str, typer.Option(help="cart (paper) or exact (1-D optimum).")] = "cart",
    max_leaf_depth: Annotated[int, typer.Option(help="Tree levels; 3 give 8 bins.")] = 3,
    gammas: Annotated[
        str, typer.Option(help="Size factor of each low-entropy bin, comma-separated.")
    ] = "0.3,0.6,1.0",
    alpha: Annotated[
        int | None, typer.Option(help="Extra levels of the first bin; default ceil(depth/2).")
    ] = None,
    index_base: Annotated[int, typer.Option(help="First i in alpha - i: 0 (settled) or 1.")] = 0,
    cap_tokens: Annotated[bool, typer.Option(help="Never submit more than the base size.")] = False,
    min_rows: Annotated[int, typer.Option(help="Fewest rounds in a bin.")] = 5,
    held_out: Annotated[float, typer.Option(help="Share of prompts held out, in (0, 1).")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split by prompt and of ties.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Fit HeteroSpec's entropy bins and write them as an artifact."""
    from specctl import console
    from specctl.collect.reader import TraceSet
    from specctl.train.cart import fit_cart as fit
    from specctl.train.options import cart_config
    from specctl.train.publish import save_fit
    from specctl.train.report import render_report

    opened = TraceSet.open(*traces)
    config = cart_config(
        opened.header.policy,
        label=label,
        filter=filter,
        method=method,
        max_leaf_depth=max_leaf_depth,
        gammas=gammas,
        alpha=alpha,
        index_base=index_base,
        cap_tokens=cap_tokens,
        min_rows=min_rows,
        held_out_frac=held_out,
        seed=seed,
    )
    fitted = fit(opened.scan("rounds"), config)
    artifact = save_fit(fitted, out, opened.fingerprint, opened.digest)
    if as_json:
        console.show_json(console.fit_json(artifact, fitted.report, out))
    else:
        console.show(render_report(fitted.report))
        console.show(f"wrote {out}  {artifact.digest}")


@app.command()
def run(
    prompts: Annotated[str, typer.Argument(help="Prompt file, or 'embedded'.")] = "embedded",
    target: TargetOption = "embedded",
    drafter: DrafterOption = "embedded",
    policy: Annotated[
        str, typer.Option(help="ar, chain, eagle2 (with :field=value), or an artifact folder.")
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
    from specctl.runtime.policy_spec import resolve_policies
    from specctl.runtime.results import check_results_folder, write_results

    check_results_folder(out)
    on_tokens = console.token_printer(stream=stream, batch_size=batch_size, as_json=as_json)
    asked = load_prompts(prompts, format=format, limit=limit)
    settings = _settings(max_new_tokens, temperature, top_k, top_p, seed)
    pair = _load(target, drafter, device, dtype, threads)
    named = resolve_policies(compare or policy, pair.fingerprint, allow_lossy=allow_lossy)
    with console.progress("decoded prompts", len(asked) * len(named)) as tick:
        comparison = compare_policies(
            pair,
            named,
            asked,
            settings,
            batch_size=batch_size,
            on_prompt=lambda _: tick(),
            on_tokens=on_tokens and on_tokens(pair.target.tokenizer),
        )
    rows = [result.summary() for result in comparison.results]
    if out is not None:
        write_results(out, comparison.results, pair, settings, batch_size)
    if as_json:
        console.show_json(rows)
    else:
        console.show(console.comparison_table(rows, console.run_title(pair, len(asked), settings)))
        console.show(console.equality_line(rows))
    if comparison.is_interrupted:
        raise KeyboardInterrupt


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="An artifact folder or a trace folder.")],
    as_json: JsonOption = False,
) -> None:
    """Print an artifact or a trace set for a person."""
    from specctl import console
    from specctl.describe import describe_path

    described = describe_path(path)
    if as_json:
        console.show_json(described.to_json())
    else:
        console.show(described.render())


def _settings(max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> Any:
    from specctl.runtime.conversations import DecodeSettings
    from specctl.runtime.observe import Sampling

    return DecodeSettings(max_new_tokens, Sampling(temperature, top_k, top_p, seed))


def _load(target: str, drafter: str, device: str, dtype: str, threads: int | None) -> Any:
    import torch

    from specctl.runtime.load import load_pair

    if threads is not None:
        torch.set_num_threads(threads)
    return load_pair(target, None if drafter == "none" else drafter, device=device, dtype=dtype)


def main() -> None:
    """Entry point: every refusal becomes one line and an exit code, Ctrl-C becomes 130."""
    try:
        code = app(standalone_mode=False)
    except SpecctlError as error:
        code = _refuse(str(error), error.exit_code)
    except typer.TyperException as error:  # an option that the parser refuses
        code = _refuse(error.format_message(), 2)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    if code == INTERRUPTED:
        typer.echo("interrupted: what was finished is kept", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str, code: int) -> int:
    if message:  # none where the help was shown instead
        typer.echo(f"error: {' '.join(message.split())}", err=True)
    return code
