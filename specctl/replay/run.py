"""`specctl replay`: from traces and named policies to one document."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specctl.artifacts.compatibility import Expectation
from specctl.errors import UsageError
from specctl.formatting import listed
from specctl.lazy import torch
from specctl.logs.parquet import collected
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk, sampled
from specctl.policy import Policy, ScoredTree, Shape, as_chain, build_shape
from specctl.policy.budgets import StepCost
from specctl.policy.c2t import nothing_kept
from specctl.progress import progress
from specctl.replay.batch_figures import figures_of, totals_of
from specctl.replay.batch_simulation import Load, Simulation, simulate_runs
from specctl.replay.config import Engine, ReplayConfig
from specctl.replay.cost.files import (
    AnyCost,
    check_clock,
    doubts,
    load_cost_model,
    parse_linear,
    warn_outside,
)
from specctl.replay.cost.model import (
    CostModel,
    OutOfRange,
    Steps,
    TableCost,
    require_slope,
    steps_of,
)
from specctl.replay.cost.rates import EngineCost, LinearCost
from specctl.replay.held_out import choose_prompts, logged_prompts
from specctl.replay.llamacpp import as_llamacpp, log_of_engine
from specctl.replay.metrics import LoadClock, Sums, join_sums
from specctl.replay.outcomes import check_replayable, map_policies
from specctl.replay.results import (
    BatchScores,
    ReplayScores,
    Result,
    ServingScores,
    facts_of,
    replay_result,
    serving_result,
    totals_result,
)
from specctl.replay.rounds import held_with, replay_chunk
from specctl.replay.score import PolicyScores, score, sums_to_score
from specctl.replay.submissions import submissions_of
from specctl.runtime.identity import processor_name
from specctl.runtime.words import NamedPolicy, resolve_policies, resolve_policy

NUM_RUNS = 8
"""Independent orders of requests and arrivals behind an interval."""
logger = logging.getLogger(__name__)


def compare_policies(
    traces: TraceSet, policies: Mapping[str, Policy | str], **options: Any
) -> Result:
    """`specctl replay` from Python: scores policies by label, the first as the baseline.

    Args:
        policies: words and artifacts too.
        options: fields of `ReplayConfig`.

    Raises:
        UsageError, RecordError: see `replay_traces`, and options that there are not.
    """
    config = ReplayConfig(policies=tuple(policies), **options)
    expect = Expectation(traces.fingerprint, allow_mismatch=config.allow_mismatch)
    found = {
        label: resolve_policy(of, expect, allow_lossy=True) if isinstance(of, str) else of
        for label, of in policies.items()
    }
    named = [
        NamedPolicy(label, of) if isinstance(of, Policy) else replace(of, label=label)
        for label, of in found.items()
    ]
    return replay_traces(traces, config, named=named)


def replay_traces(
    traces: TraceSet, config: ReplayConfig, *, named: Sequence[NamedPolicy] | None = None
) -> Result:
    """Scores policies on dense traces, one request at a time or at the load of the configuration.

    A budget without a table of its own weighs tokens by the cost model: whole rounds of a full
    batch, at the log's mean context. Warnings name each doubt about the cost model: its pair,
    machine or age.

    Args:
        named: resolved policies; None for the configuration's.

    Raises:
        UsageError: a policy that cannot be replayed, an unknown baseline, a batch larger than the
            cost model knows, or an option without effect.
        TraceError, ArtifactError, InputError: see `specctl.errors`.
    """
    import polars as pl

    config.check()
    torch.set_num_threads(1)  # chunks are the parallelism
    model: AnyCost | None
    as_told: dict[str, Any] = {"force": config.force, "engine": config.engine}
    if config.has_load and not config.in_order:
        expected = "a load is simulated with its times"
        model = require_cost_model(config.cost_model, traces, expected, **as_told)
    else:
        model = open_cost_model(config.cost_model, traces, **as_told)
    if config.has_load and model is not None:  # refuses a batch that is too large before reading
        model.round_us(Steps(config.batch_size, config.batch_size, 1, 0, 1, 0))
    log = sampled(DenseLog.open(traces), config.max_positions, config.seed)
    log = log_of_engine(log, traces, config.engine)

    def step_cost(shape: Shape) -> StepCost:
        mean = traces.scan("rounds").select(pl.col("context_tokens").mean())
        cached = float(collected(mean).item()) - 1  # the root is not cached yet
        return require_slope(model).step_cost(build_shape(shape), config.batch_size, cached)

    if named is None:  # lossy policies are refused later
        expect = Expectation(traces.fingerprint, allow_mismatch=config.allow_mismatch)
        costs = step_cost if config.has_load else None
        named = resolve_policies(",".join(config.specs), expect, allow_lossy=True, step_cost=costs)
    prompts = log.prompts or logged_prompts(traces)
    scored = choose_prompts(prompts, named, traces, all_prompts=config.all_prompts)
    log = log.only(scored.prompts) if scored.num_left_out else log
    # llama.cpp decides inside its own server
    deciding = () if config.engine == "llamacpp" else named
    facts = facts_of(traces, log, model, deciding, scored)
    facts["baseline"] = named[config.baseline - 1].label
    policies, remarks = policies_of_engine(named, config.engine)
    larger = {label: held_with(policies[label], log.support) for label in policies}
    facts["beyond_log"] = {label: how for label, how in larger.items() if how} or None
    run = serve_policies if config.has_load else replay_policies
    return run(log, policies, model, config, facts, remarks)


def policies_of_engine(
    named: Sequence[NamedPolicy], engine: Engine
) -> tuple[dict[str, Policy], tuple[str, ...]]:
    """The policies as an engine drafts them, by label, and lines on those that it changes."""
    policies = {one.label: one.policy for one in named}
    if engine == "specctl":
        return policies, ()
    chain, title = (as_chain, "vLLM") if engine == "vllm" else (as_llamacpp, "llama.cpp")
    chains = {label: chain(policy) for label, policy in policies.items()}
    remarks = [] if engine == "vllm" else ["Texts end by llama.cpp's rules, see --engine."]
    if changed := [label for label in chains if chains[label] != policies[label]]:
        changes = f"On the drafter's likeliest path alone, as in {title}: {', '.join(changed)}."
        remarks.append(changes)
    return chains, tuple(remarks)


def replay_policies(
    log: DenseLog,
    policies: Mapping[str, Policy],
    model: AnyCost | None,
    config: ReplayConfig,
    facts: dict[str, Any],
    remarks: Sequence[str] = (),
) -> Result:
    """Scores policies one request at a time."""
    clock = None if model is None else LoadClock(model)

    def work(policy: Policy, chunk: LogChunk) -> tuple[Sums, list[OutOfRange]]:
        run = replay_chunk(policy, chunk)
        return sums_to_score(run, clock), [] if model is None else model.outside(steps_of(run))

    for policy in policies.values():
        check_replayable(policy)
    with progress("positions", log.num_positions):
        parts = list(map_policies(log, [*policies.values()], work))
    sums, outside = [], {}
    for label, of_policy in zip(policies, zip(*parts, strict=True), strict=True):
        sums.append(join_sums(of for of, _ in of_policy))
        outside[label] = warn_outside(label, [far for _, far in of_policy])
    facts["outside_clock"] = {label: of for label, of in outside.items() if of} or None
    found = score(
        [*policies],
        [*policies.values()],
        sums,
        baseline=config.baseline - 1,
        time_error=facts["time_error"],
        seed=config.seed,
    )
    check_keeps_something([*policies.values()], found)
    scores = ReplayScores(kind="replay", **facts, policies=tuple(found))
    return replay_result(scores, remarks, by_category=config.by_category)


def check_keeps_something(policies: Sequence[Policy], scored: Sequence[PolicyScores]) -> None:
    """Refuses a scorer whose beta keeps no draft node of any round."""
    for policy, found in zip(policies, scored, strict=True):
        shape, calls = policy.shape, found.pooled.calls
        if isinstance(shape, ScoredTree) and found.pooled.verified_tokens == calls:
            raise nothing_kept(shape.beta, f"no node in {calls} rounds of these traces")


def serve_policies(
    log: DenseLog,
    policies: Mapping[str, Policy],
    model: AnyCost | None,
    config: ReplayConfig,
    facts: dict[str, Any],
    remarks: Sequence[str] = (),
) -> Result:
    """Simulates policies at a load, in equal shuffled runs or once in the order of the log."""
    with progress("positions", log.num_positions):
        found = submissions_of(log, list(policies.values()))
    prepared = dict(zip(policies, found, strict=True))
    load = Load(
        config.batch_size,
        config.arrival_rate_per_s,
        engine=config.engine,
        in_order=config.in_order,
    )
    facts["load"] = vars(load).copy()
    num_runs, baseline = 1 if config.in_order else NUM_RUNS, facts["baseline"]
    runs: dict[str, list[Simulation]] = {}
    outside: dict[str, tuple[str, ...]] = {}
    with progress("simulated runs", num_runs * len(prepared)):
        for label, of in prepared.items():
            runs[label] = simulate_runs(of, load, model, num_runs=num_runs, seed=config.seed)
            if model is not None:
                outside[label] = warn_outside(label, [model.outside(runs[label][0].steps)])
    facts["outside_clock"] = {label: of for label, of in outside.items() if of} or None
    if config.in_order:
        has_time = model is not None
        totals = [
            totals_of(label, run, runs[baseline][0], has_time=has_time)
            for label, [run] in runs.items()
        ]
        batch = BatchScores(kind="replay-batch", **facts, policies=tuple(totals))
        return totals_result(batch, remarks)
    limit_us = None if config.tpot_limit_ms is None else 1e3 * config.tpot_limit_ms
    figures = [
        figures_of(
            label,
            of,
            baseline=runs[baseline],
            tpot_limit_us=limit_us,
            time_error=facts["time_error"],
            seed=config.seed,
        )
        for label, of in runs.items()
    ]
    scores = ServingScores(kind="replay-serving", **facts, policies=tuple(figures))
    return serving_result(scores, remarks)


def open_cost_model(
    path: Path | None, traces: TraceSet | None, *, force: bool, engine: str = "specctl"
) -> AnyCost | None:
    """The cost model, with a warning for each doubt about it.

    Args:
        traces: None for a server's log; `warn_of_server` has its doubts, once it is read.
        force: accept one that failed its own check, see `check_clock`.
        engine: see `doubts`.
    """
    if path is None:
        return None
    model = load_cost_model(path)
    check_clock(model, force=force)
    if traces is not None:
        _warn(doubts(model, pair=traces.fingerprint, device=processor_name(), engine=engine))
    return model


def warn_of_server(model: CostModel, engine: str, settings: Mapping[str, Sequence[str]]) -> None:
    """A warning for each doubt about a cost model beside a server's log.

    Args:
        settings: `model` and `drafter` as the log's start names them, by path or name.
    """
    if isinstance(model, LinearCost):
        return
    assert isinstance(model, TableCost | EngineCost)
    pair, lines = {"target": model.pair.target, "drafter": model.pair.drafter}, list[str]()
    for role, key in (("target", "model"), ("drafter", "drafter")):
        named = settings.get(key) or settings.get(f"{key} argument")
        if not named:
            lines.append(f"measured for {role} {pair[role]!r}; the log does not name its own")
        elif {Path(name).name for name in named} != {Path(pair[role]).name}:
            lines.append(f"measured for {role} {pair[role]!r}; the log is of {listed(named)}")
    _warn([f"cost model: {line}" for line in lines])
    _warn(doubts(model, device=processor_name(), engine=engine))


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        logger.warning("%s", line)


def require_cost_model(
    path: Path | None, traces: TraceSet, expected: str, *, force: bool, engine: str
) -> AnyCost:
    """The cost model; `UsageError` with the reason without one."""
    model = open_cost_model(path, traces, force=force, engine=engine)
    if model is None:
        raise UsageError(
            f"--cost-model is required: {expected}",
            hint="measure them with `specctl profile`, or name a clock (docs/cost-model.md)",
        )
    return model


def choose_cost(
    path: Path | None, linear: str | None, traces: TraceSet | None, *, force: bool
) -> CostModel:
    """The cost model of a file or of stated rates; see `open_cost_model`.

    Raises:
        UsageError: none or both, unreadable rates, or a flat model.
        InputError: an unreadable file. ClockError: a model that failed its own check.
    """
    if (path is None) == (linear is None):
        raise UsageError(
            "give either --cost-model or --linear, to weigh tokens against time",
            hint="measure one with `specctl profile` and give it with --cost-model",
        )
    if linear is not None:
        return require_slope(parse_linear(linear))
    return require_slope(open_cost_model(path, traces, force=force))
