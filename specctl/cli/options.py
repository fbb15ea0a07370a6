"""Options and steps that several verbs share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl import console
from specctl.console import Answer
from specctl.errors import StoreError, UsageError, check_choice
from specctl.formatting import listed, short_id
from specctl.records import option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specctl.logs.trace_set import TraceSet
    from specctl.policy import Shape
    from specctl.replay.tune.tuning import Tuning

TracesArgument = Annotated[
    list[str],
    typer.Argument(help="One or more trace sets of one pair: FOLDER, s3://..., @sha256:..."),
]
DenseTracesArgument = Annotated[
    list[str],
    typer.Argument(help="One or more dense trace sets of one pair: FOLDER, s3://..., @sha256:..."),
]


def _publishable(out: Path) -> Path:
    from specctl.artifacts.files import check_publishable

    check_publishable(out)
    return out


OutOption = Annotated[
    Path, typer.Option("--out", "-o", help="Artifact folder to write.", callback=_publishable)
]
THREADS: int = option(
    2, "Threads that share the log; results do not depend on it", group="advanced", ge=1
)


def preset_option(verb: str) -> Any:
    """The option `--preset` of a fit: settings of a paper, which other options override."""
    from specctl.train.presets import PRESETS, names_for

    known = names_for(verb)

    def take(context: typer.Context, name: str | None) -> str | None:
        if name is not None:
            check_choice("--preset", name, known)
            options = dict(PRESETS[name].options)
            context.default_map = options
            words = ", ".join(f"{option} {value}" for option, value in options.items())
            console.note(f"{name} ({PRESETS[name].source}): {words}")
        return name

    help = f"Settings of a paper, which other options override: {', '.join(known)}; default: none."
    return Annotated[str | None, typer.Option(help=help, is_eager=True, callback=take)]


def check_drafter(drafter: str, shapes: Iterable[Shape]) -> None:
    """Raises `UsageError` if a shape drafts and there is no drafter."""
    from specctl.policy import RootOnly

    if drafter == "none" and not all(isinstance(shape, RootOnly) for shape in shapes):
        raise UsageError("the policy drafts, and there is no drafter; give --drafter")


def refuse_together(**given: object) -> None:
    """Raises `UsageError` if more than one of these options has a value."""
    typed = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if typed[1:]:
        raise UsageError(f"{typed[0]} goes without {listed(typed[1:])}; leave one out")


def open_to_fit(traces: list[str]) -> Any:
    """Opens traces and stores a snapshot of each set; a read-only set gives a warning."""
    from specctl.collect.verifying import take_snapshot
    from specctl.logs.trace_set import TraceSet

    opened = TraceSet.open(*traces)
    for part in opened.parts:
        try:
            take_snapshot(part)
        except StoreError as error:
            console.warn(
                f"no snapshot was stored, so the rows of this fit cannot be named once others are "
                f"written; run `specctl traces snapshot {part.place.name}` as its owner "
                f"({error.line})"
            )
    return opened


def run_and_publish(tuning: Tuning, opened: TraceSet, out: Path | None, fits: Any = None) -> Answer:
    """Runs a search, and publishes its choice if there is a folder.

    Args:
        fits: outcomes of the fits whose policies are searched.
    """
    from specctl.logs.trace_set import domain_of
    from specctl.replay.tune.tuning import publish
    from specctl.replay.tune.verdict import POLICY_FOLDER, tune_parts

    found = tuning.run()
    result = found.result.model_copy(update={"fits": fits})
    parts: list[Any] = tune_parts(result)
    digest = None
    if out is not None:
        found = replace(found, result=result)
        digest = publish(found, out, opened.fingerprint, domain_of(opened), opened.snapshots).digest
        parts.append(f"wrote {out / POLICY_FOLDER}, {short_id(digest)}")
    return Answer({**result.to_json(), "artifact_digest": digest}, parts)
