"""`specctl tune` and `fit auto`: from opened traces and a configuration to a verdict.

prepare      log, clock, families (`candidates.py`), split; refuses before anything is scored
Tuning.run   `search.py` chooses on training prompts, and compares the finalists on held-out
             ones, by the sums of `evaluators.py`; `verdict.py` holds the standings and their words
publish      the chosen policy as an artifact with its evidence
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specctl.artifacts import (
    Artifact,
    Domain,
    Evidence,
    Metric,
    Origin,
    PairFingerprint,
    SplitSize,
    save_artifact,
)
from specctl.artifacts import card as cards
from specctl.artifacts.card import cell
from specctl.artifacts.manifest import Range, prompt_marks
from specctl.durable import write_whole
from specctl.errors import OutputError, SpecctlError, TraceEmptyError
from specctl.logs.parquet import collected
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, sampled
from specctl.policy import Policy, Shape, StepCost, build_shape
from specctl.policy.families import parse_policy
from specctl.policy.rules import is_fixed
from specctl.progress import progress
from specctl.records import canonical_json, json_bytes
from specctl.replay.batch_simulation import Load
from specctl.replay.config import Engine, TuneConfig
from specctl.replay.cost.files import decision_facts, warn_outside
from specctl.replay.cost.model import CostModel, Steps, require_slope
from specctl.replay.cost.rates import LinearCost
from specctl.replay.facts import to_time
from specctl.replay.held_out import split_and_choose
from specctl.replay.llamacpp import log_of_engine
from specctl.replay.results import facts_of
from specctl.replay.run import require_cost_model
from specctl.replay.tune.candidates import Conditions, PolicyCandidate, parse_families
from specctl.replay.tune.contexts import lengths_by_context
from specctl.replay.tune.evaluators import FIGURES, Evaluator, LogEvaluator, make_objective
from specctl.replay.tune.search import TuneSearch
from specctl.replay.tune.verdict import (
    COLUMNS,
    POLICY_FOLDER,
    RESULT_NAME,
    FitOutcome,
    Standing,
    TunedLoad,
    TuneResult,
    result_table,
    tune_notes,
)
from specctl.runtime.words import NamedPolicy
from specctl.stats import CONFIDENCE, MIN_PROMPTS, Interval

logger = logging.getLogger(__name__)
NUM_RUNS = 12
"""Simulated runs behind a finalist's figures; a bootstrap over fewer runs is too narrow."""
EXACT = (
    "One request at a time: counts are exact, times are the cost model's and of rounds alone, "
    "without the reading of prompts."
)
SIMULATED = (
    "Batches are simulated ({packing}, seed {seed}{of}): the same requests in the same order for "
    "every setting, from the first to the last with ramp-up and drain; a step's time is shared "
    "equally by its requests. Finalists ran in {num_runs} orders; intervals resample prompts and "
    "runs."
)


@dataclass(frozen=True)
class Tuned:
    """A result and the chosen setting."""

    result: TuneResult
    chosen: PolicyCandidate
    fitted_on: str  # `prompt_marks` of the prompts that the choice and its artifact's fit used


@dataclass(frozen=True)
class Tuning:
    """A search after all early checks."""

    search: TuneSearch
    evaluator: LogEvaluator
    conditions: dict[str, Any]  # fields of the result that are known before the search
    cached_tokens: float  # mean context of the training prompts, without the root
    clock: CostModel | None  # of decisions; None where the engine decides by itself
    adaptive: Mapping[str, tuple[Policy, str]]
    """By family a policy that has its rule, and words for it as `profile --policy` takes them."""

    def run(self, evaluate: Evaluator | None = None) -> Tuned:
        """Runs the search; minutes, most of them for static settings.

        Args:
            evaluate: in place of the log's evaluator.
        """
        torch.set_num_threads(1)  # chunks are the parallelism
        with progress("settings", self.search.num_scorings):
            verdict, chosen = self.search.run(evaluate or self.evaluator)
        self._warn_outside(verdict.policies)
        trained = [one.policy for one in verdict.policies if one.family in self.search.barred]
        conditions = self.conditions | {
            **decision_facts(
                self.clock,
                {
                    one.policy: self.adaptive[one.family]
                    for one in verdict.policies
                    if one.family in self.adaptive
                },
            ),
            "scored_on_training_prompts": tuple(trained) or None,
        }
        conditions["by_context"] = lengths_by_context(
            self.evaluator.log, self.evaluator.model, self.search.split, self.search.seed
        )
        result = TuneResult(kind="tune", **(conditions | dict(verdict)))
        families = {family.name: family.artifact for family in self.search.families}
        artifact = families.get(chosen.family)
        evidence = [one.manifest.evidence for _, one in artifact.parts] if artifact else []
        marks = prompt_marks(self.search.split.train, *(e.fitted_on for e in evidence if e))
        return Tuned(result, chosen, marks)

    def _warn_outside(self, finalists: Sequence[Standing]) -> None:
        """Warns of finalists outside the range of the cost model."""
        model, batch = self.evaluator.model, self.search.conditions.batch_size
        for one in finalists:
            rule = build_shape(parse_policy(canonical_json(one.record)).shape)
            # The size of a rule that decides by its drafts is known in replay alone.
            most = rule.max_tokens if is_fixed(rule) else 1
            sizes = (batch, batch * most, self.cached_tokens, rule.max_depth, rule.width, 1)
            warn_outside(one.policy, [model.outside(Steps(*sizes))])


def prepare(
    traces: TraceSet,
    config: TuneConfig,
    cost_model: Path | None,
    *,
    runs: Callable[[Policy], bool] | None = None,
    batching: Engine = "specctl",
    decides: bool = False,
    beside: Sequence[NamedPolicy] = (),
) -> Tuning:
    """Opens log, cost model and families, and checks the search.

    Warnings name doubts about the cost model, and families that cannot win.

    Args:
        runs: whether the engine of the configuration runs a policy; None without one.
        batching: of the simulated load.
        decides: the engine decides by itself, so that times of our decisions say nothing.
        beside: policies that will be compared with the chosen one on the held-out prompts.

    Raises:
        UsageError: no cost model, a flat one under a budget, a batch larger than it knows, or a
            family or setting that is unknown or wholly outside the log.
        TraceEmptyError: too few prompts.
        TraceError, InputError, ArtifactError: see `specctl.errors`.
    """
    import polars as pl

    objective = make_objective(config.objective, config.tpot_limit_ms)
    load = Load(config.batch_size, arrival_rate_per_s=config.arrival_rate_per_s, engine=batching)
    log = sampled(DenseLog.open(traces), config.max_positions, config.seed)
    log = log_of_engine(log, traces, batching)
    model = require_cost_model(
        cost_model,
        traces,
        "settings are tuned for its times",
        force=config.force,
        engine=config.for_engine or "specctl",
    )
    families = parse_families(config.families, config.grids, traces.fingerprint)
    is_shared = any(family.is_shared for family in families)
    if is_shared:
        require_slope(model)
    prompt, context = pl.col("prompt_id").cast(pl.String), pl.col("context_tokens").cast(pl.Int64)
    by_prompt = traces.scan("rounds").group_by(prompt).agg(pl.len(), context.sum())
    contexts = collected(by_prompt.sort("prompt_id"))
    named = [replace(one.artifact, label=one.name) for one in families if one.artifact is not None]
    names = log.prompts or contexts["prompt_id"].to_list()
    if len(names) < 2 * MIN_PROMPTS:
        raise TraceEmptyError(
            f"{len(names)} prompts are too few: {MIN_PROMPTS} are needed to choose on, and as many "
            "to report on",
            hint=f"collect {2 * MIN_PROMPTS} prompts in all",
        )
    split, scored = split_and_choose(names, [*named, *beside], traces, config)
    of_train = contexts.filter(pl.col("prompt_id").is_in(split.train))
    mean = of_train.select(pl.sum("context_tokens") / pl.sum("len")).item()
    cached = float(mean) - 1  # the root is not cached yet
    model.round_us(Steps(load.batch_size, 2 * load.batch_size, cached, 1, 1, 1))  # or refuses

    def step_costs(shape: Shape) -> StepCost:
        """Whole rounds of a full batch, at the mean context of the training prompts."""
        return model.step_cost(build_shape(shape), load.batch_size, cached)

    conditions = Conditions(traces.fingerprint, log.support, load.batch_size, step_costs, runs=runs)
    is_simulated = config.has_load or is_shared
    search = TuneSearch(
        families=tuple(families),
        conditions=conditions,
        split=split,
        objective=objective,
        factor=config.factor,
        seed=config.seed,
        drops_unsupported=config.drops_unsupported,
        num_runs=NUM_RUNS if is_simulated else 1,
        barred=frozenset(scored.trained),
        is_timed=(lambda _: True) if decides else model.times,
        time_error=model.time_error,
    )
    adaptive = {
        one.family: (one.policy, one.family if one.family in search.fitted else one.label)
        for found in search.adaptive(tokens_per_s=1.0)
        for one in found.candidates[:1]
    }
    clock = None if decides else model
    decisions = decision_facts(clock, adaptive)
    if lacking := decisions["without_decision_cost"]:
        logger.warning(
            "%s: the clock lacks the time of its own decisions, so it cannot win; %s",
            ", ".join(lacking),
            to_time({**decisions, "target": traces.fingerprint.target}),
        )
    evaluator = LogEvaluator(
        log,
        model,
        objective,
        load if is_simulated else None,
        packing=config.packing,
        seed=config.seed,
    )
    of = "" if batching == "specctl" else f", batches as in {batching}"
    how = SIMULATED.format(packing=config.packing, seed=config.seed, num_runs=NUM_RUNS, of=of)
    tuned_load = TunedLoad(
        batch_size=config.batch_size, arrival_rate_per_s=config.arrival_rate_per_s
    )
    stated = ("packing", "held_out_frac", "seed", "factor", "drops_unsupported", "all_prompts")
    settled = {
        **facts_of(traces, log, model, (), scored),
        "cost_device": None if isinstance(model, LinearCost) else model.device,
        "load": tuned_load,
        "config": {
            "families": list(config.families),
            "grids": list(config.grids),
            "objective": objective.to_json(),
            "load": tuned_load.to_json(),
            **config.model_dump(include=set(stated)),
            **({} if config.for_engine is None else {"for_engine": config.for_engine}),
        },
        "is_simulated": is_simulated,
        "approximations": how if is_simulated else EXACT,
        "for_engine": config.for_engine,
    }
    return Tuning(search, evaluator, settled, cached, clock, adaptive)


# ----------------------------------------------------------------------------------- publishing


def publish(
    tuned: Tuned,
    folder: Path,
    pair: PairFingerprint,
    traced: Domain,
    snapshots: Sequence[str] = (),
) -> Artifact:
    """Writes the chosen policy into `folder/policy`, and `tune.json` beside it.

    Args:
        traced: the domain of the traces.
        snapshots: of the trace sets, set by set.

    Raises:
        OutputError: a folder that cannot be written, or holds other files.
    """
    result, chosen = tuned.result, tuned.chosen
    batch_size, device = result.load.batch_size, result.cost_device
    # The traces' domain, at the load of the search and on the machine of its times.
    changed = {
        "batch_size": Range(low=batch_size, high=batch_size),
        "hardware": None if device is None else (device,),
    }
    domain = traced.model_copy(update=changed)
    origin = Origin(
        pair=pair,
        evidence=evidence(tuned),
        fit={"kind": "tune", **result.config, "cost_model": result.cost_model},
        domain=domain,
        parent=chosen.parent,
    )
    published = result.model_copy(update={"scored_prompts": None})  # ids may be of users
    artifact = save_artifact(
        folder / POLICY_FOLDER,
        chosen.policy,
        origin.of_sets(snapshots),
        card=cards.with_domain(write_card(result, chosen.policy, pair), domain),
        report=json_bytes(published.to_json()),
    )
    write_whole(folder / RESULT_NAME, json_bytes(result.to_json()), "tuning")
    return artifact


def evidence(tuned: Tuned) -> Evidence:
    """Split sizes and held-out figures of the chosen policy."""
    result = tuned.result
    chosen, baseline = result.standing(result.chosen), result.policies[0].held_out
    held_out, sizes = chosen.held_out, result.num_prompts
    splits = {
        "train": SplitSize(num_prompts=sizes.train, num_rounds=chosen.train.num_rounds),
        "held_out": SplitSize(num_prompts=sizes.held_out, num_rounds=held_out.num_rounds),
    }
    named: dict[str, Interval | None] = {
        "held_out_rate": held_out.rate,
        "held_out_against_static": held_out.against,
        "held_out_against_plain": held_out.against_plain,
        **{f"held_out_{name}": getattr(held_out, name) for name in FIGURES},
        "held_out_static_rate": baseline.rate,
    }
    metrics: dict[str, Any] = {
        name: Metric.of(
            found.value, found.low, found.high, level=CONFIDENCE, num_prompts=sizes.held_out
        )
        for name, found in named.items()
        if found is not None
    }
    metrics |= {"train_rate": chosen.train.rate, "num_settings": float(result.num_settings)}
    return Evidence.of_splits(result.traces_digest, splits, metrics, tuned.fitted_on)


def write_card(result: TuneResult, policy: Policy, pair: PairFingerprint) -> str:
    """Markdown of `README.md`; a pure function of its arguments."""
    load, objective, config = result.load, result.objective, result.config
    arrivals = load.arrival_rate_per_s
    lines = (
        f"traces `{result.traces_digest}`",
        f"cost model `{result.cost_model}` ({cell(str(result.clock))})",
        f"objective {objective.kind}: {objective.meaning}",
        f"load: batch size {load.batch_size}, "
        + ("closed loop" if arrivals is None else f"{arrivals:g} requests/s"),
        f"split seed {config['seed']}, {config['held_out_frac']:.0%} of the prompts held out",
        *map(cell, tune_notes(result)),
    )
    table = result_table(result)
    rows = [list(map(cell, row)) for row in table.rows]
    parts = (
        f"# {cell(policy.name)} tuned for {cell(pair.target)} with {cell(pair.drafter)}",
        cell(result.sentence()),
        cards.lossless_line(policy),
        cards.policy_block(policy),
        cards.pair_table(pair),
        "## Evidence",
        cards.bullets(*lines),
        "## Finalists",
        cards.table(COLUMNS, rows),
        "The first row is the best static setting. Rates in tokens/s. " + cell(table.legend),
        "## Use",
        f"{cards.use_block(pair)} `report.json`\nis the result of `specctl tune`"
        " without the ids of prompts.",
        "## Limits",
        f"""- Times are the cost model's, counts are replayed from logged trees. Compare it with
  `specctl run --compare` on the machine that serves before you trust it.
- It is tuned for one load, one objective and prompts like those of the traces.
- {cell(result.approximations)}
{cards.FIXTURE_LINE}""",
    )
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------- fit auto

FITS_FOLDER = "fits"
UNFITTED = (
    *("confidence", "svip", "adasd_stop:min_samples=1"),
    *("threshold:top_k=8", "opt_tree:top_k=8", "ddd:top_k=8"),
)
"""Shapes without a fit, which a fitted one has to beat. Their beam is fixed, since it matters least
and whole grids take three times as long."""
UNFITTED_SHARED = ("chain+survival", "eagle2+survival", "threshold+survival")
"""Unfitted shapes under a budget, for requests that share a batch."""


def attempts(fits: Mapping[str, Callable[[Path], Artifact]], out: Path) -> Iterator[FitOutcome]:
    """Runs the fits one after another, each into a folder of its name in `out/fits`.

    The refusal of a fit that the traces do not allow, e.g. with too few rounds, is kept in its
    outcome.

    Args:
        fits: by name; each writes an artifact into a folder.
    """
    for name, write in fits.items():
        digest = refusal = None
        try:
            digest = write(out / FITS_FOLDER / name).digest
        except OutputError:
            raise
        except SpecctlError as error:
            refusal = error.line
        yield FitOutcome(fit=name, artifact_digest=digest, refusal=refusal)


def families_of(tried: Sequence[FitOutcome], out: Path, *, is_shared: bool) -> tuple[str, ...]:
    """The families of `fit auto`: fitted and unfitted shapes, and both under budgets.

    Args:
        tried: of `attempts` with the same `out`.
        is_shared: requests meet in batches, so budgets apply.
    """
    names = [one.fit for one in tried if one.refusal is None]
    fitted = {name: str(out / FITS_FOLDER / name) for name in names}
    alone = (*fitted.values(), *UNFITTED)
    if not is_shared:
        return alone
    survival = [f"{folder}+survival" for folder in fitted.values()]
    elastic = [f"{fitted['echo']}+echo_budget"] if "echo" in fitted else []
    return (*alone, *survival, *elastic, *UNFITTED_SHARED)
