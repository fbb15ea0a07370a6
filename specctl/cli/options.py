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
ReplayThreadsOption = Annotated[
    int, typer.Option(min=1, help="Threads that share the log; results do not depend on it.")
]
TimesOption = Annotated[
    Path | None,
    typer.Option(help="cost_model.json of `specctl profile`: adds times. Default: counts only."),
]
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


def open_to_fit(traces: list[str]) -> Any:
    """The `TraceSet`, a snapshot of which is stored in each of its sets.

    A fit may read a set that it cannot write. It goes on and says so.
    """
    from specctl import console
    from specctl.collect.rewriting import take_snapshot
    from specctl.errors import StoreError
    from specctl.logs.trace_set import TraceSet

    opened = TraceSet.open(*traces)
    for part in opened.parts:
        try:
            take_snapshot(part)
        except StoreError as error:
            console.warn(
                f"no snapshot was stored, so the rows of this fit cannot be named once others are "
                f"written; run `specctl traces snapshot {part.place.name}` as its owner ({error})"
            )
    return opened
