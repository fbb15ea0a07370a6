"""The cost model of a serving engine, fitted to the step times in its traces.

    rows of rounds ─engine_steps─► steps, each once ─fit_engine─► EngineCost, with its error

The engine's plugin timed every served step and wrote the times into its rows (`step_*` and `*_us`,
docs/trace-format.md). Rates minimise the absolute error relative to the step, so a few slow steps
do not bend them. Such rates give medians; one common factor turns them into means, since a run
takes the sum of its steps. Each run is cut into stretches of time, and some stretches are held out:
neighbouring steps share the machine's other load, so a random split would flatter the fit.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specctl.errors import TraceMismatchError, UsageError
from specctl.formatting import Detail, Table, count, pair_title
from specctl.logs.parquet import collected
from specctl.replay.cost.files import validity
from specctl.replay.cost.model import Floats, Steps
from specctl.replay.cost.rates import (
    STALL,
    EngineCost,
    Span,
    StepError,
    Support,
    dimensions,
    gaps_passed,
)
from specctl.stats import sums_by

if TYPE_CHECKING:
    from specctl.logs.trace_set import TraceSet

GAP = "verify_gap_us"
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


Columns = dict[str, Floats]
"""Steps of an engine, each once, by name: `[S]` each."""


def engine_steps(traces: TraceSet) -> Columns:
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
    tokens, prompt_tokens = pl.col("step_tokens"), pl.col("step_prompt_tokens")
    columns = steps.cast(dict.fromkeys(FIGURES, pl.Float64)).select(
        "batch_size",
        "draft_us",
        "verify_us",
        stretch=place,
        verified=tokens - prompt_tokens,
        prompt_tokens=prompt_tokens,
        cached=pl.col("step_context_tokens") - tokens,
        levels="step_levels",
        host_us=pl.col("policy_us") + pl.col("other_us"),
        total_us=pl.sum_horizontal("draft_us", "verify_us", "policy_us", "other_us"),
    )
    return {column.name: column.to_numpy() for column in columns}


def counts_of(steps: Columns) -> Steps:
    """The steps in the form of a cost model."""
    return Steps(
        batch_size=steps["batch_size"],
        num_tokens=steps["verified"] + steps["prompt_tokens"],
        context_tokens=steps["cached"] / steps["batch_size"],
        levels=steps["levels"],
        level_width=1,
        num_emitted=1,
        prompt_tokens=steps["prompt_tokens"],
    )


def fit_engine(traces: TraceSet) -> EngineCost:
    """The cost model of the engine that wrote these traces.

    Raises:
        TraceMismatchError: traces of specctl's own loop, or of several engines or machines.
        UsageError: too few steps.
    """
    facts = _one_engine(traces)
    steps = engine_steps(traces)
    is_held = np.isin(steps["stretch"], HELD_OUT)
    if len(is_held) < MIN_STEPS or not is_held.any():
        raise UsageError(
            f"a fit needs at least {MIN_STEPS} steps of the engine; these traces hold "
            f"{len(is_held)}",
            hint="log more requests, at every load that matters",
        )
    used, held = ({n: of[rows] for n, of in steps.items()} for rows in (~is_held, is_held))
    facts |= {"pair": traces.fingerprint, "traces_digest": traces.digest}
    return fit_rates(rate_counts(used, used["levels"] > 0), used, held, facts)


def rate_counts(
    steps: Columns, reads_prompts: NDArray[np.bool_], *, sizes: Floats | None = None
) -> dict[str, Columns]:
    """Of each part of a step's time, the counts of its rates.

    Args:
        reads_prompts: `[S]`, the drafter reads the step's prompt tokens.
        sizes: see `EngineCost.verify_sizes`; None for one rate a token.
    """
    tokens = {"verify_token_us": steps["verified"]}
    if sizes is not None:
        passed = gaps_passed(sizes, steps["verified"])
        tokens = {f"{GAP} {number}": of for number, of in enumerate(passed.T)}
    batch, prompt, levels = steps["batch_size"], steps["prompt_tokens"], steps["levels"]
    one = np.ones_like(batch)
    return {
        "verify_us": {
            "verify_fixed_us": one,
            "verify_request_us": batch,
            **tokens,
            "verify_prompt_token_us": prompt,
            "verify_cached_token_us": steps["cached"],
        },
        "draft_us": {
            "draft_fixed_us": (levels > 0).astype(np.float64),
            "draft_prompt_token_us": reads_prompts * prompt,
            "level_us": levels,
            "level_request_us": levels * batch,
        },
        "host_us": {"host_us": one, "host_request_us": batch},
    }


def fit_rates(
    by_part: dict[str, Columns], used: Columns, held: Columns, facts: dict[str, Any]
) -> EngineCost:
    """The cost model of steps, with its error at held-out ones.

    Args:
        by_part: of each time in `used`, the counts of its rates. facts: other fields.
    """
    total_us = used["total_us"]
    rates, fitted_us = dict[str, Any](), np.zeros_like(total_us)
    for part, columns in by_part.items():
        table = np.column_stack(list(columns.values()))
        of_part = least_absolute(table, used[part], total_us).round(4)
        fitted_us += table @ of_part
        rates |= dict(zip(columns, of_part.tolist(), strict=True))
    gaps = [rates.pop(name) for name in [*rates] if name.startswith(GAP)]
    if gaps:  # beyond the last size, the slope from the middle one on
        sizes, half = facts["verify_sizes"], len(gaps) // 2
        rates["verify_token_us"] = sum(gaps[half:]) / (sizes[-1] - sizes[half])
    is_stall = total_us > STALL * fitted_us
    goes_on = ~is_stall & (used["verified"] > 0)  # prompts alone are no rounds
    factor = round(float(total_us[goes_on].sum() / fitted_us[goes_on].sum()), 4)
    ranges = {
        name: Span(low=float(np.min(values)), high=float(np.max(values)))
        for name, (_, values) in dimensions(counts_of(used)).items()
    }
    measured, expires = validity(datetime.now(UTC))
    zeros = dict.fromkeys(("median", "p90", "total", "by_length"), 0.0)
    model = EngineCost(
        cost_model_version=1,
        **facts,
        measured=measured,
        expires=expires,
        num_steps=len(total_us),
        num_prompt_steps=int((used["prompt_tokens"] > 0).sum()),
        num_stalls=int(is_stall.sum()),
        mean_over_median=factor,
        **{name: round(rate * factor, 4) for name, rate in rates.items()},
        verify_gap_us=tuple(round(gap * factor, 4) for gap in gaps),
        support=Support(**ranges),
        held_out=StepError(num_steps=len(held["levels"]), **zeros),  # the next line's
    )
    return model.model_copy(update={"held_out": step_error(model, held)})


def step_error(model: EngineCost, steps: Columns) -> StepError:
    """The error of a model at held-out steps; total and means leave stalls out, as they fall by
    chance."""
    predicted_us, measured_us = model.round_us(counts_of(steps)), steps["total_us"]
    error = np.abs(predicted_us - measured_us) / measured_us
    median, p90 = np.quantile(error, (0.5, 0.9)).tolist()
    goes_on = measured_us <= STALL * predicted_us
    if not goes_on.any():
        goes_on = ~goes_on
    _, length = np.unique(steps["levels"][goes_on], return_inverse=True)
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
    """The fields of `EngineCost` on the one engine behind all traces."""
    first = dict[str, str]()  # of each engine, the first part of the set
    for part in traces.parts:
        collect: dict[str, Any] = part.header.collect
        engine, domain = collect.get("engine") or {}, collect.get("domain") or {}
        facts = {
            "engine": engine.get("name"),
            "engine_version": engine.get("version"),
            "dtype": domain.get("dtype"),
            "device": ", ".join(domain.get("hardware") or ["unknown hardware"]),
        }
        own = "rounds of specctl's own loop"
        words = own if facts["engine"] is None else " ".join(map(str, facts.values()))
        first.setdefault(words, part.place.name)
    if len(first) > 1 or facts["engine"] is None:
        raise TraceMismatchError(
            "a fit takes traces of one engine, version, dtype and machine; "
            + ", ".join(f"{name} holds {words}" for words, name in first.items()),
            hint="log inside the engine with its plugin, and fit to each engine by itself",
        )
    return facts


def render_engine(model: EngineCost) -> list[Any]:
    """Rates, range and held-out error."""
    rates = {name: of for name, of in model if name.endswith("_us") and name != GAP}
    gaps = zip(pairwise(model.verify_sizes), model.verify_gap_us, strict=True)
    rates |= {f"verify {low} to {high} tokens": us for (low, high), us in gaps}
    table: Any = Table(
        f"{pair_title(model.pair.target, model.pair.drafter)}\n"
        f"us of a step of {model.engine} {model.engine_version}, {model.dtype}, {model.device}",
        ("rate", "us"),
        [(name.removesuffix("_us"), f"{us:.4g}") for name, us in rates.items()],
    )
    error = model.held_out
    return [
        f"{count(error.num_steps, 'held-out step')}: off by {error.total:+.1%} in the whole time.",
        table,
        f"error of a step: median {error.median:.1%}, p90 {error.p90:.1%}; by draft length "
        f"{error.by_length:.1%}",
        f"range: {model.support}",
        Detail(
            f"{model.num_steps} steps, {model.num_prompt_steps} with prompts, {model.num_stalls} "
            "stalls"
        ),
        *(
            ["Measure again on a quiet machine: no verdict rests on this without --force."]
            if model.failed_check
            else []
        ),
    ]
