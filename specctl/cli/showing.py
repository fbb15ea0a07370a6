"""`specctl show`, `compose` and `import`: what is there, joined, or read from other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl import console
from specctl.cli.app import NOTHING, app
from specctl.cli.options import UnfinishedOption
from specctl.cli.verbs import verb
from specctl.console import Answer
from specctl.records import option


@verb(app, "import")
def import_(
    source: Annotated[Path, typer.Argument(help="File that another tool wrote.")],
    out: Path | None = option(
        None, "Folder to write", name="--out -o", default="none, which a summary may go without"
    ),
    format: str = option(
        "auto", "auto, specdecode-bench, spec-bench, vllm-requests, vllm-prometheus, vllm-log"
    ),
    drafter: list[str] | None = option(
        None, "Drafter to read, NAME of acc_NAME; repeatable", default="all"
    ),
    offered_depth: str | None = option(
        None, "Draft tokens per round of the log, e.g. eagle=5,ngram=20", default="inferred"
    ),
    entry_predicts: str | None = option(
        None, "Token that entry i of acc_len drafts first: same (i) or next (i + 1)", default="same"
    ),
    max_misaligned: float | None = option(
        None, "Largest share of entries that may not fit, in [0, 1]", default="0.01"
    ),
    questions: Path | None = option(
        None, "Spec-Bench question file, for categories", default="none"
    ),
) -> Answer:
    """Read per-position acceptance to replay chains from, or summarise other tools' figures."""
    from specctl.logs.import_lines import size_bytes
    from specctl.logs.importing import (
        ImportOptions,
        describe_summary,
        import_file,
        parse_depths,
    )
    from specctl.replay.imported import describe_imported_log

    options = ImportOptions(
        format=format,
        drafters=tuple(drafter or ()),
        offered_depths=parse_depths(offered_depth),
        entry_predicts=entry_predicts,
        max_misaligned=max_misaligned,
        questions=questions,
    )
    with console.progress("bytes read", size_bytes(source)) as tick:
        imported = import_file(source, out, options, on_bytes=tick)
    log = imported.log
    parts = describe_summary(imported) if log is None else [describe_imported_log(log)]
    return Answer(imported.to_json(), parts)


@verb(app, leaves=NOTHING)
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
    """Print an artifact, a trace set or an import for a person."""
    from specctl.describe import describe_named

    return describe_named(what, unfinished=unfinished)


@verb(app)
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
    allow_lossy: bool = option(False, "Accept policies that change the text"),
) -> Answer:
    """Write a shape, a budget and an acceptance of several artifacts as one artifact."""
    from specctl.artifacts.describe import describe_artifact
    from specctl.runtime.compose import compose as write
    from specctl.runtime.policy_spec import resolve_policy

    artifact = write(resolve_policy(policy, allow_lossy=allow_lossy), policy, out)
    manifest = artifact.manifest.model_dump(mode="json")
    written = {"out": str(out), "artifact_digest": artifact.digest, "manifest": manifest}
    return Answer(written, [describe_artifact(artifact), f"wrote {out}  {artifact.digest}"])
