"""The cost model of a serving engine, fitted to the step times in its traces.

    rows of rounds ─engine_steps─► steps, each once ─fit_engine─► EngineCost, with its error

The engine's plugin timed every served step and wrote the times into its rows (`step_*` and `*_us`,
docs/trace-format.md). Rates minimise the absolute error relative to the step, so a few slow steps
do not bend them. Such rates give medians; one common factor turns them into means, since a run
takes the sum of its steps. Each run is cut into stretches of time, and some stretches are held out:
neighbouring steps share the machine's other load, so a random split would flatter the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specctl.errors import TraceMismatchError, UsageError
from specctl.formatting import Table
from specctl.logs.parquet import collected
from specctl.replay.cost.files import validity
from specctl.replay.cost.model import Floats, Steps
from specctl.replay.cost.rates import STALL, EngineCost, Span, StepError, Support
from specctl.stats import sums_by

if TYPE_CHECKING:
    from specctl.logs.trace_set import TraceSet

MIN_STEPS = 50
"""Fewest different steps for a fit."""
STRETCHES, HELD_OUT = 10, (2, 7)
"""Stretches of time of each run, and the held-out ones."""
ROUNDS_OF_FIT = 50
"""Rounds of reweighting; rates settle to a thousandth within twenty."""
FIGURES = (
    *("batch_size", "step_tokens", "step_prompt_tokens", "step_context_tokens", "step_levels"),
    *("draft_us", "verify_us", "policy_us", "other_us"),
)


@dataclass(frozen=True)
class EngineSteps:
    """Steps of an engine, each once; `[S]` each."""

    stretch: NDArray[np.int64]  # of its run's time, 0 to `STRETCHES` - 1
    batch_size: Floats
    tokens: Floats  # over the batch, roots and prompts counted
    prompt_tokens: Floats  # of prompts among them
    cached: Floats  # over the batch, before the step
    levels: Floats
    # verify_us, draft_us, host_us: the parts of its time
    verify_us: Floats
    draft_us: Floats
    host_us: Floats

    @property
    def total_us(self) -> Floats:
        """`[S]`."""
        return self.verify_us + self.draft_us + self.host_us

    def counts(self) -> Steps:
        """The steps in the form of a cost model."""
        return Steps(
            batch_size=self.batch_size,
            num_tokens=self.tokens,
            context_tokens=self.cached / self.batch_size,
            levels=self.levels,
            level_width=1,
            num_emitted=1,
            prompt_tokens=self.prompt_tokens,
        )

    def at(self, rows: NDArray[np.bool_]) -> EngineSteps:
        return EngineSteps(**{name: values[rows] for name, values in vars(self).items()})


def engine_steps(traces: TraceSet) -> EngineSteps:
    """The steps of a set's rows, by the engine's run (the first part of a request's id) and the
    number of the step."""
    import polars as pl

    run = pl.col("request_id").cast(pl.String).str.replace("-[^-]*$", "").alias("run")
    rows = traces.scan("rounds").filter(pl.col("step_idx").is_not_null())
    grouped = rows.group_by(run, "step_idx").agg(
        *(pl.col(name).first() for name in FIGURES),
        same=pl.all_horizontal(pl.col(FIGURES).n_unique() == 1),
    )
    steps = collected(grouped).sort("run", "step_idx")
    if not steps["same"].all():
        wrong = steps.filter(~pl.col("same")).row(0, named=True)
        raise TraceMismatchError(
            f"step {wrong['step_idx']} of run {wrong['run']} has different figures in its rows",
            hint="fit to each set by itself, to find the damaged one",
        )
    place = pl.int_range(pl.len()).over("run") * STRETCHES // pl.len().over("run")
    steps = steps.with_columns(stretch=place)
    columns = {n: steps[n].cast(pl.Float64).to_numpy() for n in FIGURES}
    return EngineSteps(
        stretch=steps["stretch"].cast(pl.Int64).to_numpy(),
        batch_size=columns["batch_size"],
        tokens=columns["step_tokens"],
        prompt_tokens=columns["step_prompt_tokens"],
        cached=columns["step_context_tokens"] - columns["step_tokens"],
        levels=columns["step_levels"],
        verify_us=columns["verify_us"],
        draft_us=columns["draft_us"],
        host_us=columns["policy_us"] + columns["other_us"],
    )


def fit_engine(traces: TraceSet) -> EngineCost:
    """The cost model of the engine that wrote these traces.

    Raises:
        TraceMismatchError: traces of specctl's own loop, or of several engines or machines.
        UsageError: too few steps.
    """
    facts = _one_engine(traces)
    steps = engine_steps(traces)
    is_held = np.isin(steps.stretch, HELD_OUT)
    used, held = steps.at(~is_held), steps.at(is_held)
    if len(used.stretch) + len(held.stretch) < MIN_STEPS or not is_held.any():
        raise UsageError(
            f"a fit needs at least {MIN_STEPS} steps of the engine; these traces hold "
            f"{len(steps.stretch)}",
            hint="log more requests, at every load that matters",
        )
    measured, expires = validity(datetime.now(UTC))
    one, drafts = np.ones(len(used.stretch)), (used.levels > 0).astype(np.float64)
    by_part = {
        "verify_us": {
            "verify_fixed_us": one,
            "verify_request_us": used.batch_size,
            "verify_token_us": used.tokens - used.prompt_tokens,
            "verify_prompt_token_us": used.prompt_tokens,
            "verify_cached_token_us": used.cached,
        },
        "draft_us": {
            "draft_fixed_us": drafts,
            "draft_prompt_token_us": drafts * used.prompt_tokens,
            "level_us": used.levels,
            "level_request_us": used.levels * used.batch_size,
        },
        "host_us": {"host_us": one, "host_request_us": used.batch_size},
    }
    rates: dict[str, Any] = {}
    for part, columns in by_part.items():
        table = np.column_stack(list(columns.values()))
        found_rates = least_absolute(table, getattr(used, part), used.total_us)
        rates |= dict(zip(columns, found_rates.round(4).tolist(), strict=True))
    counts = used.counts()
    spans = {
        "batch_size": used.batch_size,
        "tokens_per_request": (used.tokens - used.prompt_tokens) / used.batch_size,
        "levels": used.levels,
        "context_tokens": counts.context_tokens,
        "prompt_tokens": used.prompt_tokens,
    }
    zeros = dict.fromkeys(("median", "p90", "total", "by_length"), 0.0)
    unknown = StepError(num_steps=len(held.stretch), **zeros)
    model_of = partial(
        EngineCost,
        cost_model_version=1,
        engine=facts["engine"],
        engine_version=facts["version"],
        device=facts["device"],
        dtype=facts["dtype"],
        pair=traces.fingerprint,
        traces_digest=traces.digest,
        measured=measured,
        expires=expires,
        num_steps=len(used.stretch),
        num_prompt_steps=int((used.prompt_tokens > 0).sum()),
        support=Support(
            **{n: Span(low=float(np.min(v)), high=float(np.max(v))) for n, v in spans.items()}
        ),
        held_out=unknown,
    )
    fitted = model_of(**rates, num_stalls=0, mean_over_median=1.0).round_us(counts)
    is_stall = used.total_us > STALL * fitted
    factor = round(float(used.total_us[~is_stall].sum() / fitted[~is_stall].sum()), 4)
    means = {name: round(rate * factor, 4) for name, rate in rates.items()}
    model = model_of(**means, num_stalls=int(is_stall.sum()), mean_over_median=factor)
    return model.model_copy(update={"held_out": step_error(model, held)})


def step_error(model: EngineCost, steps: EngineSteps) -> StepError:
    """The error of a model at held-out steps; total and means leave stalls out, as they fall by
    chance."""
    predicted_us, measured_us = model.round_us(steps.counts()), steps.total_us
    error = np.abs(predicted_us - measured_us) / measured_us
    median, p90 = np.quantile(error, (0.5, 0.9)).tolist()
    goes_on = measured_us <= STALL * predicted_us
    if not goes_on.any():
        goes_on = ~goes_on
    _, length = np.unique(steps.levels[goes_on], return_inverse=True)
    sums = sums_by(length, length.max() + 1, [predicted_us[goes_on], measured_us[goes_on]])
    off = np.abs(sums[:, 0] / sums[:, 1] - 1)
    return StepError(
        num_steps=len(error),
        median=median,
        p90=p90,
        total=float(sums[:, 0].sum() / sums[:, 1].sum()) - 1,
        by_length=float(np.average(off, weights=np.bincount(length))),
    )


def least_absolute(table: Floats, values: Floats, scale: Floats) -> Floats:
    """Non-negative rates `[F]` of least Σ |table · rates - values| / scale, by reweighted least
    squares.

    Args:
        table: `[S, F]` counts of each step. values: `[S]`, its times. scale: `[S]`, above 0.
    """
    from scipy.optimize import nnls

    size = np.maximum(np.abs(table).max(0), 1e-12)
    weight, rates = 1 / scale, np.zeros(table.shape[1])
    for _ in range(ROUNDS_OF_FIT):
        # Q is orthogonal, so R and Qᵀy have the same minimum and F rows instead of S.
        q, r = np.linalg.qr(table / size * weight[:, None])
        rates = nnls(r, q.T @ (values * weight))[0]
        residual = np.abs(table / size @ rates - values) / scale
        weight = 1 / (scale * np.sqrt(np.maximum(residual, 1e-4)))
    return np.asarray(rates / size, np.float64)


def _one_engine(traces: TraceSet) -> dict[str, Any]:
    """The one engine behind all traces."""
    engines = {part.place.name: _engine_of(part.header.collect) for part in traces.parts}
    name, facts = next(iter(engines.items()))
    for other, found in engines.items():
        if found != facts or facts["engine"] is None:
            raise TraceMismatchError(
                "a fit takes traces of one engine, version, dtype and machine; "
                f"{other} holds {_in_words(found)}"
                + (f", {name} holds {_in_words(facts)}" if found != facts else ""),
                hint="log inside the engine with its plugin, and fit to each engine by itself",
            )
    return facts


def _engine_of(collect: dict[str, Any]) -> dict[str, Any]:
    engine, domain = collect.get("engine") or {}, collect.get("domain") or {}
    return {
        "engine": engine.get("name"),
        "version": engine.get("version"),
        "dtype": domain.get("dtype"),
        "device": ", ".join(domain.get("hardware") or ["unknown hardware"]),
    }


def _in_words(facts: dict[str, Any]) -> str:
    if facts["engine"] is None:
        return "rounds of specctl's own loop"
    return " ".join(str(value) for value in facts.values())


# ----------------------------------------------------------------- summary


def engine_summary(model: EngineCost, out: Path) -> dict[str, Any]:
    """The model as plain values."""
    return {"out": str(out), "digest": model.digest, **model.model_dump(mode="json")}


def render_engine(model: EngineCost, out: Path) -> Any:
    """A rich group: rates, range, held-out error and file."""
    from rich.console import Group

    names = [name for name in EngineCost.model_fields if name.endswith("_us")]
    table: Any = Table(
        f"us of a step of {model.engine} {model.engine_version}; {model.pair.target} + "
        f"{model.pair.drafter}, {model.dtype}, {model.device}; {model.num_steps} steps, "
        f"{model.num_prompt_steps} with prompts, {model.num_stalls} stalls",
        ("rate", "us"),
        [(name.removesuffix("_us"), f"{getattr(model, name):.4g}") for name in names],
    )
    error = model.held_out
    lines = [
        f"error at {error.num_steps} held-out steps: median {error.median:.1%}, "
        f"p90 {error.p90:.1%}; of their whole time {error.total:+.1%}, by draft length "
        f"{error.by_length:.1%}",
        f"range: {model.support}",
        f"wrote {out}  {model.digest}  expires {model.expires}",
    ]
    return Group(table, *lines)
