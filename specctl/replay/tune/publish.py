"""From a verdict to an artifact that carries its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from specctl.artifacts.manifest import REPORT_JSON, Range
from specctl.replay.tune.results import (
    COLUMNS,
    POLICY_FOLDER,
    TuneResult,
    cells,
    notes,
    write_result,
)
from specctl.replay.tune.verdict import Verdict
from specctl.stats import Interval, Resamples


def publish(
    result: TuneResult,
    folder: Path,
    pair: PairFingerprint,
    traced: Domain,
    snapshots: Sequence[str] = (),
) -> Artifact:
    """Writes the chosen policy into `folder/policy` and the document beside it.

    Args:
        traced: what the traces were collected on.
        snapshots: of the trace sets, set by set.

    Raises:
        OutputError: a place that cannot be written, or that holds something else.
    """
    verdict = result.verdict
    domain = domain_of(result, traced)
    origin = Origin(
        pair=pair,
        evidence=evidence(result),
        fit=_fit(result),
        domain=domain,
        parent=verdict.chosen.candidate.parent,
    )
    artifact = save_artifact(
        folder / POLICY_FOLDER,
        verdict.chosen.candidate.policy,
        origin.of_sets(snapshots),
        card=cards.with_domain(write_card(result, pair), domain),
        reports={REPORT_JSON: result.to_bytes()},
    )
    write_result(result, folder)
    return artifact


def domain_of(result: TuneResult, traced: Domain) -> Domain:
    """The traces' domain, at the load that was searched for and on the machine of its times."""
    batch_size, device = result.facts["load"]["batch_size"], result.facts["cost_device"]
    changed = {
        "batch_size": Range(low=batch_size, high=batch_size),
        "hardware": None if device is None else (device,),
    }
    return traced.model_copy(update=changed)


def _fit(result: TuneResult) -> dict[str, Any]:
    """The configuration, and the times that it was for."""
    facts = result.facts
    return {"kind": "tune", **facts["config"], "cost_model": facts["cost_model"]}


def evidence(result: TuneResult) -> Evidence:
    """Split sizes in prompts and rounds of the chosen policy, and its held-out figures."""
    verdict, finalist = result.verdict, result.verdict.chosen.finalist
    split = verdict.race.split
    sides = {
        "train": (split.train, finalist.train),
        "held_out": (split.held_out, finalist.held_out),
    }
    splits = {
        name: SplitSize(num_prompts=len(prompts), num_rounds=trial.evaluation.num_rounds)
        for name, (prompts, trial) in sides.items()
    }
    return Evidence.of_splits(result.facts["traces_digest"], splits, _metrics(verdict))


def _metrics(verdict: Verdict) -> dict[str, Any]:
    chosen, baseline = verdict.chosen, verdict.standings[0]
    named = {
        "held_out_rate": chosen.rate,
        "held_out_against_static": chosen.against,
        **{f"held_out_{name}": interval for name, interval in chosen.figures.items()},
        "held_out_static_rate": baseline.rate,
    }
    num_prompts = len(verdict.race.split.held_out)
    return {
        **{name: _metric(found, num_prompts) for name, found in named.items()},
        "train_rate": chosen.train_rate,
        "num_settings": float(verdict.race.num_settings),
    }


def _metric(found: Interval, num_prompts: int) -> Metric:
    level = Resamples.confidence
    return Metric.of(found.value, found.low, found.high, level=level, num_prompts=num_prompts)


def write_card(result: TuneResult, pair: PairFingerprint) -> str:
    """Markdown of `README.md`; a pure function of its arguments."""
    verdict = result.verdict
    parts = (
        _head(result, pair),
        "## Evidence\n\n" + _evidence(result),
        "## Finalists\n\n" + _finalists(verdict),
        "## Use\n\n" + _use(pair),
        "## Limits\n\n" + _limits(result),
    )
    return "\n\n".join(parts) + "\n"


def _head(result: TuneResult, pair: PairFingerprint) -> str:
    chosen = result.verdict.chosen.candidate
    return f"""# {cell(chosen.policy.name)} tuned for {cell(pair.target)} with {cell(pair.drafter)}

{cell(result.verdict.sentence())}

{cards.law_line(chosen.policy)}

{cards.policy_block(chosen.policy)}

{cards.pair_table(pair)}"""


def _evidence(result: TuneResult) -> str:
    facts = result.facts
    load, objective = facts["load"], result.verdict.race.objective
    rate = load["arrival_rate_per_s"]
    lines = (
        f"traces `{facts['traces_digest']}`",
        f"cost model `{facts['cost_model']}` ({cell(facts['cost_source'])})",
        f"objective {objective.kind}: {objective.meaning}",
        f"load: batch size {load['batch_size']}, "
        + ("closed loop" if rate is None else f"{rate:g} requests/s"),
        f"split seed {facts['config']['seed']}, "
        f"{facts['config']['held_out_frac']:.0%} of the prompts held out",
        *map(cell, notes(result)),
    )
    return "\n".join(f"- {line}" for line in lines)


def _finalists(verdict: Verdict) -> str:
    rows = [[cell(value) for value in cells(row)] for row in verdict.standings]
    note = "The first row is the best static setting. Rates in tokens/s."
    return f"{cards.table(COLUMNS, rows)}\n\n{note}"


def _use(pair: PairFingerprint) -> str:
    return f"{cards.use_block(pair)} `report.json`\nis the whole result of `specctl tune`."


def _limits(result: TuneResult) -> str:
    return f"""- Times are the cost model's, counts are replayed from logged trees. Compare it with
  `specctl run --compare` on the machine that serves before you trust it.
- It is tuned for one load, one objective and prompts like those of the traces.
- {cell(result.facts["approximations"])}
{cards.FIXTURE_LINE}"""
