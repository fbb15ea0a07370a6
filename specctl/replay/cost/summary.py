"""What `specctl profile` prints: the verification table, its error, what to mind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specctl.replay.cost.model import CostModel
from specctl.replay.cost.records import Grid, TableCost

NOISY_SPREAD, NOISY_ERROR = 0.25, 0.1
"""Interquartile range over median, and mean held-out error, above which a profile is noisy."""


def summary_json(model: CostModel, out: Path) -> dict[str, Any]:
    """Plain values for scripts: identity, machine, error and spread."""
    record = _table(model)
    return {
        "out": str(out),
        "digest": model.digest,
        "rounds": record.rounds,
        "machine": record.machine.model_dump(mode="json"),
        "measured": record.measured,
        "expires": record.expires,
        "num_samples": record.num_samples,
        "held_out": {name: error.model_dump() for name, error in record.held_out.items()},
        "spread": spread(record.verify),
        "is_noisy": is_noisy(record),
    }


def spread(grid: Grid) -> float:
    """Median over a grid's points of interquartile range over time."""
    return float(np.median(np.array(grid.iqr_us) / np.array(grid.us)))


def render(model: CostModel, out: Path) -> Any:
    """A rich group: verification by size and batch, the held-out error, the file."""
    from rich.console import Group

    record = _table(model)
    errors = (
        ", ".join(f"{k} {e.mape:.1%}" for k, e in record.held_out.items()) or "nothing held out"
    )
    lines = [
        f"mean error at held-out points: {errors}",
        f"spread of verification (IQR over median): {spread(record.verify):.1%}",
        f"wrote {out}  {model.digest}  expires {record.expires}",
    ]
    if is_noisy(record):
        lines.append("noisy: something else ran here; measure again on a quiet machine")
    return Group(_verify_table(record), *lines)


def is_noisy(record: TableCost) -> bool:
    """Whether the samples of one point, or neighbouring points, contradict each other."""
    errors = [error.mape for error in record.held_out.values()]
    return spread(record.verify) > NOISY_SPREAD or max(errors, default=0.0) > NOISY_ERROR


def _verify_table(record: TableCost) -> Any:
    from rich.table import Table

    machine, grid = record.machine, record.verify
    context = grid.context_tokens[0]
    title = (
        f"ms to verify, by tokens per request, at {context} tokens of context; "
        f"{record.pair.target} + {record.pair.drafter}, {machine.dtype}, {machine.device}, "
        f"{machine.num_threads} threads, {record.num_samples} {record.rounds} rounds a point"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("batch", *map(str, grid.sizes)):
        table.add_column(heading, justify="right")
    for batch, plane in zip(grid.batch_sizes, grid.us, strict=True):
        table.add_row(str(batch), *(f"{us / 1e3:.2f}" for us in plane[0]))
    return table


def _table(model: CostModel) -> TableCost:
    assert isinstance(model.record, TableCost), "a profile is a table"
    return model.record
