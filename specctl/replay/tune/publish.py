"""A tuning as tables and sentences, as one JSON document, and as an artifact with its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from specctl.artifacts.manifest import Range
from specctl.durable import write_whole
from specctl.formatting import Table, fixture_note
from specctl.policy import Policy
from specctl.records import json_bytes
from specctl.replay.tune.candidates import SearchedFamily
from specctl.replay.tune.evaluators import FIGURES
from specctl.replay.tune.tuning import Tuned
from specctl.replay.tune.verdict import Standing, TuneResult
from specctl.stats import CONFIDENCE, Interval, intervals_over

RESULT_NAME, POLICY_FOLDER = "tune.json", "policy"
COLUMNS = (
    "policy",
    "train",
    "tokens/s",
    "× plain",
    "× static",
    "τ",
    "verified",
    "TPOT ms",
    "support",
)


def result_table(result: TuneResult) -> Table:
    """One row a finalist: its training rate, and its figures on held-out prompts."""
    arrivals, note = result.load.arrival_rate_per_s, fixture_note(result.target)
    offered = f"{arrivals:g} requests/s, " if arrivals else ""
    title = (
        f"{result.target} + {result.drafter}: {result.objective.kind}, {offered}batch size "
        f"{result.load.batch_size}; {result.num_prompts.train} training and "
        f"{result.num_prompts.held_out} held-out prompts; "
        + intervals_over(result.num_prompts.held_out)
        + (f" ({note})" if note else "")
    )
    wide = ("train", "verified", "TPOT ms", "support")
    return Table(title, COLUMNS, [_cells(result, one) for one in result.policies], wide=wide)


def grid_table(families: Sequence[SearchedFamily]) -> Table:
    """The values of every searched setting."""
    rows = [(family.name, *row) for family in families for row in family.grid_rows()]
    return Table("", ("family", "setting", "values"), rows, left=3)


def _cells(result: TuneResult, standing: Standing) -> tuple[str, ...]:
    """Cells of `COLUMNS`; rates in tokens/s, intervals of 95% by prompt."""
    held_out = standing.held_out
    return (
        result.marked(standing.policy) + ("" if held_out.is_supported else "*"),
        f"{standing.train.rate:.1f}",
        held_out.rate.text(".0f" if held_out.rate.value >= 100 else ".1f"),
        held_out.against_plain.text(".2f"),
        held_out.against.text(".2f"),
        f"{held_out.mean_acceptance_length.value:.2f}",
        f"{held_out.verified_per_call.value:.1f}",
        f"{held_out.tpot_us.value / 1e3:.2f}",
        f"{held_out.support:.2%}",
    )


def tune_notes(result: TuneResult) -> Iterator[str]:
    """The search in words, then the verdict."""
    too_large = sum(family.num_out_of_range for family in result.families)
    lacking = sum(family.num_unsupported for family in result.families)
    not_run = sum(family.num_not_run or 0 for family in result.families)
    rungs = ", ".join(f"{r.num_settings} on {r.num_prompts} prompts" for r in result.rungs)
    yield f"On held-out prompts: {result.objective.meaning}; × is paired by prompt."
    yield (
        f"{result.num_settings} settings were scored on training prompts; "
        f"{too_large} more exceed the log's trees, {lacking} need expansions that it lacks."
    )
    if result.for_engine is not None:
        yield f"Searched for {result.for_engine}, which does not run {not_run} more settings."
        if result.rungs:  # rules take part, not fixed settings alone
            yield (
                "The time that a rule itself takes inside the engine is not counted "
                "(docs/vllm.md, What it costs)."
            )
    yield f"Halving: {rungs or 'none, static settings alone'}."
    yield result.approximations
    if not all(standing.held_out.is_supported for standing in result.policies):
        yield "* the log lacks over 1% of the expansions that it needs on held-out prompts."
    yield from result.footnotes()
    for family in result.left_out:
        yield f"{family}: left out, the log lacks over 1% of the expansions of each setting."
    for fit in result.fits or ():
        yield fit.sentence()
    yield result.sentence()


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
    content = json_bytes(result.to_json())
    artifact = save_artifact(
        folder / POLICY_FOLDER,
        chosen.policy,
        origin.of_sets(snapshots),
        card=cards.with_domain(write_card(result, chosen.policy, pair), domain),
        report=content,
    )
    write_whole(folder / RESULT_NAME, content, "tuning")
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
    rows = [[cell(value) for value in _cells(result, one)] for one in result.policies]
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
        "The first row is the best static setting. Rates in tokens/s.",
        "## Use",
        f"{cards.use_block(pair)} `report.json`\nis the whole result of `specctl tune`.",
        "## Limits",
        f"""- Times are the cost model's, counts are replayed from logged trees. Compare it with
  `specctl run --compare` on the machine that serves before you trust it.
- It is tuned for one load, one objective and prompts like those of the traces.
- {cell(result.approximations)}
{cards.FIXTURE_LINE}""",
    )
    return "\n\n".join(parts) + "\n"
