"""`specctl fit ...`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl import console
from specctl.cli.app import fit_app
from specctl.cli.options import (
    THREADS,
    DenseTracesArgument,
    OutOption,
    TracesArgument,
    open_to_fit,
    preset_option,
    run_and_publish,
)
from specctl.cli.verbs import Given, runs_place, verb
from specctl.console import Answer
from specctl.errors import UsageError, check_choice
from specctl.formatting import short_id
from specctl.progress import advance, progress, set_chunk_threads
from specctl.records import option
from specctl.replay.config import TuneConfig
from specctl.train.configs import (
    FITS,
    AdasdConfig,
    C2TConfig,
    CartConfig,
    EchoConfig,
    MarsConfig,
    PairedConfig,
    SurvivalConfig,
)


def fit_answer(artifact: Any, fit: Any, out: Path) -> Answer:
    """The report of a fit, after its artifact was written."""
    data = {
        "out": str(out),
        "artifact_digest": artifact.digest,
        "report": fit.data.model_dump(mode="json"),
    }
    parts = [
        *fit.report.parts(),
        *fit.notes,
        f"wrote {out}, {short_id(artifact.digest)}",
    ]
    return Answer(data, parts)


# --------------------------------------------------------------------------- all fits


SKIP: list[str] | None = option(
    None, f"Fit to leave out, of {', '.join(FITS)}; repeat for more", default="none"
)


@verb(
    fit_app,
    "auto",
    config=TuneConfig,
    without=(
        "config.families",
        "config.grids",
        "config.for_engine",
        "config.packing",
        "config.factor",
    ),
    examples="""specctl fit auto traces -o auto --cost-model cost_model.json""",
    wide=True,
)
def fit_auto(
    traces: DenseTracesArgument,
    *,
    out: Path = option(..., "Folder for fits/, tune.json and the winner, policy/", name="--out -o"),
    cost_model: Path = option(..., "cost_model.json of `specctl profile`, or a named clock"),
    config: Given,
    skip: list[str] | None = SKIP,
    threads: int = THREADS,
) -> Answer:
    """Fit everything, tune each, write the best.

    Lossless policies only: a log does not hold the texts of lossy ones. The best static
    setting is written unless a policy beats it by more than the interval.
    """
    plain = config.build(drops_unsupported=True)
    for name in skip or ():
        check_choice("--skip", name, FITS)
    if set(FITS) <= set(skip or ()):
        raise UsageError("--skip leaves no fit", hint="leave one of them out")

    from specctl.durable import prepare_folder
    from specctl.replay.tune.tuning import attempts, families_of, prepare
    from specctl.train.fits import default_fit, write_fit

    opened = open_to_fit(traces)
    set_chunk_threads(threads)
    with console.no_warnings():  # an early check; warnings come at the end
        prepare(opened, plain, cost_model)
    prepare_folder(out)

    def write(name: str, folder: Path) -> Any:
        fit = default_fit(name, opened, held_out_frac=plain.held_out_frac, seed=plain.seed)
        return write_fit(fit, folder, opened)

    fitters = {name: partial(write, name) for name in FITS if name not in (skip or ())}
    tried = []
    with progress("fits", len(fitters)):
        for outcome in attempts(fitters, out):
            tried.append(outcome)
            if outcome.refusal is not None:
                console.warn(outcome.sentence())
            advance("fits")
    families = families_of(tried, out, is_shared=plain.has_load)
    searched = plain.model_copy(update={"families": families})
    tuning = prepare(opened, searched, cost_model)
    return run_and_publish(tuning, opened, out, tuple(tried))


# --------------------------------------------------------------------------- from traces


@verb(
    fit_app,
    "hetero",
    config=CartConfig,
    examples="""specctl fit hetero traces -o hetero
specctl fit hetero traces -o hetero --base eagle2:depth=5:top_k=4""",
    wide=True,
)
def fit_hetero(
    traces: TracesArgument,
    out: OutOption,
    config: Given,
    base: str | None = option(
        None,
        "Static tree to extend, for dense traces",
        default="eagle2, smaller where the traces would not hold its extension; live ones keep "
        "their own tree",
    ),
    preset: preset_option("hetero") = None,  # type: ignore[valid-type]
) -> Answer:
    """Fit how deep trees grow, by entropy (HeteroSpec)."""
    return _fit("hetero", open_to_fit(traces), out, config, base=base)


@verb(
    fit_app,
    "c2t",
    config=C2TConfig,
    examples="""specctl fit c2t traces -o c2t
specctl fit c2t traces -o c2t --recall 0.9""",
    wide=True,
)
def fit_c2t(
    traces: TracesArgument,
    out: OutOption,
    config: Given,
    preset: preset_option("c2t") = None,  # type: ignore[valid-type]
) -> Answer:
    """Fit a network that prunes draft trees (C2T)."""
    return _fit("c2t", open_to_fit(traces), out, config)


@verb(
    fit_app,
    "survival",
    config=SurvivalConfig,
    without=(
        "config.nodes.features",
        "config.nodes.predicts",
        "config.nodes.negatives",
        "config.recall",
        "config.keep_leaves",
    ),
    examples="""specctl fit survival traces -o survival""",
    wide=True,
)
def fit_survival(traces: DenseTracesArgument, out: OutOption, config: Given) -> Answer:
    """Fit a table of acceptance for the marginal rule.

    A node is verified, and a level drafted, if its acceptance is worth its time.
    """
    return _fit("survival", open_to_fit(traces), out, config)


def _fit(name: str, opened: Any, out: Path, config: Given, **given: Any) -> Answer:
    """Fits to traces and writes the artifact. Sizes default to those of the traces."""
    from specctl.logs.tree_log import open_log, support_of
    from specctl.train.fits import run_fit, write_fit

    predicts = getattr(config, "predicts", None) or "conditional"
    support = None
    if name != "hetero":
        support = support_of(opened.header) if name == "echo" else open_log(opened).support
    fields = FITS[name].fields_for(support, config.seed, predicts)
    fit = run_fit(name, opened, config.build(**fields), **given)
    return fit_answer(write_fit(fit, out, opened), fit, out)


@verb(
    fit_app,
    "echo",
    config=EchoConfig,
    examples="""specctl fit echo traces -o echo --cost-model cost_model.json""",
    wide=True,
)
def fit_echo(
    traces: DenseTracesArgument,
    out: OutOption,
    config: Given,
    cost_model: Path | None = option(
        None, "cost_model.json or a named clock: adds times", default="counts only"
    ),
    threads: int = THREADS,
    preset: preset_option("echo") = None,  # type: ignore[valid-type]
) -> Answer:
    """Fit where unsure trees stop growing (ECHO)."""
    from specctl.replay.run import open_cost_model

    set_chunk_threads(threads)
    opened = open_to_fit(traces)
    model = open_cost_model(cost_model, opened, force=True)
    return _fit("echo", opened, out, config, cost_model=model)


# --------------------------------------------------------------------------- from paired runs

JudgedArgument = Annotated[
    list[str],
    typer.Argument(help="Prompt files, or 'embedded'; those with an answer are judged."),
]


def _certify(
    face: Any,
    prompts: list[str],
    out: Path,
    config: Given,
    runs: Given,
    shape: str,
    **defaults: Any,
) -> Answer:
    """Sweeps the settings of a lossy acceptance, and writes the fastest certified one.

    Args:
        face: the acceptance's, of `specctl.train.certify`.
        defaults: fields of the configuration, unless options set them.
    """
    from specctl.collect.prompts import with_room
    from specctl.runtime.load import pair_domain
    from specctl.runtime.words import check_words, resolve_policy
    from specctl.train.certify import fit_relaxed
    from specctl.train.contract import check_enough
    from specctl.train.paired import judged_prompts
    from specctl.train.report import save_fit

    paired: PairedConfig = runs.build()
    paired.check()
    check_words([shape])
    settings = config.build(**defaults)
    loaded = judged_prompts(prompts, paired)
    check_enough(sum(one.answer is not None for one in loaded), settings.contract)
    with progress("loading models", None):
        pair = paired.load_pair()
    loaded = with_room(loaded, pair, paired)
    base = resolve_policy(shape, pair.fingerprint, allow_lossy=True).policy  # its shape alone
    place = runs_place(out)
    fit, digest = fit_relaxed(face, pair, base, loaded, settings, paired, place)
    domain = pair_domain(pair, batch_size=paired.batch_size)
    artifact = save_fit(fit, out, pair.fingerprint, digest, domain=domain)
    return fit_answer(artifact, fit, out)


@verb(
    fit_app,
    "mars",
    config=MarsConfig,
    runs=PairedConfig,
    examples="""specctl fit mars questions.jsonl -o mars --target TARGET --drafter HEAD""",
    wide=True,
)
def fit_mars(
    prompts: JudgedArgument,
    out: OutOption,
    config: Given,
    runs: Given,
    shape: str = option("eagle2", "Shape, maybe with a budget, by words or artifact"),
    preset: preset_option("mars") = None,  # type: ignore[valid-type]
) -> Answer:
    """Fit a relaxed acceptance and certify it (MARS).

    The threshold is chosen by its cost in right answers.
    """
    from specctl.train.configs import THETAS
    from specctl.train.faces import MARS, check_mode

    check_mode(config.mode, greedy=not runs.temperature)
    thetas = THETAS.get(config.form, THETAS["ratio"])
    return _certify(MARS, prompts, out, config, runs, shape, thetas=thetas)


@verb(
    fit_app,
    "adasd",
    config=AdasdConfig,
    runs=PairedConfig,
    examples="""specctl fit adasd questions.jsonl -o adasd --target TARGET --drafter HEAD""",
    wide=True,
)
def fit_adasd(
    prompts: JudgedArgument,
    out: OutOption,
    config: Given,
    runs: Given,
    shape: str = option("adasd_stop", "Shape, maybe with a budget, by words or artifact"),
) -> Answer:
    """Fit the clip of a relaxed acceptance and certify it (AdaSD).

    The clip is chosen by its cost in right answers.
    """
    from specctl.train.faces import ADASD

    return _certify(ADASD, prompts, out, config, runs, shape)
