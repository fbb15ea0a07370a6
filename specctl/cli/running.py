"""`specctl run`, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app import app
from specctl.cli.options import check_drafter, refuse_together
from specctl.cli.verbs import Given, verb
from specctl.console import Answer
from specctl.errors import UsageError
from specctl.formatting import Table, count, pair_title, part, sampling
from specctl.progress import progress
from specctl.records import PositiveInt, option
from specctl.replay.config import ALL_PROMPTS
from specctl.runtime.config import Decisions, DecodingConfig

if TYPE_CHECKING:
    from specctl.collect.rounds import TraceRecorder
    from specctl.runtime.compare import Comparison
    from specctl.runtime.conversations import Conversation, DecodeSettings
    from specctl.runtime.load import Pair


LEAST_WAITING = 0.02
"""Fraction of the time waited for a processor from which a line reports it."""


@verb(
    app,
    decoding=DecodingConfig,
    examples="""specctl run embedded --limit 4
specctl run prompts.txt --target TARGET --drafter HEAD --policy chain
specctl run embedded --compare ar,chain,eagle2 --limit 24 -o results""",
    wide=True,
)
def run(
    prompts: Annotated[str, typer.Argument(help="Prompt file, or 'embedded'.")] = "embedded",
    *,
    policy: str | None = option(
        None,
        "ar, chain, eagle2 (with :field=value), an artifact folder, REGISTRY/NAME@ALIAS",
        default="eagle2",
    ),
    compare: str | None = option(
        None, "Several policies, comma-separated, on the same prompts", default="--policy alone"
    ),
    out: Path | None = option(
        None, "Folder for results.json and the texts", name="--out -o", default="write none"
    ),
    trace: str | None = option(
        None, "Log the rounds into this trace set: a folder, or s3://bucket/prefix", default="none"
    ),
    dense_every: PositiveInt | None = option(
        None, "Log each N-th prompt densely too, into TRACES-dense", default="none"
    ),
    allow_lossy: bool = option(False, "Accept policies that may change the output"),
    all_prompts: bool = ALL_PROMPTS,
    allow_mismatch: bool = option(
        False,
        "Accept lossless artifacts of another pair, hardware, number format or batch size",
        group="advanced",
    ),
    offline: bool = option(
        False, "Take policies of registries from the cache, as last pulled", group="advanced"
    ),
    decisions: Decisions = option(
        "auto",
        "Backend of a policy's learned part: auto, fused (CUDA kernels), torch, onnx (scorers)",
        group="advanced",
    ),
    decoding: Given,
) -> Answer:
    """Decode prompts under a policy, or compare several."""
    from specctl.collect.prompts import load_prompts, with_room
    from specctl.collect.trace_writer import check_place
    from specctl.durable import prepare_folder
    from specctl.logs.trace_files import open_place, sample_place
    from specctl.runtime.words import check_policies, resolve_policies

    refuse_together(compare=compare, policy=policy)
    refuse_together(compare=compare, trace=trace)  # a set has one policy
    if dense_every is not None and trace is None:
        raise UsageError("--dense-every needs --trace: the dense set is written beside that one")
    sets = [] if trace is None else [trace, *([sample_place(trace)] if dense_every else [])]
    for place in sets:
        check_place(open_place(place), resume=False)
    config: DecodingConfig = decoding.build()
    if out is not None:
        prepare_folder(out)
    loaded = load_prompts(prompts, **config.prompt_options)
    # Before models load, so that a mistyped policy shows at once.
    specs = compare or policy or "eagle2"
    named = resolve_policies(specs, allow_lossy=allow_lossy, offline=offline)
    config.check()
    check_drafter(config.drafter, [one.policy.shape for one in named])

    from specctl.collect.dense import collect_dense
    from specctl.collect.live import recording
    from specctl.policy import FullTree
    from specctl.replay.facts import prompt_notes
    from specctl.replay.held_out import choose_prompts
    from specctl.runtime.compare import compare_policies, write_results
    from specctl.runtime.load import expectation

    with progress("loading models", None):
        pair = config.load_pair()
    loaded, settings, size = with_room(loaded, pair, config), config.settings, config.batch_size
    check_policies(named, expectation(pair, size, allow_mismatch=allow_mismatch))
    with_all = all_prompts or not named[1:]  # one policy writes the texts of all
    names = [prompt.prompt_id for prompt in loaded]
    chosen = choose_prompts(names, named, None, all_prompts=with_all)
    loaded = [prompt for prompt in loaded if prompt.prompt_id in chosen.prompts]
    log: AbstractContextManager[TraceRecorder | None] = nullcontext()
    if trace is not None:
        log = recording(pair, loaded, named[0].policy, settings, trace)
    with progress("decoded prompts", len(loaded) * len(named)), log as recorder:
        comparison = compare_policies(
            pair,
            named,
            loaded,
            settings,
            batch_size=size,
            decisions=decisions,
            on_prompt=None if recorder is None else recorder.finish_prompt,
            observer=recorder,
        )
    sampled = [
        collect_dense(pair, loaded[::dense_every], settings, place, FullTree(), batch_size=size)
        for place in sets[1:]
    ]
    if out is not None:
        left_out = chosen.num_left_out
        write_results(out, comparison, pair, settings, size, decisions, num_left_out=left_out)
    num_prompts = part(comparison.num_prompts, comparison.num_given, "prompt")
    title = run_title(pair, num_prompts, settings)
    lines = [*prompt_notes(chosen.num_left_out, None), *(one.render() for one in sampled)]
    return answer_of(comparison, title, lines)


# --------------------------------------------------------------------------- output


def answer_of(comparison: Comparison, title: str, more: Sequence[Any]) -> Answer:
    """The table of a run, with its texts, or with the verdict of a comparison.

    Args:
        more: shown below.
    """
    from specctl.runtime.compare import MAX_P_VALUE, verdict

    results, waiting = comparison.results, comparison.waiting_frac
    rows = [result.summary() | {"waiting_frac": waiting} for result in results]
    table = comparison_table(rows, title)

    def end() -> None:
        if comparison.is_interrupted:
            raise KeyboardInterrupt

    if len(results) == 1:
        return Answer(rows, [texts_of(results[0].conversations), table, *more], end)
    lines = [equality_line(rows)]
    if comparison.is_interrupted:
        lines.append(
            f"Interrupted: a random part, {count(comparison.num_prompts, 'prompt')}, as prompts "
            "are decoded in shuffled order."
        )
    if (num_beside := sum(row["paired"] is not None for row in rows)) > 1:
        lines.append(
            f"Each policy is compared by itself, at p {MAX_P_VALUE}: of {num_beside} verdicts, one "
            f"is false by chance in at most {num_beside * MAX_P_VALUE:.0%} of runs."
        )
    if waiting is not None and waiting >= LEAST_WAITING:
        lines.append(f"Other work runs here: decoding waited {waiting:.0%} of the time.")
    return Answer(rows, [verdict(results), table, *lines, *more], end)


def texts_of(conversations: Sequence[Conversation]) -> list[str]:
    """Lines of all texts, each below its name if there are several."""
    named = {
        f"{talk.prompt.prompt_id}/{turn}": text
        for talk in conversations
        for turn, text in enumerate(talk.texts)
    }
    if len(named) == 1:
        return [*named.values(), ""]
    return [line for name, text in named.items() for line in (f"--- {name}", text, "")]


def comparison_table(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """The table of `specctl run`: one row a policy."""
    from specctl.replay.facts import TRAINED, prompt_notes  # brings numpy
    from specctl.stats import Interval

    fitted = [row["policy"] for row in rows if row["num_prompts_fitted_on"]]
    cells = []
    for row in rows:
        wall = row["wall_us"] or 1.0
        spent = [row[f"{phase}_us"] for phase in ("draft", "verify", "policy")]
        spent.append(row["other_us"] + row["prefill_us"])
        cells.append(
            [
                row["policy"] + TRAINED * (row["policy"] in fitted),
                f"{row['tokens_per_s']:.0f}",
                Interval.of_json(row["paired"]["speedup"]).text(".2f") if row["paired"] else "-",
                f"{row['mean_acceptance_length']:.2f}",
                str(row["calls"]),
                str(row["verified_tokens"]),
                *(f"{us / wall:.0%}" for us in spent),
            ]
        )
    shares = ("draft", "verify", "decide", "other")
    base = next((row["policy"] for row in rows if not row["paired"]), "")
    heads = ("policy", "tokens/s", f"× {base}", "τ", "calls", "verified", *shares)
    wide = ("verified", *shares, *(() if rows[1:] else (heads[2],)))
    return Table(title, heads, cells, "\n".join(prompt_notes(None, fitted)), wide=wide)


def equality_line(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence that compares the texts with plain decoding's."""
    checked = [row for row in rows if row["equal_to_ar"] is not None]
    if not checked:
        return "Output not compared with plain decoding; use --compare ar,<policy>."
    drawn = ", ".join(row["policy"] for row in rows if row["equal_to_ar"] is None)
    more = f" {drawn} samples its drafts: only the distribution is the same." if drawn else ""
    wrong = [row for row in checked if not row["equal_to_ar"]]
    if not wrong:
        return f"All{' other' * bool(drawn)} outputs equal plain decoding's, token for token.{more}"
    parts = []
    for row in wrong:
        gaps = [divergence["top2_gap"] for divergence in row["divergences"]]
        if not row["is_lossless"]:
            why = "; the policy is lossy"
        elif None in gaps:
            why = " (sampling follows the rounding of --dtype; float32 has least)"
        else:
            why = f", top-2 logit gap at most {max(gaps):.2g}"
        parts.append(f"{row['policy']}: {len(gaps)} texts{why}")
    return (
        "Outputs that differ from plain decoding's: " + "; ".join(parts) + "." * bool(more) + more
    )


def run_title(pair: Pair, num_prompts: str, settings: DecodeSettings) -> str:
    """The caption of a table of figures: pair, machine, prompts, settings."""
    import torch

    from specctl.runtime.identity import hardware_name

    model = pair.target.model
    threads = "" if model.device.type == "cuda" else f", {count(torch.get_num_threads(), 'thread')}"
    return (
        f"{pair_title(pair.target.name, pair.drafter_name)}\n"
        f"{hardware_name(*model.devices)}{threads}, {str(model.dtype).removeprefix('torch.')}; "
        f"{num_prompts}, {settings.max_new_tokens} new tokens, "
        f"{sampling(vars(settings.sampling))}"
    )
