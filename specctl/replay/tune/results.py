"""A tuning as one JSON document and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.replay.tune.families import Family
from specctl.replay.tune.grids import Scaled
from specctl.replay.tune.verdict import Standing, Verdict
from specctl.runtime.output import json_bytes, write_whole
from specctl.stats import Interval

RESULT_NAME, POLICY_FOLDER, WHAT = "tune.json", "policy", "tuning"


@dataclass(frozen=True)
class TuneResult:
    """A verdict and what it holds for.

    Attributes:
        facts: pair, log, support, sampling, cost model, load and configuration; plain JSON.
    """

    facts: dict[str, Any]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return {"kind": "tune", **self.facts, **self.verdict.to_json()}

    def to_bytes(self) -> bytes:
        """`tune.json`; NaN, which JSON lacks, is null."""
        return json_bytes(self.to_json())


def write_result(result: TuneResult, folder: Path) -> Path:
    """Writes `tune.json`.

    Raises:
        OutputError: it cannot be written.
    """
    path = folder / RESULT_NAME
    write_whole(path, result.to_bytes(), WHAT)
    return path


def result_table(result: TuneResult) -> Any:
    """One row a finalist: what it did where it was picked, and where nothing was."""
    from rich.table import Table

    table = Table(title=_title(result), title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", overflow="fold")
    for standing in result.verdict.standings:
        table.add_row(*cells(standing))
    return table


COLUMNS = ("policy", "train", "held out", "× static", "τ", "verified", "TPOT ms", "support")


def cells(standing: Standing) -> tuple[str, ...]:
    """A row of `result_table`: rates in tokens/s, intervals of 95% by prompt."""
    figures, held_out = standing.figures, standing.finalist.held_out.evaluation
    mark = "" if held_out.is_supported else "*"
    return (
        standing.candidate.label + mark,
        f"{standing.train_rate:.1f}",
        span(standing.rate, 1),
        span(standing.against, 3),
        f"{figures['mean_acceptance_length'].value:.2f}",
        f"{figures['verified_per_call'].value:.1f}",
        f"{figures['tpot_us'].value / 1e3:.2f}",
        f"{held_out.support:.2%}",
    )


def span(interval: Interval, digits: int) -> str:
    """A value with its interval."""
    value, low, high = (f"{v:.{digits}f}" for v in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]"


def notes(result: TuneResult) -> list[str]:
    """What a reader of the table must know."""
    verdict, facts = result.verdict, result.facts
    race = verdict.race
    beyond = sum(looked.num_beyond for looked in race.looked)
    lacking = sum(looked.num_unsupported for looked in race.looked)
    rungs = ", ".join(f"{settings} on {prompts} prompts" for prompts, settings in race.rungs)
    lines = [
        f"Rates: {race.objective.meaning}. × static is paired by prompt, on held-out ones.",
        f"{race.num_settings} settings were scored on training prompts; "
        f"{beyond} more lie beyond the log, {lacking} asked for what it lacks.",
        f"Halving: {rungs or 'none, static settings alone'}.",
        str(facts["approximations"]),
    ]
    if any(not s.finalist.held_out.evaluation.is_supported for s in verdict.standings):
        lines.append("* the log lacks over 1% of what it asks on held-out prompts.")
    lines += [
        f"{family}: left out, the log lacks over 1% of what each of its settings asks."
        for family in race.left_out
    ]
    lines += [fit_sentence(fit) for fit in facts.get("fits", ())]
    return [*lines, verdict.sentence()]


def fit_sentence(fit: dict[str, str | None]) -> str:
    """What became of one of the fits of `fit auto`."""
    return f"fit {fit['fit']}: {fit['refusal'] or 'artifact ' + str(fit['artifact_digest'])}"


def _title(result: TuneResult) -> str:
    facts, race = result.facts, result.verdict.race
    load = facts["load"]
    arrivals = load["arrival_rate_per_s"]
    offered = f"{arrivals:g} requests/s, " if arrivals else ""
    note = ""
    if str(facts["target"]).startswith("embedded"):
        note = " (the embedded pair is a fixture, no claim about large models)"
    return (
        f"{facts['target']} + {facts['drafter']}: {race.objective.kind}, {offered}batch size "
        f"{load['batch_size']}; {len(race.split.train)} training and "
        f"{len(race.split.held_out)} held-out prompts; 95% intervals by prompt{note}"
    )


def grid_table(families: Sequence[Family]) -> Any:
    """Which values of which settings are looked at."""
    from rich.table import Table

    table = Table("family", "setting", "values")
    for family in families:
        for name, values in grid_rows(family):
            table.add_row(family.name, name, values)
    return table


def grid_rows(family: Family) -> list[tuple[str, str]]:
    """Setting and values of one family, in words."""
    grid = {**family.shape_grid, **family.budget_grid}
    return [(name, _values(values)) for name, values in grid.items()] or [("none", "as it is")]


def _values(values: tuple[str, ...] | Scaled) -> str:
    if isinstance(values, tuple):
        return ", ".join(values)
    factors = ", ".join(f"{factor:g}" for factor in values.factors)
    return ", ".join((*values.as_is, f"{factors} × {values.unit}"))
