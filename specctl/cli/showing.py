"""`specctl show`, `compose` and `import`: what is there, joined, or read from other tools."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specctl import console
from specctl.cli.app import app
from specctl.cli.options import UnfinishedOption
from specctl.cli.verbs import verb
from specctl.console import Answer
from specctl.records import option


@verb(
    app,
    "import",
    examples="""specctl import vllm.log
specctl import http://localhost:8000/metrics
specctl import acceptance.jsonl -o imported""",
    wide=True,
)
def import_(
    source: Annotated[
        str,
        typer.Argument(help="File that another tool wrote, or http://HOST:PORT/metrics."),
    ],
    out: Path | None = option(
        None, "Folder to write", name="--out -o", default="none, which a summary may go without"
    ),
    format: str = option(
        "auto",
        "auto, specdecode-bench, spec-bench, vllm-requests, vllm-prometheus, vllm-log, "
        "sglang-requests, sglang-prometheus, sglang-log",
    ),
    drafter: list[str] | None = option(
        None, "Drafter to read, NAME of acc_NAME; repeatable", default="all"
    ),
    offered_depth: str | None = option(
        None,
        "Draft tokens per round of the log, e.g. eagle=5,ngram=20",
        default="inferred",
        group="advanced",
    ),
    entry_predicts: str | None = option(
        None,
        "Token that entry i of acc_len drafts first: same (i) or next (i + 1)",
        default="same",
        group="advanced",
    ),
    max_misaligned: float | None = option(
        None,
        "Largest share of entries that may not fit, in [0, 1]",
        default="0.01",
        group="advanced",
    ),
    questions: Path | None = option(
        None, "Spec-Bench question file, for categories", default="none"
    ),
    plain: Path | None = option(
        None, "Spec-Bench answers of plain decoding, for speed-ups", default="none"
    ),
    cost_model: Path | None = option(
        None, "cost_model.json or a named clock, to name the best draft length", default="none"
    ),
    linear: str | None = option(
        None,
        "Instead of --cost-model, rates in us, as `specctl ladder` takes them",
        default="none",
        group="advanced",
    ),
    batch_size: Annotated[
        int, typer.Option(min=1, help="Load at which the cost model is read, requests.")
    ] = 1,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Text of each request there, tokens.")
    ] = 512,
) -> Answer:
    """Read logs and metrics of other tools.

    Of per-position acceptance, to replay chains from; of other figures, a summary.
    """
    from specctl.logs.acceptance_lists import LAST_ROUND
    from specctl.logs.importing import ImportOptions, describe_summary, import_file, parse_depths
    from specctl.logs.sources import Source
    from specctl.replay.imported import describe_imported_log, explain_import

    options = ImportOptions(
        format=format,
        drafters=tuple(drafter or ()),
        offered_depths=parse_depths(offered_depth),
        entry_predicts=entry_predicts,
        max_misaligned=max_misaligned,
        questions=questions,
        plain=plain,
    )
    clock, load = None, f"batch size {batch_size} and {context_tokens} tokens of context"
    if cost_model is not None or linear is not None:
        from specctl.replay.ladder.tally import LoadClock
        from specctl.replay.run import choose_cost

        model = LoadClock(choose_cost(cost_model, linear, None, console.warn), batch_size)
        model.check()
        clock = partial(model.chain_us, context_tokens=context_tokens)
    text = Source.of(source)
    with console.progress("bytes read", text.size_bytes) as tick:
        imported = import_file(text, out, options, clock=clock, load=load, on_bytes=tick)
    if imported.log is None:
        return Answer(imported.to_json(), describe_summary(imported))
    for name, lists in imported.log.header.drafters.items():
        if cut := lists.misaligned.get(LAST_ROUND):
            console.warn(
                f"{name}: {cut} entries are missing or left over at the ends of texts, whose last "
                "round the file holds in part"
            )
    drafters = explain_import(imported.log, clock, load)
    sentences = [f"{name}: {line}" for name in drafters for line in drafters[name]["meaning"]]
    data = {**imported.to_json(), "drafters": drafters}
    return Answer(data, [describe_imported_log(imported.log), *sentences])


@verb(
    app,
    examples="""specctl show traces
specctl show tuned/policy --wide""",
    wide=True,
)
def show(
    what: Annotated[
        str,
        typer.Argument(
            help="Folder of an artifact, of traces or of an import; traces also as s3://... and "
            "@sha256:...; an artifact of a registry as PLACE/NAME@ALIAS."
        ),
    ],
    unfinished: UnfinishedOption = False,
) -> Answer:
    """Print an artifact, traces or an import."""
    from specctl.describe import describe_named

    return describe_named(what, unfinished=unfinished)


@verb(app, examples="""specctl compose hetero/+survival:max_tokens=64 -o composed""", wide=True)
def compose(
    policy: Annotated[
        str,
        typer.Argument(
            help="A shape's artifact or words, then + a budget and + an acceptance, by words or "
            "by artifact, e.g. hetero/+echo/+mars/."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Artifact folder to write.")],
    *,
    allow_lossy: bool = option(False, "Accept policies that may change the output"),
) -> Answer:
    """Combine fitted parts into one policy."""
    from specctl.artifacts.describe import describe_artifact
    from specctl.runtime.compose import compose as write
    from specctl.runtime.policy_spec import resolve_policy

    artifact = write(resolve_policy(policy, allow_lossy=allow_lossy), policy, out)
    manifest = artifact.manifest.model_dump(mode="json")
    written = {"out": str(out), "artifact_digest": artifact.digest, "manifest": manifest}
    return Answer(written, [describe_artifact(artifact), f"wrote {out}  {artifact.digest}"])
