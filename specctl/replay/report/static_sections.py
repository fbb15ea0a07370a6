"""The section on static settings: what verification buys, whatever it costs."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.replay.report.chart import Chart, Series
from specctl.replay.report.evidence import Evidence
from specctl.replay.report.given import PolicyFigures, ReplayResults
from specctl.replay.report.page import Figure, Section, Table
from specctl.replay.report.statics import StaticPoint
from specctl.replay.report.words import BY_PROMPT, count, plain, rows_words, span

TITLE = "Static settings: verified tokens against τ"
ENOUGH = 0.9
"""Of the largest τ on the front."""


def pareto_section(evidence: Evidence, results: ReplayResults | None) -> Section:
    """The front of the static settings, and the replayed policies beside it."""
    front = sorted(
        (point for point in evidence.statics if point.on_front),
        key=lambda point: point.verified_per_token.value,
    )
    if not front:
        return Section("pareto", TITLE, missing=_missing(evidence))
    points = evidence.statics
    dropped = sum(not point.is_supported for point in points)
    notes = [
        "The front was chosen on the prompts that it is shown for, so its lead over the settings "
        "beside it is flattered. Tokens are counted, not timed: specctl tune judges by time, on "
        "held-out prompts.",
    ]
    if dropped:
        notes.append(
            f"{count(dropped, 'setting')} of {len(points)} left out of the front: the log holds "
            "every expansion they ask for in less than 99% of their rounds."
        )
    policies = [] if results is None else [policy.pooled for policy in results.policies]
    return Section(
        "pareto",
        TITLE,
        reading=_reading(front, len(points)),
        basis=f"n = {rows_words(evidence)}, every setting walked over every request; {BY_PROMPT}.",
        figures=[
            Figure(
                "Every static setting of the grid, the front of those that no other beats, and "
                "the replayed policies.",
                [_chart(points, front, policies)],
            )
        ],
        tables=[_table(front)],
        notes=notes,
        data=plain(points),
    )


def _missing(evidence: Evidence) -> str:
    if evidence.kind == "live":
        return (
            "Live traces hold the positions that one policy visited, so other settings cannot be "
            "replayed on them. Collect with --dense."
        )
    return "The log supports no setting of the grid. Collect deeper or wider."


def _reading(front: Sequence[StaticPoint], num_points: int) -> str:
    first, last = front[0], front[-1]
    enough = next(point for point in front if point.tau.value >= ENOUGH * last.tau.value)
    return (
        f"{len(front)} of {count(num_points, 'setting')} are on the front, from {first.label} "
        f"(τ {first.tau.value:.2f}, {first.verified_per_token.value:.2f} verified tokens per "
        f"output token) to {last.label} (τ {last.tau.value:.2f}, "
        f"{last.verified_per_token.value:.2f}). {ENOUGH:.0%} of that τ is reached by "
        f"{enough.label} with {enough.verified_per_token.value:.2f}."
    )


def _chart(
    points: Sequence[StaticPoint], front: Sequence[StaticPoint], policies: Sequence[PolicyFigures]
) -> Chart:
    settings = [_series("static settings", points, kind="points", style=6)]
    best = [_series("front", front, kind="line", style=0)]
    replayed = Series(
        "replayed policies",
        [p.verified_per_token.value for p in policies],
        [p.tau.value for p in policies],
        [p.tau.low for p in policies],
        [p.tau.high for p in policies],
        names=[p.policy for p in policies],
        kind="points",
        style=1,
    )
    alt = (
        f"Scatter of {len(points)} static settings, verified tokens per output token against mean "
        f"acceptance length, with the front of {len(front)} and {len(policies)} replayed policies. "
        "The table below lists the front."
    )
    return Chart(
        alt,
        "verified tokens per output token",
        "τ (tokens per call)",
        [*settings, *best, *([replayed] if policies else [])],
        height=400,
    )


def _series(label: str, points: Sequence[StaticPoint], *, kind: str, style: int) -> Series:
    return Series(
        label,
        [point.verified_per_token.value for point in points],
        [point.tau.value for point in points],
        kind="line" if kind == "line" else "points",
        style=style,
    )


def _table(front: Sequence[StaticPoint]) -> Table:
    return Table(
        "Settings on the front",
        ("setting", "verified per output token", "τ (tokens per call)", "calls"),
        [(p.label, span(p.verified_per_token), span(p.tau), f"{p.calls:,}") for p in front],
    )
