"""`specctl profile`, `replay`, `ladder`, `tune` and `report`: the worth of policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specctl.cli.app import app
from specctl.cli.options import (
    THREADS,
    DenseTracesArgument,
    open_to_fit,
    run_and_publish,
)
from specctl.cli.verbs import Given, verb
from specctl.console import Answer
from specctl.errors import ClockError, EngineError, UsageError
from specctl.formatting import short_id
from specctl.progress import progress, set_chunk_threads
from specctl.records import PositiveInt, option
from specctl.replay.config import (
    LadderConfig,
    ProfileGrid,
    ReplayConfig,
    TuneConfig,
    refuse_ignored,
)
from specctl.runtime.config import ModelsConfig

NUM_CHECKED, TOKENS_CHECKED = 4, 12
"""Packaged prompts that check a profile at its end, and new tokens of each."""


@verb(
    app,
    config=ProfileGrid,
    models=ModelsConfig,
    examples="""specctl profile -o cost_model.json
specctl profile --target TARGET --drafter HEAD -o cost_model.json
specctl profile --policy fitted -o cost_model.json
specctl profile --from engine-traces -o vllm.json""",
    wide=True,
)
def profile(
    *,
    out: Path | None = option(
        None,
        "Cost model to write",
        name="--out -o",
        default="cost_model.json, or an engine's name, e.g. llamacpp.json",
    ),
    traces: list[str] | None = option(
        None,
        "Trace set of an engine, to fit its step times; repeat for more",
        name="--from",
        default="measure here",
    ),
    policy: list[str] | None = option(
        None,
        "Also time the decisions of this policy, e.g. an artifact folder; repeat for more",
        name="--policy -p",
        default="none",
    ),
    engine: Literal["specctl", "llamacpp"] = option(
        "specctl",
        "Whose rounds are timed: specctl, or llamacpp with GGUF files as --target and --drafter",
    ),
    url: list[str] | None = option(
        None,
        "Running llama-server to time, one for each draft length; repeat for more",
        default="servers in this process",
    ),
    config: Given,
    models: Given,
) -> Answer:
    """Measure the cost of rounds on this machine.

    In microseconds, for replay and budgets; takes minutes. Exits with 11 if the model fails its own
    check; it is then written beside a model that passed, as NAME.failed.json.

    With --from nothing is measured: the cost model is fitted to the steps of an engine.
    """
    from specctl.durable import check_place
    from specctl.replay.cost.files import (
        COST_MODEL,
        save_cost_model,
        unfailed_place,
        warn_of_lost_times,
    )
    from specctl.replay.cost.model import TableCost
    from specctl.replay.cost.rates import EngineCost

    grid: ProfileGrid = config.build()
    setup: ModelsConfig = models.build()
    if engine == "specctl":
        setup.check()
        refuse_ignored({"--url": bool(url)}, "it is for --engine llamacpp")
    wanted = out or Path("cost_model.json" if engine == "specctl" else f"{engine}.json")
    check_place(wanted, COST_MODEL)
    model: TableCost | EngineCost
    has_failed = False
    if traces:
        from specctl.logs.trace_set import TraceSet
        from specctl.replay.cost.engine import fit_engine, render_engine

        given = [*config.changed, *models.changed, *(["--policy"] if policy else [])]
        refuse_ignored(dict.fromkeys(given, True), "--from measures nothing")
        model = fit_engine(TraceSet.open(*traces))
        wanted = out or Path(f"{model.engine}.json")
        facts, shown = model.model_dump(mode="json"), render_engine(model)
    elif engine == "llamacpp":
        from specctl.engines.llamacpp_clock import measure_clock
        from specctl.replay.cost.engine import render_engine

        refuse_ignored({"--policy": bool(policy)}, "llama.cpp decides by itself")
        read = {"--target", "--drafter", "--batch-sizes", "--contexts", "--quick"}
        read |= set() if url else {"--threads", "--verified-tokens"}
        ignored = [one for one in (*models.changed, *config.changed) if one not in read]
        refuse_ignored(dict.fromkeys(ignored, True), "--engine llamacpp does not read it")
        timed = measure_clock(setup.target, setup.drafter, url or (), grid, setup.threads)
        model, has_failed = timed
        facts, shown = model.model_dump(mode="json"), render_engine(model)
    else:
        from specctl.collect.prompts import load_prompts
        from specctl.replay.cost.live import deciding_policies
        from specctl.replay.cost.probe import Bench
        from specctl.replay.cost.profile import profile as measure
        from specctl.replay.cost.profile import render, summary_json
        from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
        from specctl.runtime.words import check_words

        check_words(policy or ())
        with progress("loading models", None):
            pair = setup.load_pair()
        policies, bench = deciding_policies(policy or (), pair), Bench.of(pair, grid.rounds)
        warn_of_lost_times(wanted, [one.policy for one in policies], pair.fingerprint)
        requests = [
            next_request(
                pair.target.tokenizer, Conversation(prompt), DecodeSettings(TOKENS_CHECKED)
            )
            for prompt in load_prompts("embedded", limit=NUM_CHECKED)
        ]
        model = measure(bench, grid, requests=requests, policies=policies)
        facts, shown = summary_json(model), render(model)
    place = unfailed_place(model, wanted)
    save_cost_model(model, place)

    def end() -> None:
        if has_failed:
            raise EngineError(f"{place} lacks the timings of servers that failed, named above")
        if model.failed_check is not None:
            raise typer.Exit(ClockError.exit_code)

    kept = f"kept {wanted}, which passed its check; " if place != wanted else ""
    shown.append(f"{kept}wrote {place}, {short_id(model.digest)}, expires {model.expires}")
    return Answer({"out": str(place), "digest": model.digest, **facts}, shown, end)


@verb(
    app,
    config=ReplayConfig,
    examples="""specctl replay traces -p ar,chain,eagle2
specctl replay traces -p ar,eagle2:depth=5 --cost-model cost_model.json
specctl replay traces -p ar,chain --cost-model cost_model.json --batch-size 8""",
    wide=True,
)
def replay(
    traces: DenseTracesArgument,
    *,
    policy: list[str] = option(
        ..., "Policy to score, e.g. ar, chain, eagle2:depth=8; repeat for more", name="--policy -p"
    ),
    config: Given,
    out: Path | None = option(None, "Folder for replay.json", name="--out -o", default="none"),
    threads: int = THREADS,
) -> Answer:
    """Score policies from traces, without the models.

    Counts are exact for lossless policies that the log supports; others are marked, with bounds.
    """
    from specctl.durable import prepare_folder, write_whole
    from specctl.logs.trace_files import open_place, read_header, split_reference
    from specctl.runtime.words import check_words

    settings = config.build(policies=policy)
    set_chunk_threads(threads)
    check_words(settings.specs)
    for folder in traces:
        read_header(open_place(split_reference(folder)[0]))
    if out is not None:
        prepare_folder(out)

    from specctl.logs.trace_set import TraceSet
    from specctl.records import json_bytes
    from specctl.replay.run import replay_traces

    opened = TraceSet.open(*traces)
    result = replay_traces(opened, settings)
    if out is not None:
        write_whole(out / "replay.json", json_bytes(result.to_json()), "replay results")
    return Answer(result.to_json(), result.shown())


@verb(
    app,
    config=LadderConfig,
    examples="""specctl ladder traces -o ladder --cost-model cost_model.json
specctl ladder traces -o ladder --cost-model cost_model.json -p eagle2:depth=5""",
    wide=True,
)
def ladder(
    traces: DenseTracesArgument,
    *,
    out: Path = option(..., "Folder for ladder.json and ladder.png", name="--out -o"),
    policy: list[str] | None = option(
        None, "Policy to place on the ladder; repeat for more", name="--policy -p", default="none"
    ),
    cost_model: Path | None = option(
        None, "cost_model.json of `specctl profile`, or a named clock", default="--linear"
    ),
    linear: str | None = option(
        None,
        "Instead of --cost-model, rates in us, e.g. "
        "verify_fixed_us=5000,verify_token_us=20,verify_cached_token_us=0,"
        "draft_fixed_us=300,draft_token_us=5,step_us=200",
        default="none",
    ),
    batch_size: PositiveInt = option(1, "Load, requests; each pays its share of a batch of equals"),
    config: Given,
) -> Answer:
    """Place policies between plain decoding and the best.

    In tokens/s: from plain decoding to what is possible with this drafter.
    """
    from specctl.durable import prepare_folder
    from specctl.logs.trace_set import TraceSet
    from specctl.runtime.words import check_words

    settings = config.build()
    check_words(policy or ())
    opened = TraceSet.open(*traces)

    from specctl.replay.run import choose_cost

    model = choose_cost(cost_model, linear, opened, force=settings.force)

    from specctl.replay.ladder.build import run_ladder
    from specctl.replay.ladder.result import ladder_parts, write_ladder

    prepare_folder(out)
    result = run_ladder(
        opened,
        model,
        policy or (),
        batch_size=batch_size,
        config=settings,
    )
    write_ladder(result, out)
    parts = [*ladder_parts(result), f"wrote {out}"]
    return Answer(result.to_json(), parts)


@verb(
    app,
    config=TuneConfig,
    examples="""specctl tune traces --cost-model cost_model.json -o tuned
specctl tune traces --cost-model cost_model.json -o tuned --for vllm
specctl tune --show-grid""",
    wide=True,
)
def tune(
    *,
    traces: Annotated[
        list[str] | None,
        typer.Argument(help="One or more dense trace folders; default: none, for --show-grid."),
    ] = None,
    out: Path | None = option(
        None, "Folder for tune.json and the artifact, policy/", name="--out -o", default="none"
    ),
    cost_model: Path | None = option(
        None,
        "cost_model.json of `specctl profile`, or a named clock",
        default="none, for --show-grid",
    ),
    show_grid: bool = option(False, "Print the grids and stop"),
    config: Given,
    threads: int = THREADS,
) -> Answer:
    """Search the best settings for a load.

    Scored by replay and reported on held-out prompts; the best one is written.

    The best static setting always takes part, and is written unless another beats it.
    """
    settings: TuneConfig = config.build()

    from specctl.durable import prepare_folder
    from specctl.engines.export import engine_options
    from specctl.replay.tune.candidates import grid_parts, listed_families
    from specctl.replay.tune.tuning import prepare

    if show_grid:
        families = listed_families(config.family or (), config.grid or ())
        grids = {family.name: dict(family.grid_rows()) for family in families}
        return Answer(grids, grid_parts(families))
    engine = engine_options(settings)
    opened = open_to_fit(traces or [])
    set_chunk_threads(threads)
    tuning = prepare(opened, settings, cost_model, **engine)
    if out is not None:
        prepare_folder(out)
    return run_and_publish(tuning, opened, out)


@verb(
    app,
    examples="""specctl report traces -o report.html
specctl report traces -o report.html --tune tuned/tune.json
specctl report traces -o report.html --run run/results.json
specctl report traces --json""",
)
def report(
    *,
    out: Path | None = option(
        None, "HTML file to write", name="--out -o", default="print the sentences alone"
    ),
    traces: Annotated[
        list[str] | None,
        typer.Argument(help="Trace folders of one pair, dense or live; default: results alone."),
    ] = None,
    results: Path | None = option(None, "replay.json of `specctl replay`", default="none"),
    ladder: Path | None = option(None, "ladder.json of `specctl ladder`", default="none"),
    tune: Path | None = option(None, "tune.json of `specctl tune`", default="none"),
    run: Path | None = option(
        None, "results.json of `specctl run --compare`, beside its run.json", default="none"
    ),
    drift: Path | None = option(None, "drift.json of `specctl drift`", default="none"),
    cost_model: Path | None = option(
        None, "cost_model.json or named clock behind the results' times", default="none"
    ),
    seed: int = option(0, "Seed of the bootstrap over prompts", ge=0),
) -> Answer:
    """Write one HTML page on traces and results.

    First the best setting, its gains and what to set in your engine, then the details.
    """
    for folder in traces or ():
        if folder.endswith(".json"):
            raise UsageError(
                f"{folder} is no trace folder",
                hint="results have options: --results, --ladder, --tune, --run, --drift",
            )

    from specctl.durable import check_place, write_whole
    from specctl.logs.trace_set import TraceSet
    from specctl.replay.acceptance import trace_figures
    from specctl.replay.cost.files import load_cost_model
    from specctl.report import build_page, read_given, settings_for

    if out is not None:
        check_place(out, "report")
    cost = None if cost_model is None else load_cost_model(cost_model)
    paths = {"replay": results, "ladder": ladder, "tune": tune, "run": run, "drift": drift}
    given = read_given(cost, **paths)
    given = settings_for(given, tune)
    figures = None
    if traces:
        opened = TraceSet.open(*traces)
        with progress("positions", opened.num_rows("rounds")):
            figures = trace_figures(opened, seed=seed)
    page = build_page(figures, given)
    if out is None:
        said = [f"{one.title}: {one.reading}" for one in page.sections if one.reading]
        return Answer(page.to_json(), said)
    write_whole(out, page.html().encode(), "report")
    return Answer(page.to_json(), [f"wrote {out}"])
