"""`specctl tune` and `fit auto`: from opened traces and a configuration to a judged search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import torch

from specctl.artifacts import Artifact
from specctl.artifacts.load import load_artifact
from specctl.errors import OutputError, SpecctlError, TraceEmptyError
from specctl.logs.parquet import collected
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy, StepCost, build_shape
from specctl.policy.families import parse_policy
from specctl.policy.rules import ShapeRule, is_fixed
from specctl.records import canonical_json
from specctl.replay.batch_simulation import Load
from specctl.replay.config import Engine, TuneConfig, check_held_out
from specctl.replay.cost.files import device_of, untimed, warn_outside
from specctl.replay.cost.model import Steps, require_slope
from specctl.replay.results import facts_of
from specctl.replay.run import require_cost_model
from specctl.replay.tune.candidates import Conditions, PolicyCandidate, parse_families
from specctl.replay.tune.evaluators import Evaluator, LogEvaluator, make_objective
from specctl.replay.tune.search import TuneSearch
from specctl.results import FitOutcome, TunedLoad, TuneResult
from specctl.stats import Split, split_prompts

NUM_RUNS = 12
"""Simulated runs behind a finalist's figures; a bootstrap over fewer is too narrow."""
FEWEST_PROMPTS = 8
"""On either side of the split: with fewer, an interval by prompt says little."""
ONE_IN_20 = 1.645
"""Standard deviations below the mean of a normal distribution of the lowest draw in 20."""
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
    """A result, and the setting that it chose."""

    result: TuneResult
    chosen: PolicyCandidate


@dataclass(frozen=True)
class Tuning:
    """A search that is ready to run: all early refusals are behind it.

    Attributes:
        conditions: the fields of the result that were settled before the search.
        doubt: called with policies by label; warns of shapes that the cost model does not know, and
            returns those of which it lacks the decisions.
    """

    search: TuneSearch
    evaluator: LogEvaluator
    conditions: dict[str, Any]
    doubt: Callable[[Mapping[str, Policy]], tuple[str, ...] | None]

    @property
    def num_scorings(self) -> int:
        """Settings that are scored at most, each as often as it is run."""
        return self.search.num_scorings

    def run(self, on_setting: Callable[[], None] = lambda: None) -> Tuned:
        """The search and the verdict; minutes, most of them static settings."""
        torch.set_num_threads(1)  # chunks are the parallelism
        return self.judged(replace(self.evaluator, on_setting=on_setting))

    def judged(self, evaluate: Evaluator) -> Tuned:
        """The same by any evaluator."""
        verdict, chosen = self.search.run(evaluate)
        finalists = {
            one.policy: parse_policy(canonical_json(one.record)) for one in verdict.policies
        }
        conditions = self.conditions | {"untimed": self.doubt(finalists)}
        return Tuned(TuneResult(kind="tune", **conditions, **dict(verdict)), chosen)


def prepare(
    traces: TraceSet,
    config: TuneConfig,
    cost_model: Path | None,
    *,
    num_threads: int = 1,
    warn: Callable[[str], None] = lambda _: None,
    runs: Callable[[Policy], bool] | None = None,
    batching: Engine = "specctl",
) -> Tuning:
    """Opens everything and refuses a search that cannot be made.

    Args:
        runs: whether the engine of the configuration runs a policy; None without one.
        batching: its batches, where a load is simulated.

    Raises:
        UsageError: no cost model, or a flat one where a budget weighs tokens against it; a
            batch that it was not measured for; a family or setting that is not known, or wholly
            outside the log. TraceEmptyError: too few prompts.
        TraceError, InputError, ArtifactError: see `specctl.errors`.
    """
    import polars as pl

    objective = make_objective(config.objective, config.tpot_limit_ms)
    load = Load(config.batch_size, arrival_rate_per_s=config.arrival_rate_per_s, engine=batching)
    log = DenseLog.open(traces)
    model = require_cost_model(cost_model, traces, warn, "the times to tune for")
    families = parse_families(config.families, config.grids, traces.fingerprint)
    is_shared = any(family.is_shared for family in families)
    if is_shared:
        require_slope(model)
    prompt, context = pl.col("prompt_id").cast(pl.String), pl.col("context_tokens").cast(pl.Int64)
    by_prompt = traces.scan("rounds").group_by(prompt).agg(pl.len(), context.sum())
    contexts = collected(by_prompt.sort("prompt_id"))
    split = _split(contexts["prompt_id"].to_list(), config)
    of_train = contexts.filter(pl.col("prompt_id").is_in(split.train))
    mean = of_train.select(pl.sum("context_tokens") / pl.sum("len")).item()
    cached = float(mean) - 1  # the root is not cached yet
    model.round_us(Steps(load.batch_size, 2 * load.batch_size, cached, 1, 1, 1))  # or refuses

    def step_costs(rule: ShapeRule) -> StepCost:
        """Whole rounds of a full batch, at the mean context of the training prompts."""
        return model.full_batch_cost(rule, load.batch_size, cached)

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
    )
    for family in families:
        if family.artifact is not None:
            for line in _fitted_on_held_out(family.shape, log, config):
                warn(f"--family {family.name}: {line}")
    evaluator = LogEvaluator(
        log,
        model,
        objective,
        load if is_simulated else None,
        packing=config.packing,
        seed=config.seed,
        num_threads=num_threads,
    )
    of = "" if batching == "specctl" else f", batches as in {batching}"
    how = SIMULATED.format(packing=config.packing, seed=config.seed, num_runs=NUM_RUNS, of=of)
    tuned_load = TunedLoad(
        batch_size=config.batch_size, arrival_rate_per_s=config.arrival_rate_per_s
    )
    stated = ("packing", "held_out_frac", "seed", "factor", "drops_unsupported")
    settled = {
        **facts_of(traces, log, model, {}),
        "cost_device": device_of(model),
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

    def doubt(policies: Mapping[str, Policy]) -> tuple[str, ...] | None:
        asked = {}
        for label, policy in policies.items():
            rule, batch = build_shape(policy.shape), load.batch_size
            # What a rule verifies that decides by its drafts is known to replay alone.
            most = rule.max_tokens if is_fixed(rule) else 1
            asked[label] = Steps(batch, batch * most, cached, rule.max_depth, rule.width, 1)
        warn_outside(model, asked, warn)
        return untimed(model, policies)

    return Tuning(search, evaluator, settled, doubt)


def _split(names: Sequence[str], config: TuneConfig) -> Split:
    share = config.held_out_frac
    check_held_out(share)
    found = f"{len(names)} in all"
    if len(names) >= 2 * FEWEST_PROMPTS:
        split = split_prompts(names, held_out_frac=share, seed=config.seed)
        if min(len(split.train), len(split.held_out)) >= FEWEST_PROMPTS:
            return split
        found = f"{len(split.train)} and {len(split.held_out)}"
    # Prompts of which 19 splits in 20 leave enough on either side, as chance holds them out: from
    # n q - 1.64 sqrt(n q (1 - q)) >= FEWEST_PROMPTS for the smaller share q.
    rarer = min(share, 1 - share)
    spread = ONE_IN_20 * sqrt(rarer * (1 - rarer))
    enough = ceil(((spread + sqrt(spread**2 + 4 * rarer * FEWEST_PROMPTS)) / (2 * rarer)) ** 2)
    raise TraceEmptyError(
        "split by prompt",
        expected=f"{FEWEST_PROMPTS} prompts or more to choose on, and as many to report on",
        found=found,
        fix=f"collect {enough} prompts in all, or change --held-out, now {share:g}",
    )


def _fitted_on_held_out(folder: str, log: DenseLog, config: TuneConfig) -> Iterator[str]:
    """A line if an artifact was fitted on prompts which are held out here.

    With one seed the smaller held-out side lies within the larger one (`stats.split_prompts`).
    """
    manifest = load_artifact(folder).manifest
    if manifest.evidence is None or manifest.fit is None:
        return
    seed, share = manifest.fit.get("seed"), manifest.fit.get("held_out_frac")
    apart = seed == config.seed and isinstance(share, float) and share >= config.held_out_frac
    if manifest.evidence.trace_digest == log.digest and not apart:
        yield (
            "fitted on some of the prompts held out here, which flatters it; give --seed "
            f"{seed} --held-out {share}, as it was fitted"
        )


# ------------------------------------------------------------------------------------- fit auto

FITS_FOLDER = "fits"
UNFITTED = (
    *("confidence", "svip", "adasd_stop:min_samples=1"),
    *("threshold:top_k=8", "opt_tree:top_k=8", "ddd:top_k=8"),
)
"""Shapes that need no fit and that a fitted one has to beat too. At one beam, which changes least
of their settings: whole grids (`tune`) take three times as long."""
UNFITTED_SHARED = ("chain+survival", "eagle2+survival", "threshold+survival")
"""The same where requests share a batch."""


@dataclass(frozen=True)
class Attempt:
    """The outcome of a fit, and the folder of its artifact if there is one."""

    outcome: FitOutcome
    folder: Path | None = None


def attempts(fits: Mapping[str, Callable[[Path], Artifact]], out: Path) -> Iterator[Attempt]:
    """Runs the fits one after another, each into its own folder below `out`.

    A fit that the traces do not allow (no gate separates anything, too few rounds) is no reason to
    give up the others: its refusal is kept and reported.

    Args:
        fits: by name; each fits and writes an artifact into a folder.
    """
    for name, write in fits.items():
        folder = out / FITS_FOLDER / name
        try:
            artifact = write(folder)
        except OutputError:
            raise
        except SpecctlError as error:
            refusal = " ".join(str(error).split())
            yield Attempt(FitOutcome(fit=name, artifact_digest=None, refusal=refusal))
        else:
            outcome = FitOutcome(fit=name, artifact_digest=artifact.digest, refusal=None)
            yield Attempt(outcome, folder)


def families_of(tried: Sequence[Attempt], *, is_shared: bool) -> tuple[str, ...]:
    """The families of `fit auto`: the fitted shapes, the unfitted ones, and both under budgets
    where a batch shares.

    Args:
        is_shared: requests meet in batches.
    """
    fitted = [attempt for attempt in tried if attempt.folder is not None]
    alone = (*(str(attempt.folder) for attempt in fitted), *UNFITTED)
    if not is_shared:
        return alone
    survival = [f"{attempt.folder}+survival" for attempt in fitted]
    elastic = [f"{one.folder}+echo_budget" for one in fitted if one.outcome.fit == "echo"]
    return (*alone, *survival, *elastic, *UNFITTED_SHARED)
