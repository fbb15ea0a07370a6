"""`specctl replay`: traces and named policies in, one document out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import add
from pathlib import Path

from specctl.artifacts.compatibility import Expectation
from specctl.errors import UsageError
from specctl.lazy import torch
from specctl.logs.parquet import collected
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy, ScoredTree, Shape, as_chain, build_shape
from specctl.policy.budgets import StepCost
from specctl.policy.c2t import nothing_kept
from specctl.replay.batch_figures import figures_of, totals_of
from specctl.replay.batch_simulation import Load, Simulation, simulate, simulate_runs
from specctl.replay.config import ReplayConfig, ShowProgress, no_progress, refuse_ignored
from specctl.replay.cost.files import (
    AnyCost,
    check_clock,
    doubts,
    load_cost_model,
    parse_linear,
    warn_beyond,
    warn_outside,
)
from specctl.replay.cost.model import Beyond, CostModel, Steps, require_slope, steps_of
from specctl.replay.cost.rates import LinearCost
from specctl.replay.held_out import ScoredPrompts, choose_prompts, logged_prompts
from specctl.replay.results import (
    BatchScores,
    ReplayScores,
    Result,
    ServingScores,
    caption_of,
    facts_of,
    replay_result,
    serving_result,
    totals_result,
)
from specctl.replay.rounds import replay_parts
from specctl.replay.score import PolicyScores, Scoring
from specctl.replay.submissions import submissions_of
from specctl.runtime.identity import processor_name
from specctl.runtime.words import NamedPolicy, resolve_policies

NUM_RUNS = 8
"""Independent orders of the requests, and of their arrivals, behind an interval."""
Warn = Callable[[str], None]
"""Called with each reason why a cost model may not fit: its pair, machine or age."""


def no_warning(line: str) -> None:
    """Says nothing."""
    del line


def replay_traces(
    traces: TraceSet,
    config: ReplayConfig,
    *,
    progress: ShowProgress = no_progress,
    warn: Warn = no_warning,
) -> Result:
    """Scores policies on dense traces, one request at a time or at the load of the configuration.

    Raises:
        UsageError: a policy that a log cannot tell, a baseline that is not there, a batch that the
            cost model was not measured for, or an option that would be ignored. TraceError,
            ArtifactError, InputError: see `specctl.errors`.
    """
    config.check_baseline()
    config.check_load()
    torch.set_num_threads(1)  # chunks are the parallelism
    if config.has_load:
        return serve_policies(traces, config, progress=progress, warn=warn)
    return replay_policies(traces, config, progress=progress, warn=warn)


def replay_policies(
    traces: TraceSet,
    config: ReplayConfig,
    *,
    named: Sequence[NamedPolicy] | None = None,
    progress: ShowProgress = no_progress,
    warn: Warn = no_warning,
) -> Result:
    """Scores policies on dense traces, one request at a time.

    Args:
        named: the policies, where they are resolved already; None: those of the configuration.
    """
    model = open_cost_model(config.cost_model, traces, warn, force=config.force)
    log = DenseLog.open(traces)
    if named is None:
        named = named_policies(traces, config, warn)
    log, scored = scored_log(log, traces, config, named, warn)
    labels, policies = [item.label for item in named], [item.policy for item in named]
    clock, error = (None, None) if model is None else (model.replayed_us, model.time_error)
    scoring = Scoring(labels, clock, error)
    beyond: dict[str, list[Beyond]] = {}
    with progress("positions", log.num_positions) as tick:
        for runs in replay_parts(log, policies, num_threads=config.num_threads, on_positions=tick):
            scoring.add(runs)
            for label, run in zip(labels, runs, strict=True):
                outside = [] if model is None else model.outside(steps_of(run))
                known = beyond.get(label)
                beyond[label] = outside if known is None else [*map(add, known, outside)]
    found = scoring.scores(baseline=config.baseline - 1, seed=config.seed)
    refuse_in_vain(policies, found)
    for label, of in beyond.items():
        warn_beyond(label, of, warn)
    facts = facts_of(traces, log, model, named, scored)
    baseline = labels[config.baseline - 1]
    scores = ReplayScores(kind="replay", **facts, baseline=baseline, policies=tuple(found))
    return replay_result(scores, caption_of(facts), by_category=config.by_category)


def named_policies(
    traces: TraceSet,
    config: ReplayConfig,
    warn: Warn,
    step_cost: Callable[[Shape], StepCost] | None = None,
) -> list[NamedPolicy]:
    """The policies of the configuration, fitted to the traces' pair unless it accepts others. That
    lossy ones have to be compared live is said by the replay."""
    expect = Expectation(traces.fingerprint, allow_mismatch=config.allow_mismatch)
    words = ",".join(config.specs)
    return resolve_policies(words, expect, allow_lossy=True, step_cost=step_cost)


def scored_log(
    log: DenseLog, traces: TraceSet, config: ReplayConfig, named: Sequence[NamedPolicy], warn: Warn
) -> tuple[DenseLog, ScoredPrompts]:
    """The part of a log that the policies are scored on."""
    prompts = logged_prompts(traces)
    scored = choose_prompts(prompts, named, traces, all_prompts=config.all_prompts, warn=warn)
    return (log.only(scored.prompts) if scored.num_left_out else log), scored


def refuse_in_vain(policies: Sequence[Policy], scored: Sequence[PolicyScores]) -> None:
    """Refuses a scorer whose beta kept no node of any round: it drafts, and verifies nothing."""
    for policy, found in zip(policies, scored, strict=True):
        shape, calls = policy.shape, found.pooled.calls
        if isinstance(shape, ScoredTree) and found.pooled.verified_tokens == calls:
            raise nothing_kept(shape.beta, f"no node in {calls} rounds of these traces")


def serve_policies(
    traces: TraceSet,
    config: ReplayConfig,
    *,
    named: Sequence[NamedPolicy] | None = None,
    progress: ShowProgress = no_progress,
    warn: Warn = no_warning,
) -> Result:
    """Simulates policies on dense traces at a load, every one under the same requests: shuffled
    runs, or one in the order of the log.

    A budget that weighs tokens against time and brings no table of its own is given the model's,
    for whole rounds of a full batch at the log's mean context.

    Args:
        named: as in `replay_policies`.
    """
    import polars as pl

    refuse_ignored({"--by-category": config.by_category}, "a load mixes the categories")
    if config.in_order:
        model = open_cost_model(config.cost_model, traces, warn, force=config.force)
    else:
        expected = "the times that a load is simulated with"
        model = require_cost_model(config.cost_model, traces, warn, expected, force=config.force)
    if model is not None:  # a batch that was not measured is refused before the log is read
        model.round_us(Steps(config.batch_size, config.batch_size, 1, 0, 1, 0))
    log = DenseLog.open(traces)
    mean = traces.scan("rounds").select(pl.col("context_tokens").mean())
    cached = float(collected(mean).item()) - 1  # the root is not cached yet

    def step_cost(shape: Shape) -> StepCost:
        return require_slope(model).full_batch_cost(build_shape(shape), config.batch_size, cached)

    if named is None:
        named = named_policies(traces, config, warn, step_cost)
    log, scored = scored_log(log, traces, config, named, warn)
    policies = {item.label: item.policy for item in named}
    baseline = named[config.baseline - 1].label
    facts = facts_of(traces, log, model, named, scored)
    caption = caption_of(facts)
    if config.engine == "vllm":
        chains = {label: as_chain(policy) for label, policy in policies.items()}
        if changed := [label for label in chains if chains[label] != policies[label]]:
            line = f"On the drafter's likeliest path alone, as in vLLM: {', '.join(changed)}."
            caption = replace(caption, remarks=(line,))
        policies = chains
    with progress("positions", log.num_positions) as tick:
        found = submissions_of(
            log, list(policies.values()), num_threads=config.num_threads, on_positions=tick
        )
    prepared = dict(zip(policies, found, strict=True))
    load = Load(
        config.batch_size,
        config.arrival_rate_per_s,
        engine=config.engine,
        in_order=config.in_order,
    )
    facts |= {"load": vars(load).copy(), "baseline": baseline}
    if config.in_order:
        once = {label: simulate(of, load, model) for label, of in prepared.items()}
        warn_outside(model, {label: run.steps for label, run in once.items()}, warn)
        totals = totals_of(once, baseline, has_time=model is not None)
        batch = BatchScores(kind="replay-batch", **facts, policies=totals)
        return totals_result(batch, caption)
    runs: dict[str, list[Simulation]] = {}
    with progress("simulated runs", NUM_RUNS * len(prepared)) as tick:
        for label, of in prepared.items():
            runs[label] = simulate_runs(
                of, load, model, num_runs=NUM_RUNS, seed=config.seed, on_run=tick
            )
    warn_outside(model, {label: of[0].steps for label, of in runs.items()}, warn)
    limit_us = None if config.tpot_limit_ms is None else 1e3 * config.tpot_limit_ms
    figures = tuple(
        figures_of(
            label,
            of,
            baseline=runs[baseline],
            tpot_limit_us=limit_us,
            time_error=model.time_error if model is not None else None,
            seed=config.seed,
        )
        for label, of in runs.items()
    )
    return serving_result(ServingScores(kind="replay-serving", **facts, policies=figures), caption)


def open_cost_model(
    path: Path | None, traces: TraceSet | None, warn: Warn, *, force: bool
) -> AnyCost | None:
    """The cost model, after saying what about it does not fit.

    Times of another machine are usual on a laptop, but never unsaid.

    Args:
        traces: None for a server's log, which names neither its models nor its machine.
        force: take one that failed its own check, see `check_clock`.
    """
    if path is None:
        return None
    model = load_cost_model(path)
    check_clock(model, force=force)
    if traces is None and not isinstance(model, LinearCost):
        warn(
            f"cost model: measured for target {model.pair.target!r} and drafter "
            f"{model.pair.drafter!r}; the log does not name its own"
        )
    here = {"device": processor_name()}
    for line in doubts(model, pair=None if traces is None else traces.fingerprint, here=here):
        warn(line)
    return model


def require_cost_model(
    path: Path | None, traces: TraceSet, warn: Warn, expected: str, *, force: bool
) -> AnyCost:
    """The same where nothing can be done without one."""
    model = open_cost_model(path, traces, warn, force=force)
    if model is None:
        raise UsageError(
            f"--cost-model: expected {expected}, found none",
            hint="measure them with `specctl profile`, or name a clock (docs/cost-model.md)",
        )
    return model


def choose_cost(
    path: Path | None, linear: str | None, traces: TraceSet | None, warn: Warn, *, force: bool
) -> CostModel:
    """The cost model of a file or of stated rates.

    Args:
        traces: what it is for; None for a server's log. force: see `open_cost_model`.

    Raises:
        UsageError: none or both, rates that cannot be read, or a model by which tokens are free.
        InputError: a file that cannot be read. ClockError: one that failed its own check.
    """
    if (path is None) == (linear is None):
        raise UsageError(
            "cost of a round: expected either --cost-model or --linear, to weigh tokens against "
            f"time, found {'neither' if path is None else 'both'}",
            hint="measure one with `specctl profile` and give it with --cost-model",
        )
    if linear is not None:
        return require_slope(parse_linear(linear))
    return require_slope(open_cost_model(path, traces, warn, force=force))
