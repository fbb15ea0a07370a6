"""What is wanted of the decode loop on an H200 at batch 1, and what came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
MOST_POLICY_SHARE, LEAST_SPEEDUP = 0.003, 2.0
DECIDING = ("hetero", "c2t", "echo")


def targets(rows: Sequence[Row], *, applies: bool) -> list[Row]:
    """A line each.

    Args:
        applies: the rows were measured on a GPU at the 8B shape; elsewhere nothing is judged.
    """
    modes: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["batch"] == 1:
            modes.setdefault((row["policy"], row["context"]), {})[row["mode"]] = row
    lines = [
        {"policy": policy, "context": context, **line}
        for (policy, context), by_mode in modes.items()
        for line in _of_policy(policy, by_mode)
    ]
    return [line if applies else {**line, "met": "no GPU"} for line in lines]


def _of_policy(policy: str, by_mode: dict[str, Row]) -> Iterator[Row]:
    eager, graphs = (by_mode.get(mode, {}) for mode in ("eager", "graphs"))
    if policy.startswith(DECIDING):
        share = graphs.get("policy_share")
        yield _line("policy share, graphs", share, f"<= {MOST_POLICY_SHARE}")
    if policy != "ar":
        before, after = eager.get("drafting_us"), graphs.get("drafting_us")
        speedup = before / after if before and after else None
        yield _line("drafting, eager over graphs", speedup, f">= {LEAST_SPEEDUP}")


def _line(what: str, found: float | None, law: str) -> Row:
    word, bound = law.split()
    if found is None:
        return {"target": what, "found": "not measured", "law": law, "met": ""}
    holds = found <= float(bound) if word == "<=" else found >= float(bound)
    return {"target": what, "found": found, "law": law, "met": "yes" if holds else "no"}
