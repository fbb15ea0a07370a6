"""`specctl fit auto`."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.app import fit_app
from specctl.cli.fitting import fit_adasd, fit_c2t, fit_cart, fit_echo, fit_gbdt, open_to_fit
from specctl.cli.options import (
    ArrivalRateOption,
    DenseTracesArgument,
    JsonOption,
    ObjectiveOption,
    ReplayThreadsOption,
    SlotsOption,
    TpotLimitOption,
)

FITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "hetero": (fit_cart, {}),
    "c2t": (fit_c2t, {}),
    "gbdt": (fit_gbdt, {}),
    "distilled": (fit_gbdt, {"distill": True}),
    "echo": (fit_echo, {}),
    "adasd": (fit_adasd, {}),
}
"""The verbs that `fit auto` calls, with what differs from their defaults."""


@fit_app.command("auto")
def fit_auto(
    traces: DenseTracesArgument,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for fits/, tune.json and the winner, policy/."),
    ],
    cost_model: Annotated[Path, typer.Option(help="cost_model.json of `specctl profile`.")],
    skip: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Fit to leave out, of {', '.join(FITS)}; repeat for more; default: none."
        ),
    ] = None,
    batch_size: SlotsOption = 1,
    arrival_rate: ArrivalRateOption = None,
    objective: ObjectiveOption = "latency",
    tpot_limit_ms: TpotLimitOption = None,
    held_out: Annotated[
        float, typer.Option(help="Share of prompts held out of fits and search, in (0, 1).")
    ] = 0.2,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the split, the fits, the search, the bootstrap.")
    ] = 0,
    threads: ReplayThreadsOption = 2,
    as_json: JsonOption = False,
) -> None:
    """Fit everything, tune each for a load by replay, write what beats the tuned static setting.

    Lossless policies only: replay cannot tell what a lossy one would have written. Where nothing
    beats the best static setting by more than its interval, that setting is written.
    """
    from specctl import console
    from specctl.logs.trace_set import domain_of
    from specctl.replay.config import TuneConfig
    from specctl.replay.tune.publish import POLICY_FOLDER, publish, result_table, tune_notes
    from specctl.replay.tune.tuning import attempts, families_of, prepare
    from specctl.runtime.output import prepare_folder

    plain = TuneConfig(
        batch_size=batch_size,
        arrival_rate_per_s=arrival_rate,
        objective=objective,
        tpot_limit_ms=tpot_limit_ms,
        held_out_frac=held_out,
        seed=seed,
        drops_unsupported=True,
    )
    fitters = _fitters(traces, skip or [], held_out, seed)
    opened = open_to_fit(traces)
    prepare(opened, plain, cost_model, num_threads=threads)  # refuses before anything is fitted
    prepare_folder(out)
    tried = []
    with console.progress("fits", len(fitters)) as tick:
        for attempt in attempts(fitters, out):
            tried.append(attempt)
            if attempt.outcome.refusal is not None:
                console.warn(attempt.outcome.sentence())
            tick()
    families = families_of(tried, is_shared=batch_size > 1 or arrival_rate is not None)
    config = plain.model_copy(update={"families": families})
    tuning = prepare(opened, config, cost_model, num_threads=threads, warn=console.warn)
    with console.progress("scorings", tuning.num_scorings) as tick:
        tuned = tuning.run(on_setting=tick)
    fits = tuple(attempt.outcome for attempt in tried)
    result = tuned.result.model_copy(update={"fits": fits})
    tuned = replace(tuned, result=result)
    artifact = publish(tuned, out, opened.fingerprint, domain_of(opened), opened.snapshots)
    if as_json:
        console.show_json({**result.to_json(), "artifact_digest": artifact.digest})
        return
    console.show(result_table(result))
    for line in tune_notes(result):
        console.show(line)
    console.show(f"wrote {out / POLICY_FOLDER}  {artifact.digest}")


def _fitters(traces: list[str], skip: list[str], held_out: float, seed: int) -> list[Any]:
    """The fits that are wanted, as a user would run them, their reports left to their folders."""
    from specctl.errors import UsageError
    from specctl.replay.tune.tuning import Fitter

    unknown = sorted(set(skip) - set(FITS))
    if unknown or set(FITS) <= set(skip):
        raise UsageError(
            "--skip",
            expected=f"some of {', '.join(FITS)}, not all",
            found=", ".join(unknown or skip),
            fix="check the names",
        )

    def fitter(name: str) -> Fitter:
        verb, options = FITS[name]

        def write(folder: Path) -> Any:
            from specctl.artifacts.load import load_artifact

            with redirect_stdout(StringIO()):
                verb(traces=traces, out=folder, held_out=held_out, seed=seed, **options)
            return load_artifact(folder)

        return Fitter(name, write)

    return [fitter(name) for name in FITS if name not in skip]
