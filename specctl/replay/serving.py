"""`specctl replay` on dense traces at a load: policies that serve a batch, simulated and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specctl.artifacts.manifest import PairFingerprint
from specctl.logs.parquet import collected
from specctl.logs.trace_columns import Traces
from specctl.logs.tree_log import DenseLog
from specctl.policy.build import build_shape
from specctl.policy.costs import StepCost
from specctl.policy.records import Shape
from specctl.replay.batch import (
    BatchFigures,
    Load,
    Simulation,
    compare_runs,
    figures_of,
    simulate_runs,
    submissions_of,
)
from specctl.replay.config import ReplayConfig, ShowProgress, no_progress
from specctl.replay.cost.model import CostModel
from specctl.replay.results import Caption, caption_of, facts_of
from specctl.runtime.policy_spec import NamedPolicy, resolve_policies
from specctl.stats import Interval

if TYPE_CHECKING:  # slow to import
    import polars as pl

NUM_RUNS = 8
"""Independent orders of the requests, and of their arrivals, behind an interval."""


class ServedTraces(Traces, Protocol):
    """A trace set that knows its pair and whose rows can be read."""

    @property
    def fingerprint(self) -> PairFingerprint: ...

    def num_rows(self, table: str) -> int: ...

    def scan(self, table: str) -> pl.LazyFrame: ...


@dataclass(frozen=True)
class Served:
    """One policy under the load; `against` the baseline, None where a run is never steady."""

    figures: BatchFigures
    against: dict[str, Interval] | None

    def to_json(self) -> dict[str, Any]:
        paired = self.against
        plain = None if paired is None else {name: span.to_json() for name, span in paired.items()}
        return {**self.figures.to_json(), "against": plain}


@dataclass(frozen=True)
class ServingResult:
    """Figures of several policies that serve one load.

    Attributes:
        facts: pair, log, support, sampling, cost model; plain JSON values.
        baseline: label of the policy that the others are compared with.
    """

    facts: dict[str, Any]
    caption: Caption
    load: Load
    baseline: str
    policies: tuple[Served, ...]

    def to_json(self) -> dict[str, Any]:
        policies = [policy.to_json() for policy in self.policies]
        head = {"kind": "replay-serving", **self.facts, "load": vars(self.load).copy()}
        return {**head, "baseline": self.baseline, "policies": policies}

    @property
    def is_steady(self) -> bool:
        """Every policy has figures without ramp-up and drain, so these are shown."""
        return all(policy.figures.steady is not None for policy in self.policies)

    def shown(self) -> list[Any]:
        """The table, then notes."""
        from rich.text import Text

        return [self._table(), *(Text(line) for line in self._notes())]

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self._title()), title_justify="left")
        table.add_column("policy", overflow="fold")
        columns = {name: column for name, column in COLUMNS.items() if self._has(name)}
        for heading, _ in columns.values():
            table.add_column(heading, justify="right", min_width=len(heading))
        table.add_column("support", justify="right")
        for policy in self.policies:
            found = self._found(policy)
            cells = [write(found[name]) for name, (_, write) in columns.items()]
            mark = "*" if policy.figures.is_marked else ""
            support = f"{policy.figures.expansion_support:.2%}"
            table.add_row(Text(policy.figures.policy + mark), *cells, support)
        return table

    def _has(self, name: str) -> bool:
        return name in self._found(self.policies[0])

    def _found(self, policy: Served) -> dict[str, Interval]:
        """Figures by name; those against the baseline as `× name`."""
        figures = policy.figures.steady if self.is_steady else policy.figures.whole
        paired = {f"× {name}": span for name, span in (policy.against or {}).items()}
        return {**(figures or {}), **paired}

    def _title(self) -> str:
        first, load = self.policies[0].figures, self.load
        arrivals = "closed loop" if load.is_closed else f"{load.arrival_rate_per_s:g} requests/s"
        return (
            f"{self.caption.subject}: batch size {load.batch_size}, {arrivals}, {first.num_runs} "
            f"runs of {first.num_requests} requests, {self.caption.sampling}; 95% intervals by run"
        )

    def _notes(self) -> list[str]:
        part = "without ramp-up and drain" if self.is_steady else "with ramp-up and drain"
        marked = [p.figures for p in self.policies if p.figures.is_marked]
        return [
            f"Simulated under the cost model, {part}; trees of a batch verified back to back.",
            f"× is tokens/s relative to {self.baseline}, paired by run; times are in ms, verified "
            "and batch are tokens and requests of a step.",
            *(
                f"* {f.policy}: the log holds {f.expansion_support:.1%} of its expansions and "
                f"{f.censored_share:.1%} of its rounds run out of it. {self.caption.advice}"
                for f in marked
            ),
        ]


def _span(interval: Interval) -> str:
    return f"{interval.value:.0f} [{interval.low:.0f}, {interval.high:.0f}]"


def _ratio(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _milliseconds(interval: Interval) -> str:
    return f"{interval.value / 1e3:.2f}"


def _number(interval: Interval) -> str:
    return f"{interval.value:.2f}"


def _share(interval: Interval) -> str:
    return f"{interval.value:.0%}"


COLUMNS: dict[str, tuple[str, Callable[[Interval], str]]] = {
    "tokens_per_s": ("tokens/s", _span),
    "× tokens_per_s": ("×", _ratio),
    "tpot_p50_us": ("TPOT p50", _milliseconds),
    "tpot_p99_us": ("p99", _milliseconds),
    "ttft_p50_us": ("TTFT p50", _milliseconds),
    "goodput_share": ("good", _share),
    "mean_acceptance_length": ("τ", _number),
    "verified_per_step": ("verified", _number),
    "requests_per_step": ("batch", _number),
}
"""Heading of each figure that is shown, and how it is written."""


def serve_policies(
    traces: ServedTraces,
    config: ReplayConfig,
    model: CostModel,
    *,
    progress: ShowProgress = no_progress,
) -> ServingResult:
    """Simulates every policy under the same requests.

    A budget that weighs tokens against time and brings no table of its own is given the model's,
    for whole rounds of a full batch at the log's mean context.

    Raises:
        UsageError: a lossy policy, a flat cost model where a budget needs it, a batch that it
            does not know, or a load out of range. TraceError, ArtifactError: see the errors.
    """
    log, load = DenseLog.open(traces), Load(config.batch_size, config.arrival_rate_per_s)
    named = _resolved(traces, config, model)
    with progress("positions", traces.num_rows("rounds")) as tick:
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
    served = _figures(runs, baseline, config)
    return ServingResult(facts, caption_of(facts), load, baseline, served)


def _figures(
    runs: Mapping[str, list[Simulation]], baseline: str, config: ReplayConfig
) -> tuple[Served, ...]:
    limit_us = None if config.tpot_limit_ms is None else 1e3 * config.tpot_limit_ms
    figures = {
        label: figures_of(label, found, tpot_limit_us=limit_us, seed=config.seed)
        for label, found in runs.items()
    }
    is_steady = {label: found.steady is not None for label, found in figures.items()}
    return tuple(
        Served(
            figures[label],
            compare_runs(runs[label], runs[baseline], seed=config.seed)
            if is_steady[label] and is_steady[baseline]
            else None,
        )
        for label in runs
    )


def _resolved(traces: ServedTraces, config: ReplayConfig, model: CostModel) -> list[NamedPolicy]:
    """The named policies, each with the step costs of its own shape where it lacks them."""
    context_tokens = _mean_context(traces)

    def step_cost(shape: Shape) -> StepCost:
        rule = build_shape(shape)
        return model.step_cost(
            config.batch_size,
            context_tokens,
            levels=rule.max_depth,
            level_width=rule.width,
            max_tokens=config.batch_size * rule.max_tokens,
        )

    specs = ",".join(config.specs)
    return resolve_policies(specs, traces.fingerprint, step_cost=step_cost)


def _mean_context(traces: ServedTraces) -> float:
    """Cached tokens at a position; the root is not cached yet."""
    import polars as pl

    mean = traces.scan("rounds").select(pl.col("context_tokens").mean())
    return float(collected(mean).item()) - 1
