"""What was to be shown, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.stats import Interval

Row = dict[str, Any]
LEARNED_AT = {4: -0.15, 8: -0.10, 16: -0.08, 32: -0.08}
"""Change of verified tokens at the tau of a static tree of so many nodes and the same depth."""
CONTROLS = ("static", "threshold")


def target_rows(
    shapes: list[Row], systems: list[Row], budgets: list[Row], composed: list[Row], speed: list[Row]
) -> Iterator[Row]:
    """One row a target; `met` looks at the value, `clear` at the whole interval."""
    yield from _hetero(systems)
    yield from _learned(shapes)
    yield _composition(composed)
    yield from _echo(budgets)
    yield from _speed(speed)


def _row(target: str, who: str, value: Interval | None, bound: float, *, below: bool = True) -> Row:
    if value is None:
        return {"target": target, "who": who, "value": None, "met": None, "clear": None}
    end = value.high if below else value.low
    met, clear = (x <= bound if below else x >= bound for x in (value.value, end))
    return {"target": target, "who": who, "value": value, "met": bool(met), "clear": bool(clear)}


def _hetero(systems: list[Row]) -> Iterator[Row]:
    """Both halves belong to one setting: the one chosen on training prompts."""
    row = next(
        (r for r in systems if r["system"] == "HeteroSpec" and r["setting"] != "as fitted"), None
    )
    name = "HeteroSpec against EAGLE-2 (6 levels, N 60)"
    who = row["setting"] if row else "not run"
    calls, verified = (
        (row["calls_over_eagle2"], row["verified_over_eagle2"]) if row else (None,) * 2
    )
    yield _row(f"{name}: verified tokens at most -20 %", who, verified, -0.20)
    yield _row(f"{name}: calls at most +2 %", who, calls, 0.02)


def _learned(shapes: list[Row]) -> Iterator[Row]:
    for size, bound in LEARNED_AT.items():
        rows = [r for r in shapes if r["num_tokens"] == size and r["shape"] not in CONTROLS]
        best = _least(rows, "tokens")
        target = f"best learned shape at the tau of static N {size}, equal depth: {bound:.0%}"
        who = f"{best['shape']}, {best['levels']} levels" if best else "none fitted"
        yield _row(target, who, best["tokens"] if best else None, bound)


def _composition(composed: list[Row]) -> Row:
    best = _least(composed, "tokens_at_eagle2_tau")
    who = f"{best['shape']} + {best['budget']}, batch {best['load']}" if best else "none"
    value = best["tokens_at_eagle2_tau"] if best else None
    return _row("best composition at EAGLE-2's tau: at most -30 %", who, value, -0.30)


def _echo(budgets: list[Row]) -> Iterator[Row]:
    for row in budgets:
        is_echo = row["budget"].startswith("ECHO")
        if row["tokens_a_request"] == 4 and is_echo and row["load"] > 1:
            who = f"{row['shape']} + {row['budget']}, batch {row['load']}"
            target = "ECHO's budget above static at 4 tokens a request"
            yield _row(target, who, row["tau_over_static"], 0.0, below=False)


def _speed(speed: list[Row]) -> Iterator[Row]:
    for row in speed:
        if row["is_recommended"]:
            where = f"{row['load']} requests, {row['clock']} clock"
            target = f"recommended setting no slower than tuned static, {where}"
            yield _row(target, row["setting"], row["time_over_static"], 0.0)


def _least(rows: list[Row], name: str) -> Row | None:
    """The row of the lowest defined value."""
    defined = [row for row in rows if row[name].value == row[name].value]
    return min(defined, key=lambda row: row[name].value) if defined else None
