"""`specctl replay`: folders and named policies in, one document out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specctl.errors import UsageError
from specctl.logs.imported_log import HEADER_NAME, ImportedLog
from specctl.logs.parquet import collected
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import ScoredTree, Shape, build_shape
from specctl.policy.budgets import StepCost
from specctl.policy.c2t import nothing_kept
from specctl.replay.batch_figures import figures_of
from specctl.replay.batch_simulation import Load, Simulation, simulate_runs
from specctl.replay.config import ReplayConfig, ShowProgress, no_progress, refuse_ignored
from specctl.replay.cost.files import AnyCost, doubts, load_cost_model
from specctl.replay.cost.model import TableCost
from specctl.replay.imported import replay_import
from specctl.replay.results import (
    Result,
    ServingScores,
    caption_of,
    facts_of,
    replay_result,
    serving_result,
)
from specctl.replay.rounds import Rounds, replay
from specctl.replay.score import score
from specctl.replay.submissions import submissions_of
from specctl.results import ReplayScores
from specctl.runtime.identity import hardware_name
from specctl.runtime.policy_spec import resolve_policies

NUM_RUNS = 8
"""Independent orders of the requests, and of their arrivals, behind an interval."""
Warn = Callable[[str], None]
"""Called with each reason why a cost model may not fit: its pair, machine or age."""


def no_warning(line: str) -> None:
    """Says nothing."""
    del line


def replay_folders(
    folders: Sequence[str | Path],
    config: ReplayConfig,
    open_traces: Callable[..., TraceSet],
    *,
    progress: ShowProgress = no_progress,
    warn: Warn = no_warning,
) -> Result:
    """Scores policies on whatever the folders hold: dense traces, or one import.

    Args:
        open_traces: called with the folders of dense traces; `TraceSet.open`.

    Raises:
        UsageError: a policy that a log cannot tell, a baseline that is not there, or an option
            that would be ignored. TraceError, ArtifactError, InputError: see `specctl.errors`.
    """
    config.check_baseline()
    if any((Path(folder) / HEADER_NAME).is_file() for folder in folders):
        if len(folders) > 1:
            raise UsageError(
                "traces",
                expected="one import by itself",
                found=f"{len(folders)} folders",
                fix="replay them one after the other; their texts are not of one run",
            )
        log = ImportedLog.open(folders[0])
        model = open_cost_model(config.cost_model, None, warn)
        drafters = config.drafters or log.drafters
        if model is not None and len(drafters) > 1:
            names = " and ".join(drafters)
            warn(f"cost model: one drafter's times stand for {names}; see --drafter")
        return replay_import(log, config, model, progress=progress)
    refuse_ignored(
        {"--drafter": bool(config.drafters)},
        expected="an import of `specctl import`",
        found="dense traces",
    )
    traces = open_traces(*folders)
    torch.set_num_threads(1)  # chunks are the parallelism
    if config.has_load:
        return serve_policies(traces, config, progress=progress, warn=warn)
    refuse_ignored(
        {"--tpot-limit-ms": config.tpot_limit_ms is not None},
        expected="a load, --batch-size or --arrival-rate",
        found="none",
    )
    return replay_policies(traces, config, progress=progress, warn=warn)


def replay_policies(
    traces: TraceSet,
    config: ReplayConfig,
    *,
    progress: ShowProgress = no_progress,
    warn: Warn = no_warning,
) -> Result:
    """Scores policies on dense traces, one request at a time."""
    log = DenseLog.open(traces)
    named = resolve_policies(",".join(config.specs), traces.fingerprint)
    model = open_cost_model(config.cost_model, traces, warn)
    with progress("positions", log.num_positions) as tick:
        runs = replay(
            log,
            [item.policy for item in named],
            num_threads=config.num_threads,
            on_positions=tick,
        )
    refuse_in_vain(runs)
    labels = [item.label for item in named]
    scored = score(
        labels,
        runs,
        clock=None if model is None else model.replayed_us,
        baseline=config.baseline - 1,
        seed=config.seed,
    )
    facts = facts_of(traces, log, None if model is None else model.digest)
    baseline = labels[config.baseline - 1]
    scores = ReplayScores(kind="replay", **facts, baseline=baseline, policies=tuple(scored))
    return replay_result(scores, caption_of(facts), by_category=config.by_category)


def refuse_in_vain(runs: Sequence[Rounds]) -> None:
    """Refuses a scorer whose beta kept no node of any round: it drafts, and verifies nothing."""
    for run in runs:
        shape, verified = run.policy.shape, run.outcomes.verified
        if isinstance(shape, ScoredTree) and bool((verified == 1).all()):
            raise nothing_kept(shape.beta, f"no node in {len(verified)} rounds of these traces")


def serve_policies(
    traces: TraceSet,
    config: ReplayConfig,
    *,
    progress: ShowProgress = no_progress,
    warn: Warn = no_warning,
) -> Result:
    """Simulates policies on dense traces at a load, every one under the same requests.

    A budget that weighs tokens against time and brings no table of its own is given the model's,
    for whole rounds of a full batch at the log's mean context.
    """
    import polars as pl

    refuse_ignored(
        {"--by-category": config.by_category},
        expected="requests replayed one at a time",
        found="a load, which mixes categories",
    )
    model = require_cost_model(
        config.cost_model, traces, warn, "the times that a load is simulated with"
    )
    log, load = DenseLog.open(traces), Load(config.batch_size, config.arrival_rate_per_s)
    mean = traces.scan("rounds").select(pl.col("context_tokens").mean())
    cached = float(collected(mean).item()) - 1  # the root is not cached yet

    def step_cost(shape: Shape) -> StepCost:
        return model.full_batch_cost(build_shape(shape), config.batch_size, cached)

    named = resolve_policies(",".join(config.specs), traces.fingerprint, step_cost=step_cost)
    with progress("positions", log.num_positions) as tick:
        prepared = submissions_of(
            log,
            [item.policy for item in named],
            num_threads=config.num_threads,
            on_positions=tick,
        )
    runs: dict[str, list[Simulation]] = {}
    with progress("simulated runs", NUM_RUNS * len(named)) as tick:
        for item, submissions in zip(named, prepared, strict=True):
            runs[item.label] = simulate_runs(
                submissions, load, model, num_runs=NUM_RUNS, seed=config.seed, on_run=tick
            )
    facts, baseline = facts_of(traces, log, model.digest), named[config.baseline - 1].label
    limit_us = None if config.tpot_limit_ms is None else 1e3 * config.tpot_limit_ms
    scores = ServingScores(
        kind="replay-serving",
        **facts,
        load=vars(load).copy(),
        baseline=baseline,
        policies=tuple(
            figures_of(
                label, found, baseline=runs[baseline], tpot_limit_us=limit_us, seed=config.seed
            )
            for label, found in runs.items()
        ),
    )
    return serving_result(scores, caption_of(facts))


def open_cost_model(path: Path | None, traces: TraceSet | None, warn: Warn) -> AnyCost | None:
    """The cost model, after saying what about it does not fit.

    Times of another machine are usual on a laptop, but never unsaid.

    Args:
        traces: None for an import, which names neither its models nor its machine.
    """
    if path is None:
        return None
    model = load_cost_model(path)
    if traces is None and isinstance(model, TableCost):
        warn(
            f"cost model: measured for target {model.pair.target!r} and drafter "
            f"{model.pair.drafter!r}; the import does not name its own"
        )
    here = {"device": hardware_name(torch.device("cpu"))}
    for line in doubts(model, pair=None if traces is None else traces.fingerprint, here=here):
        warn(line)
    return model


def require_cost_model(path: Path | None, traces: TraceSet, warn: Warn, expected: str) -> AnyCost:
    """The same where nothing can be done without one."""
    model = open_cost_model(path, traces, warn)
    if model is None:
        raise UsageError(
            "--cost-model",
            expected=expected,
            found="none",
            fix="measure them with `specctl profile`, or write a linear form by hand",
        )
    return model
