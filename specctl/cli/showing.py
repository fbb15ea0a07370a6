"""`specctl import` and `show`: logs and metrics of servers; artifacts and traces in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app import app
from specctl.cli.verbs import verb
from specctl.console import Answer
from specctl.errors import UsageError
from specctl.progress import progress
from specctl.records import PositiveInt, option
from specctl.replay.config import FORCE, MAX_AXIS_VALUE

_LOADS = "1,8,32,64"


@verb(
    app,
    "import",
    examples="""specctl import vllm.log
specctl import vllm.log --cost-model h100-llama-3.1-8b-eagle \\
    --batch-sizes 1,8,32
specctl import k3.log k5.log
specctl import before.prom after.prom
specctl import http://localhost:8000/metrics --watch 60""",
    wide=True,
)
def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Logs that a server wrote (- is standard input), http://HOST:PORT/metrics, or two "
            "scrapes, the earlier one first."
        ),
    ],
    out: Path | None = option(None, "Folder for summary.json", name="--out -o", default="none"),
    cost_model: Path | None = option(
        None, "cost_model.json or a named clock, to name the best draft length", default="none"
    ),
    linear: str | None = option(
        None,
        "Instead of --cost-model, rates in us, as `specctl ladder` takes them",
        default="none",
        group="advanced",
    ),
    batch_sizes: str | None = option(
        None,
        "Loads at which a length is named: requests together, comma-separated",
        default=_LOADS,
    ),
    context_tokens: PositiveInt | None = option(
        None, "Text of each request on --cost-model's clock, tokens", default="512"
    ),
    watch: PositiveInt | None = option(
        None, "Scrape the address twice, this many seconds apart", default="none"
    ),
    *,
    force: bool = FORCE,
) -> Answer:
    """Read a server's log or metrics: which draft length is best.

    Acceptance by position, what shorter drafts would accept, which length is fastest at each load,
    and from which load on drafts are better off.
    """
    from specctl.cli.imported import describe_summary
    from specctl.durable import prepare_folder, write_whole
    from specctl.logs.advice import Advice
    from specctl.logs.importing import import_files
    from specctl.logs.sources import Source, watched
    from specctl.records import json_bytes

    sizes = _batch_sizes(batch_sizes or _LOADS)
    if out is not None:
        prepare_folder(out)
    advice, model = None, None
    if cost_model is not None or linear is not None:
        from specctl.replay.metrics import LoadClock
        from specctl.replay.run import choose_cost, warn_of_server

        context = context_tokens or 512
        model = choose_cost(cost_model, linear, None, force=force)
        known = LoadClock.known(model, sizes)

        def chain_us(batch_size: int, length: int, emitted: float, text: float) -> float:
            return LoadClock(model, batch_size).chain_us(length, emitted, context_tokens=text)

        source = str(cost_model) if linear is None else "the rates of --linear"
        source = f"{source}, {context} tokens of context"
        not_reached = sorted({*sizes} - {*known})
        advice = Advice(
            chain_us,
            known,
            source,
            not_reached,
            context,
            model.time_error,
            is_forced=force,
        )
    elif context_tokens is not None:
        raise UsageError(
            "--context-tokens is the text of requests on the clock of --cost-model or --linear",
            hint="give one of these too, or leave it out",
        )
    texts = watched(sources, watch) if watch is not None else [*map(Source.of, sources)]
    with progress("lines read", None):
        summary = {"kind": "import", **import_files(texts, advice, sizes)}
    models = summary.get("models", {"": summary}).values()
    if model is not None:
        said = next(iter(models)).get("settings", {})
        warn_of_server(model, summary["engine"], said)
    if advice is None and batch_sizes and not any(own["best_lengths"] for own in models):
        raise UsageError(
            "--batch-sizes names lengths by load, and the time of a step is not known",
            hint="give --cost-model, add logs at another draft length or without drafts, or leave "
            "it out",
        )
    if out is not None:
        write_whole(out / "summary.json", json_bytes(summary), "summary")
    return Answer(summary, describe_summary(summary))


def _batch_sizes(text: str) -> list[int]:
    """Batch sizes of `1,8,32`, ascending. Raises UsageError for other text."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= MAX_AXIS_VALUE for part in parts):
        raise UsageError(
            f"--batch-sizes {text} are no whole numbers from 1 to {MAX_AXIS_VALUE:,}",
            hint="write them with commas, e.g. --batch-sizes 1,8,32",
        )
    return sorted({*map(int, parts)})


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
            help="Folder of an artifact, of traces, of an export or of results, or a file of "
            "these; traces also as s3://... and @sha256:...; an artifact of a registry as "
            "PLACE/NAME@ALIAS; a named clock."
        ),
    ],
) -> Answer:
    """Print an artifact, traces, an export or a result."""
    from specctl.describe import describe_named

    return describe_named(what)
