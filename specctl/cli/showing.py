"""`specctl show` and `import`: artifacts and traces in words; logs and metrics of servers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.verbs import verb
from specctl.console import Answer
from specctl.errors import check_choice
from specctl.progress import progress
from specctl.records import PositiveInt, option
from specctl.replay.config import FORCE


@verb(
    app,
    "import",
    examples="""specctl import vllm.log
specctl import http://localhost:8000/metrics
specctl import vllm.log --cost-model cost_model.json --batch-size 8""",
    wide=True,
)
def import_(
    source: Annotated[
        str,
        typer.Argument(help="Log that a server wrote, or http://HOST:PORT/metrics."),
    ],
    out: Path | None = option(None, "Folder for summary.json", name="--out -o", default="none"),
    format: str = option(
        "auto",
        "auto, vllm-prometheus, vllm-log, sglang-prometheus, sglang-log, llamacpp-prometheus, "
        "llamacpp-log, llamacpp-answers",
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
    batch_size: PositiveInt = option(1, "Load at which the cost model is read, requests"),
    context_tokens: PositiveInt = option(512, "Text of each request there, tokens"),
    *,
    force: bool = FORCE,
) -> Answer:
    """Read a server's log or metrics.

    Acceptance by position, what shorter drafts would accept, and which length is fastest.
    """
    from specctl.durable import prepare_folder, write_whole
    from specctl.logs.importing import FORMATS, describe_summary, import_file
    from specctl.logs.sources import Source
    from specctl.records import json_bytes

    check_choice("--format", format, FORMATS)
    if out is not None:
        prepare_folder(out)
    clock, load = None, f"batch size {batch_size} and {context_tokens} tokens of context"
    if cost_model is not None or linear is not None:
        from specctl.replay.metrics import LoadClock
        from specctl.replay.run import choose_cost

        chosen = choose_cost(cost_model, linear, None, force=force)
        model = LoadClock(chosen, batch_size)
        model.check()
        clock = partial(model.chain_us, context_tokens=context_tokens)
    text = Source.of(source)
    with progress("bytes read", text.size_bytes):
        summary = import_file(text, format=format, clock=clock, load=load)
    if out is not None:
        write_whole(out / "summary.json", json_bytes(summary), "summary")
    return Answer(summary, describe_summary(summary))


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
            help="Folder of an artifact, of traces or of an export; traces also as s3://... and "
            "@sha256:...; an artifact of a registry as PLACE/NAME@ALIAS."
        ),
    ],
) -> Answer:
    """Print an artifact, traces or the policy of an export."""
    from specctl.describe import describe_named

    return describe_named(what)
