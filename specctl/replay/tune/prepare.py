"""From opened traces and a configuration to a tuning; whatever is refused is refused here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, sqrt
from pathlib import Path
from typing import Protocol, cast, get_args

from specctl.artifacts.load import load_artifact
from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import TraceEmptyError, UsageError
from specctl.logs.parquet import collected
from specctl.logs.tree_log import DenseLog
from specctl.policy.records import StepCost
from specctl.policy.rules import ShapeRule
from specctl.replay.batch.load import Load
from specctl.replay.batch.timing import Packing
from specctl.replay.cost.model import CostModel, Steps, require_slope
from specctl.replay.labels import ScannedTraces
from specctl.replay.results import facts_of
from specctl.replay.run import open_cost_model
from specctl.replay.tune.candidates import Conditions
from specctl.replay.tune.families import Family, parse_families
from specctl.replay.tune.race import Race
from specctl.replay.tune.tuning import TuneConfig, Tuning
from specctl.stats import Split, split_prompts

NUM_RUNS = 12
"""Simulated runs behind a finalist's figures; a bootstrap over fewer is too narrow."""
FEWEST_PROMPTS = 8
"""On either side of the split: with fewer, an interval by prompt says little."""
ONE_IN_20 = 1.645
"""Standard deviations below the mean of a normal law beyond which one draw in 20 lies."""


class PairTraces(ScannedTraces, Protocol):
    """A trace set that knows its pair."""

    @property
    def fingerprint(self) -> PairFingerprint: ...


def check_packing(word: str) -> Packing:
    """One of `Packing`.

    Raises:
        UsageError: another word.
    """
    for known in get_args(Packing):
        if word == known:
            return cast(Packing, known)
    raise UsageError(
        "--packing", expected=" or ".join(get_args(Packing)), found=repr(word), fix="name one"
    )


def prepare(
    traces: PairTraces,
    config: TuneConfig,
    cost_model: Path | None,
    *,
    num_threads: int = 1,
    warn: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Opens everything and refuses what cannot be tuned.

    Raises:
        UsageError: no cost model, or a flat one where a budget weighs tokens against it; a
            batch that it was not measured for; a family or setting that is not known, or wholly
            outside the log. TraceEmptyError: too few prompts.
        TraceError, InputError, ArtifactError: see `specctl.errors`.
    """
    log = DenseLog.open(traces)
    model = open_cost_model(_named(cost_model), traces, warn)
    assert model is not None, "a path was named"
    families = parse_families(config.families, config.grids, traces.fingerprint)
    if any(family.is_shared for family in families):
        require_slope(model)
    contexts = _contexts(traces)
    split = _split(list(contexts), config)
    context_tokens = _mean_context(contexts, split.train)
    _check_load(model, config.load.batch_size, context_tokens)
    conditions = Conditions(
        pair=traces.fingerprint,
        support=log.support,
        batch_size=config.load.batch_size,
        step_costs=lambda rule: _step_cost(model, config.load.batch_size, context_tokens, rule),
    )
    race = Race(
        families=tuple(families),
        conditions=conditions,
        split=split,
        objective=config.objective,
        factor=config.factor,
        seed=config.seed,
        drops_unsupported=config.drops_unsupported,
        num_runs=NUM_RUNS if _is_simulated(config.load, families) else 1,
    )
    for line in _shared_prompts(families, log, config):
        warn(line)
    facts, num_scorings = facts_of(traces, log, model.digest), race.num_scorings
    return Tuning(config, facts, log, model, race, num_threads, num_scorings)


def _is_simulated(load: Load, families: Sequence[Family]) -> bool:
    """Whether requests can meet, or a budget must be asked of a batch."""
    shared = any(family.is_shared for family in families)
    return load.batch_size > 1 or not load.is_closed or shared


def _named(cost_model: Path | None) -> Path:
    if cost_model is None:
        raise UsageError(
            "--cost-model",
            expected="the times to tune for",
            found="none",
            fix="measure them with `specctl profile`, or write a linear form by hand",
        )
    return cost_model


def _contexts(traces: ScannedTraces) -> dict[str, tuple[int, int]]:
    """Of every prompt that has positions: their number and the sum of their contexts, tokens."""
    import polars as pl

    totals = collected(
        traces.scan("rounds")
        .group_by(pl.col("prompt_id").cast(pl.String))
        .agg(pl.len(), pl.col("context_tokens").cast(pl.Int64).sum())
        .sort("prompt_id")
    )
    return {name: (num, tokens) for name, num, tokens in totals.iter_rows()}


def _mean_context(contexts: dict[str, tuple[int, int]], prompts: Sequence[str]) -> float:
    """Cached tokens at a position, mean over those of some prompts; the root is not cached yet."""
    numbers, tokens = zip(*(contexts[name] for name in prompts), strict=True)
    return float(sum(tokens) / sum(numbers)) - 1


def _split(names: Sequence[str], config: TuneConfig) -> Split:
    share = config.held_out_frac
    if not 0 < share < 1:
        raise UsageError(
            "--held-out", expected="a share between 0 and 1", found=str(share), fix="correct it"
        )
    if len(names) >= 2 * FEWEST_PROMPTS:
        split = split_prompts(names, held_out_frac=share, seed=config.seed)
        if min(len(split.train), len(split.held_out)) >= FEWEST_PROMPTS:
            return split
        found = f"{len(split.train)} and {len(split.held_out)}"
    else:
        found = f"{len(names)} in all"
    raise TraceEmptyError(
        "split by prompt",
        expected=f"{FEWEST_PROMPTS} prompts or more to choose on, and as many to report on",
        found=found,
        fix=f"collect {_enough_prompts(share)} prompts in all, or change --held-out, now {share:g}",
    )


def _enough_prompts(share: float) -> int:
    """Prompts of which 19 splits in 20 leave enough on either side: chance holds them out.

    From n q - 1.64 sqrt(n q (1 - q)) >= FEWEST_PROMPTS for the smaller share q.
    """
    rarer = min(share, 1 - share)
    spread = ONE_IN_20 * sqrt(rarer * (1 - rarer))
    return ceil(((spread + sqrt(spread**2 + 4 * rarer * FEWEST_PROMPTS)) / (2 * rarer)) ** 2)


def _check_load(model: CostModel, batch_size: int, context_tokens: float) -> None:
    """Refuses a batch or a drafter that was not measured, before anything is read."""
    model.round_us(Steps(batch_size, 2 * batch_size, context_tokens, 1, 1, 1))


def _step_cost(
    model: CostModel, batch_size: int, context_tokens: float, rule: ShapeRule
) -> StepCost:
    """Whole rounds of a full batch, at the mean context of the training prompts."""
    return model.step_cost(
        batch_size,
        context_tokens,
        levels=rule.max_depth,
        level_width=rule.width,
        max_tokens=batch_size * rule.max_tokens,
    )


def _shared_prompts(families: Sequence[Family], log: DenseLog, config: TuneConfig) -> list[str]:
    """A line for each artifact that was fitted on prompts which are held out here.

    With one seed the smaller held-out side lies within the larger one (`splits.split_prompts`).
    """
    lines = []
    for family in families:
        manifest = load_artifact(family.shape).manifest if family.artifact else None
        if manifest is None or manifest.evidence is None or manifest.fit is None:
            continue
        seed, share = manifest.fit.get("seed"), manifest.fit.get("held_out_frac")
        apart = seed == config.seed and isinstance(share, float) and share >= config.held_out_frac
        if manifest.evidence.trace_digest == log.digest and not apart:
            lines.append(
                f"--family {family.name}: fitted on some of the prompts held out here, which "
                f"flatters it; give --seed {seed} --held-out {share}, as it was fitted"
            )
    return lines
