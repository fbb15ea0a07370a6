"""`specctl export`: a policy as the flags and files of a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specctl import console
from specctl.cli.app import app
from specctl.cli.verbs import Given, verb
from specctl.console import Answer
from specctl.engines.settings import TraceSettings
from specctl.errors import SpecctlError, UsageError
from specctl.records import PositiveInt, option
from specctl.runtime.checkpoints import Served

if TYPE_CHECKING:
    from specctl.engines.engine import Engine, Export


@verb(
    app,
    tracing=TraceSettings,
    examples="""specctl export chain:3 --to vllm --drafter embedded
specctl export tuned/policy --to sglang -o engine""",
    wide=True,
)
def export(
    policy: Annotated[
        str,
        typer.Argument(
            help="Policy in words, an artifact folder, REGISTRY/NAME@ALIAS, or a tune.json."
        ),
    ],
    *,
    to: str = option(..., "Engine: vllm, sglang, transformers, llamacpp"),
    out: Path | None = option(
        None, "Folder for the engine's files", name="--out -o", default="print them"
    ),
    nearest: bool = option(
        False, "If the engine lacks this policy, write the nearest one that it runs"
    ),
    target: str | None = option(
        None,
        "Model that the engine serves",
        default="that of the policy's pair; of words: embedded, or TARGET beside --drafter",
    ),
    drafter: str | None = option(
        None,
        "Drafter: folder, hub id, 'embedded[:small]'; the target, if it has layers for MTP",
        default="that of the policy's pair; of words: embedded, without --target",
    ),
    method: Served | None = option(
        None,
        "Kind of a drafter that is not here: eagle3, eagle, peagle, medusa (until vLLM 0.32), "
        "dflash, dspark, mtp, draft_model. N-grams have no drafter: `specctl import` names their "
        "length",
        default="read from its config.json, also the hub's",
    ),
    max_batch_size: PositiveInt | None = option(
        None, "Requests that the engine runs together at most", default="the engine's own"
    ),
    max_draft_tokens: PositiveInt | None = option(
        None,
        "vLLM: num_speculative_tokens, if a policy that is followed may become longer",
        default="as many as this policy drafts",
        group="advanced",
    ),
    log: list[str] | None = option(
        None,
        "Dense traces to replay this and the nearest policy on; repeat for more",
        default="no figures",
    ),
    cost_model: Path | None = option(
        None, "cost_model.json or a named clock: adds times", default="counts only"
    ),
    weights: Literal["float16", "q8_0", "float32"] = option(
        "float16",
        "llama.cpp: number format of GGUF files: float16, q8_0, float32",
        group="advanced",
    ),
    synthetic: bool = option(
        False,
        "vLLM, llama.cpp: acceptance at the rates of this policy on --log, to time it in the "
        "engine before its drafter is there",
    ),
    tracing: Given,
) -> Answer:
    """Print a policy as flags of a serving engine.

    If the engine lacks the policy, prints the reason and the nearest policy that it runs.
    """
    from specctl.engines.engine import Serving
    from specctl.engines.export import (
        check_load,
        command_lines,
        drafter_of,
        engine_named,
        judge,
        read_source,
        synthetic_rates,
        target_of,
    )
    from specctl.logs.trace_set import TraceSet

    engine = engine_named(to, "--to")
    check_load(engine, "--max-batch-size", max_batch_size)
    if max_draft_tokens is not None and not engine.has_plugin:
        raise UsageError(
            "--max-draft-tokens is for vLLM, in which policies can be exchanged",
            hint="leave it out",
        )
    trace, source = _trace_settings(tracing, engine), read_source(policy)
    traces = TraceSet.open(*log) if log else None
    judged = judge(source, engine, traces, cost_model=cost_model, batch_size=max_batch_size)
    parts = judged.shown()
    if judged.chosen is None or (judged.losses and not nearest):
        return Answer(judged.to_json(), parts, judged.refuse)
    rates = None
    if synthetic:
        if traces is None:
            raise UsageError("--synthetic needs --log TRACES, which have the rates")
        rates = synthetic_rates(traces, judged.chosen, engine)
    if not (source.pair or target or drafter) and engine.title == "transformers":
        drafter = "embedded:small"  # the one that it drafts with
    model, head = source.names(target, drafter)
    served = target_of(model)
    serving = Serving(
        drafter=drafter_of(source.named, head, method, served),
        max_batch_size=max_batch_size,
        max_draft_tokens=max_draft_tokens,
        reference=source.reference_of,
        trace=trace,
        folder=None if out is None else out.absolute(),
        target=None if served == "TARGET" else served,
        weights=weights,
        synthetic_rates=rates,
    )
    written = engine.write(judged.chosen, serving)
    if (other := source.other_pair(target, drafter)) is not None:
        is_loaded = written.environment and source.named.parts and judged.chosen == source.policy
        refused = ", and the plugin refuses it when vLLM starts" if is_loaded else ""
        console.warn(f"{other}{refused}; tune it on the pair that is served")
    lines = command_lines(engine, written, served)
    if not (source.pair or target or drafter):
        parts.append("The pair is the embedded one; --target and --drafter name yours.")
    checked = f"Written for {engine.title} {engine.checked}."
    parts += [list(lines), *written.notes, *_files(engine, written, out), checked]
    return Answer({**judged.to_json(), **vars(written), "made": [*written.made]}, parts)


def _files(engine: Engine, written: Export, out: Path | None) -> list[Any]:
    """Writes an engine's files in place of earlier ones; without a folder, returns the text of
    those that have one."""
    from specctl.durable import prepare_folder, write_whole

    files = written.files
    if out is None:
        return [[f"{name}:", *content.splitlines()] for name, content in files.items()]
    is_new = not out.exists()
    prepare_folder(out, "folder of the engine's files")
    try:  # a model that is refused leaves no flags behind
        for name, make in written.made.items():
            make(out / name)
    except SpecctlError:
        if is_new and not any(out.iterdir()):
            out.rmdir()
        raise
    old = [out / name for name in engine.files if name not in files and (out / name).is_file()]
    for path in old:
        path.unlink()
    for name, content in files.items():
        write_whole(out / name, content.encode(), name)
    removed = [f"removed {path}, of an earlier export" for path in old]
    return [*(f"wrote {out / name}" for name in (*files, *written.made)), *removed]


def _trace_settings(given: Given, engine: Engine) -> TraceSettings | None:
    """The log that the plugin is to write, if any."""
    if not (changed := given.changed):
        return None
    if given.trace is None or not engine.has_plugin:
        needs = "--trace TRACES" if given.trace is None else "--to vllm, in which specctl logs"
        raise UsageError(
            f"{changed[0]} needs {needs}", hint=f"leave {changed[0]} out, or give that"
        )
    settings: TraceSettings = given.build()
    from specctl.stores import is_store_url

    if is_store_url(settings.out):
        return settings
    return settings.model_copy(update={"out": str(Path(settings.out).absolute())})
