"""Options that several verbs share, and what they build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

TracesArgument = Annotated[
    list[str],
    typer.Argument(help="One or more trace sets of one pair: FOLDER, s3://..., @sha256:..."),
]
DenseTracesArgument = Annotated[
    list[str],
    typer.Argument(help="One or more dense trace sets of one pair: FOLDER, s3://..., @sha256:..."),
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Artifact folder to write.")]
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
PoliciesOption = Annotated[
    list[str],
    typer.Option(
        "--policy", "-p", help="Policy to score, e.g. ar, chain, eagle2:depth=8; repeat for more."
    ),
]
ReplayThreadsOption = Annotated[
    int, typer.Option(min=1, help="Threads that share the log; results do not depend on it.")
]
TimesOption = Annotated[
    Path | None,
    typer.Option(help="cost_model.json of `specctl profile`: adds times. Default: counts only."),
]
SlotsOption = Annotated[int, typer.Option(min=1, help="Prompts decoded together at most: slots.")]
ArrivalRateOption = Annotated[
    float | None,
    typer.Option(help="Requests per second, Poisson; default: a closed loop, always full."),
]
ObjectiveOption = Annotated[
    str, typer.Option(help="latency, throughput or goodput (with --tpot-limit-ms).")
]
TpotLimitOption = Annotated[
    float | None,
    typer.Option(help="Time per output token of a good request, ms; default: none."),
]
HeldOutOption = Annotated[float, typer.Option(help="Share of prompts held out, in (0, 1).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def refuse_together(context: typer.Context, option: str, *others: str) -> None:
    """Refuses options of which one makes the others mean nothing, where both were typed.

    Args:
        option, others: names of the verb's parameters.

    Raises:
        UsageError: `option` beside one of the others.
    """
    from specctl.errors import UsageError

    typed = [name for name in (option, *others) if _is_typed(context, name)]
    if typed[1:] and typed[0] == option:
        words = {param.name: param.opts[0] for param in context.command.params}
        raise UsageError(
            words[option],
            expected=f"it without {' and '.join(words[name] for name in others)}",
            found=" ".join(words[name] for name in typed),
            fix="leave one of them out",
        )


def refuse_without(context: typer.Context, option: str, needed: str) -> None:
    """Refuses an option that means nothing without another one, where it was typed alone.

    Args:
        option, needed: names of the verb's parameters.

    Raises:
        UsageError: `option` without `needed`.
    """
    from specctl.errors import UsageError

    if _is_typed(context, option) and not _is_typed(context, needed):
        words = {param.name: param.opts[0] for param in context.command.params}
        raise UsageError(
            words[option],
            expected=f"it with {words[needed]}",
            found="it alone",
            fix=f"add {words[needed]}, or leave it out",
        )


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def decode_settings(
    max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int
) -> Any:
    from specctl.runtime.conversations import DecodeSettings
    from specctl.runtime.observe import Sampling

    return DecodeSettings(max_new_tokens, Sampling(temperature, top_k, top_p, seed))


def load_models(target: str, drafter: str, device: str, dtype: str, threads: int | None) -> Any:
    import torch

    from specctl.runtime.load import load_pair

    if threads is not None:
        torch.set_num_threads(threads)
    return load_pair(target, None if drafter == "none" else drafter, device=device, dtype=dtype)
