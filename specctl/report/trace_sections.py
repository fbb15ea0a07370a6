"""Sections on traces: static settings, acceptance by depth and category, Φ, confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from specctl.formatting import Table, count, listed, number
from specctl.report.charts import THIRD, Chart, Series
from specctl.report.page import Figure, Section
from specctl.report.result_sections import BY_PROMPT
from specctl.results import (
    CategoryFigures,
    ReplayScores,
    Separation,
    StaticPoint,
    TraceFigures,
)

PROBABILITY = (0.0, 1.0)
ENOUGH = 0.9
"""Of the largest τ on the front."""
MAX_LINES = 6
"""Categories drawn as lines; the table holds all."""
MAX_DEPTHS = 6
"""Depths of which densities are drawn."""
MAX_DENSITY = 12.0
"""Top of the densities' axis, per unit of probability."""
SHOWN_WIDTH = 0.02
"""Of the steps of densities in probability."""
BY_DEPTH: dict[str, Any] = {
    "x_label": "depth (levels)", "y_label": "probability", "y_range": PROBABILITY, "whole_x": True,
}  # fmt: skip
"""Looks of a chart of probabilities by depth."""


def rows_of(figures: TraceFigures) -> str:
    """n of figures that count every row."""
    noun = "position" if figures.kind == "dense" else "round"
    return f"{count(figures.num_prompts, 'prompt')}, {count(figures.num_rows, noun)}"


def reference(figures: TraceFigures) -> str:
    """The source of figures of rounds."""
    if figures.tree is None:
        return f"{count(figures.num_reference, 'live round')} with a draft"
    return f"{count(figures.num_reference, 'round')} of {figures.tree}, replayed"


def support_note(figures: TraceFigures) -> list[str]:
    if not figures.num_unsupported:
        return []
    part = figures.num_unsupported / figures.num_reference
    return [
        f"In {part:.1%} of these rounds the log lacks an expansion that the tree needs: these "
        "may have accepted more. Collect with nested support to remove that."
    ]


def static_section(figures: TraceFigures, replay: ReplayScores | None) -> Section:
    """The front of the static settings, and the replayed policies beside it."""
    points = figures.statics
    front = sorted((p for p in points if p.on_front), key=lambda p: p.verified_per_token.value)
    if not front:
        missing = "The log supports no setting of the grid. Collect deeper or wider."
        if figures.kind == "live":
            missing = (
                "Live traces hold the positions that one policy visited, so other settings cannot "
                "be replayed on them. Collect with --dense."
            )
        return Section("pareto", missing=missing)
    first, last = front[0], front[-1]
    enough = next(point for point in front if point.tau.value >= ENOUGH * last.tau.value)
    notes = [
        "The front was chosen on the prompts that it is shown for, so its lead over the settings "
        "beside it is flattered. Tokens are counted, not timed: specctl tune judges by time, on "
        "held-out prompts.",
    ]
    dropped = sum(not point.is_supported for point in points)
    if dropped:
        notes.append(
            f"{count(dropped, 'setting')} of {len(points)} left out of the front: the log holds "
            "every expansion they need in less than 99% of their rounds."
        )
    columns = {
        "setting": "label",
        "verified per output token": "verified_per_token:.2f",
        "τ (tokens per call)": "tau:.2f",
        "calls": "calls:,",
    }
    caption = "Every static setting of the grid, and the front of those that no other beats."
    return Section(
        "pareto",
        reading=f"{len(front)} of {count(len(points), 'setting')} are on the front, from "
        f"{first.label} (τ {first.tau.value:.2f}, {first.verified_per_token.value:.2f} verified "
        f"tokens per output token) to {last.label} (τ {last.tau.value:.2f}, "
        f"{last.verified_per_token.value:.2f}). {ENOUGH:.0%} of that τ is reached by "
        f"{enough.label} with {enough.verified_per_token.value:.2f}.",
        basis=f"n = {rows_of(figures)}, every setting walked over every request; {BY_PROMPT}.",
        figures=[Figure(caption, [_static_chart(points, front, replay)])],
        tables=[Table.of("Settings on the front", front, columns)],
        notes=notes,
        data=points,
    )


def _static_chart(
    points: Sequence[StaticPoint], front: Sequence[StaticPoint], replay: ReplayScores | None
) -> Chart:
    def series(label: str, shown: Sequence[StaticPoint], kind: Any, style: int) -> Series:
        x, y = [p.verified_per_token.value for p in shown], [p.tau.value for p in shown]
        return Series(label, x, y, kind=kind, style=style)

    policies = [] if replay is None else [policy.pooled for policy in replay.policies]
    replayed = Series.of(
        "replayed policies",
        [p.ratios["verified_per_token"].value for p in policies],
        [p.tau for p in policies],
        names=[p.policy.rpartition("/")[2] for p in policies],
        kind="points",
        style=1,
    )
    return Chart(
        f"Scatter of {len(points)} static settings, verified tokens per output token against mean "
        f"acceptance length, with the front of {len(front)} and {len(policies)} replayed policies. "
        "The table below lists the front.",
        "verified tokens per output token",
        "τ (tokens per call)",
        [
            series("static settings", points, "points", 6),
            series("front", front, "line", 0),
            *([replayed] if policies else []),
        ],
        height=400,
    )


def depth_section(figures: TraceFigures) -> Section:
    """Conditional and marginal acceptance by depth."""
    depths = figures.depths
    tree = "the logged tree" if figures.kind == "dense" else "the submitted trees"
    first, last = depths[0], depths[-1]
    known = [d for d in depths if d.conditional_prob.known]
    weakest = min(known or depths, key=lambda d: d.conditional_prob.value)
    notes = [
        "Where the text or the tree ended first, a depth is censored: it leaves the count at risk "
        "and is never a rejection. Marginal acceptance is the product of the conditional ones "
        "(Kaplan-Meier)."
    ]
    if figures.kind == "live":
        notes.append(
            "Counted where rounds started. A policy that drafts deeper where it is confident tries "
            "the deep levels of easy contexts only: their acceptance does not carry over."
        )
    conditional, marginal = (
        Series.of(label, [d.depth for d in depths], [getattr(d, name) for d in depths], style=style)
        for style, (name, label) in enumerate(
            (
                ("conditional_prob", "conditional: given the depth above"),
                ("marginal_prob", "marginal: down to this depth"),
            )
        )
    )
    chart = Chart(
        f"Line chart of acceptance probability by depth 1 to {len(depths)}: marginal from "
        f"{first.marginal_prob.value:.2f} to {last.marginal_prob.value:.2f}. The table below holds "
        "the values.",
        series=[conditional, marginal],
        **BY_DEPTH,
    )
    columns = {
        "depth": "depth",
        "at risk": "num_at_risk:,",
        "accepted": "num_accepted:,",
        "censored": "num_censored:,",
        "conditional": "conditional_prob:.3f",
        "marginal": "marginal_prob:.3f",
    }
    return Section(
        "depth",
        reading=f"Of the target's text, {tree} held the next token "
        f"{first.conditional_prob.text('.0%')} of the time, and all {last.depth} tokens ahead "
        f"{last.marginal_prob.text('.0%')}. Given that the path held so far, the weakest step is "
        f"depth {weakest.depth} at {weakest.conditional_prob.text('.0%')}.",
        basis=f"n = {rows_of(figures)}; {BY_PROMPT}.",
        figures=[Figure("Acceptance of the target's own path by draft depth.", [chart])],
        tables=[Table.of("Acceptance by depth", depths, columns)],
        notes=notes,
        data=depths,
    )


def category_section(figures: TraceFigures) -> Section:
    """Acceptance by category of prompts."""
    found = figures.categories
    if [category.name for category in found] == [""]:
        return Section(
            "category",
            missing="The prompts carry no category. Give each a category field and collect again.",
        )
    by_tau = sorted(found, key=lambda c: -c.tau.value if c.tau.known else 0.0)
    best, worst = by_tau[0], by_tau[-1]
    reading = f"All prompts are of one category, τ {best.tau.text('.2f')} tokens per call."
    if len(found) > 1:
        apart = best.tau.low > worst.tau.high
        verdict = "the intervals are apart" if apart else "the intervals overlap"
        reading = (
            f"Most is accepted in {_name(best)}, τ {best.tau.text('.2f')}, least in "
            f"{_name(worst)}, τ {worst.tau.text('.2f')} tokens per call; {verdict}."
        )
    few = [_name(category) for category in found if category.num_prompts < 10]
    drawn = sorted(found, key=lambda c: -c.num_rounds)[:MAX_LINES]
    series = []
    for style, category in enumerate(sorted(drawn, key=_name)):
        marginal = [d.marginal_prob.value for d in category.depths]
        x = [d.depth for d in category.depths]
        series.append(Series(_name(category), x, marginal, style=style))
    chart = Chart(
        f"Line chart of marginal acceptance by depth for {listed(_name(c) for c in drawn)}. "
        f"The table below holds τ of each.",
        series=series,
        **BY_DEPTH,
    )
    rows = [
        (
            _name(c),
            f"{c.num_prompts:,}",
            f"{c.num_rounds:,}",
            c.tau.text(".2f"),
            number(c.depths[0].conditional_prob if c.depths else None, ".0%"),
            c.mean_tcr.text(".1f"),
        )
        for c in found
    ]
    columns = ("category", "prompts", "rounds", "τ (tokens per call)", "first token", "mean TCR")
    return Section(
        "category",
        reading=reading,
        basis=f"n = {rows_of(figures)}; τ and TCR over {reference(figures)}; {BY_PROMPT}.",
        figures=[Figure("Marginal acceptance by depth and category.", [chart])],
        tables=[Table("By category", columns, rows)],
        notes=[f"Fewer than 10 prompts, so intervals are rough: {listed(few)}."] if few else [],
        data=found,
    )


def _name(category: CategoryFigures) -> str:
    return category.name or "(none)"


def phi_section(figures: TraceFigures) -> Section:
    """Whether Φ foretells acceptance."""
    found = figures.phi
    if found is None:
        return Section("phi", missing="No round carries Φ: nothing was drafted.")
    bins = found.bins
    first, last = bins[0], bins[-1]
    verdict = "The intervals overlap, so Φ does not tell easy contexts from hard ones here."
    if first.tau.low > last.tau.high:
        verdict = "Φ tells easy contexts from hard ones here."
    chart = Chart(
        f"Chart of mean acceptance length in {len(bins)} bins of phi, from "
        f"{first.tau.value:.2f} at {first.mean_phi:.1f} nats to {last.tau.value:.2f} at "
        f"{last.mean_phi:.1f} nats, with error bars.",
        "Φ (nats)",
        "τ (tokens per call)",
        [Series.of("", [b.mean_phi for b in bins], [b.tau for b in bins], kind="points")],
    )
    columns = {
        "Φ from (nats)": "low:.2f",
        "to (nats)": "high:.2f",
        "rounds": "num_rounds:,",
        "τ (tokens per call)": "tau:.2f",
    }
    return Section(
        "phi",
        reading=f"Rounds of the lowest Φ accept τ {first.tau.text('.2f')} tokens per call, those "
        f"of the highest {last.tau.text('.2f')}; Spearman's ρ {number(found.spearman)}. {verdict}",
        basis=f"n = {count(found.num_rounds, 'round')} of {reference(figures)} over "
        f"{count(figures.num_prompts, 'prompt')}; {found.num_left_out:,} left out (cut by the end "
        f"of the text, or of another depth); Φ over {count(found.depth, 'level')}; {BY_PROMPT}.",
        figures=[
            Figure(
                "τ in ten bins of equally many rounds, at their mean Φ. No figure of HeteroSpec: "
                "its Figure 4, above, has TCR on the x axis.",
                [chart],
            )
        ],
        tables=[Table.of("Bins of Φ", bins, columns)],
        notes=support_note(figures),
        data=found,
    )


def confidence_section(figures: TraceFigures) -> Section:
    """How well confidence separates accepted from rejected (arXiv:2604.09603, figure 2)."""
    nodes, layers = figures.confidence.nodes, figures.confidence.layers
    edges = figures.confidence.edges
    known = [layer for layer in layers if layer.auc.known]
    if not known:
        return Section(
            "confidence",
            missing="At every depth all rounds were accepted, or all rejected: there is nothing "
            "to tell apart. Collect more prompts.",
        )
    step = -(-len(known) // MAX_DEPTHS)
    best = max(known, key=lambda layer: layer.auc.value)
    worst = min(known, key=lambda layer: layer.auc.value)
    total = sum(n.num_accepted + n.num_rejected for n in nodes)
    worst_bin = max(n.auc_resolution for n in (*nodes, *layers) if isfinite(n.auc_resolution))
    aucs = Chart(
        "Line chart of AUC by depth, layer confidence and nodes; values in the table below.",
        "depth (levels)",
        "AUC",
        [
            Series.of(label, [s.depth for s in found], [s.auc for s in found], style=style)
            for style, (label, found) in enumerate((("layer", layers), ("nodes", nodes)))
        ],
        y_range=(0.4, 1.0),
        whole_x=True,
    )
    reached, accepted = ("reached", "not reached"), ("accepted", "rejected")
    return Section(
        "confidence",
        reading=f"A round's best joint probability tells best at depth {best.depth} whether the "
        f"text will reach it, AUC {best.auc.text('.2f')}, and worst at depth {worst.depth}, "
        f"{worst.auc.text('.2f')}: depths of high AUC are where a gate on confidence can work.",
        basis=f"n = {rows_of(figures)}, {count(total, 'node')} of known fate; {BY_PROMPT}.",
        figures=[
            Figure("How well each signal separates, by depth. 0.5 is chance.", [aucs]),
            Figure(
                "Layer confidence of rounds that reached the depth and of those that did not: "
                f"probability density in steps of {SHOWN_WIDTH}, cut at {MAX_DENSITY:g}.",
                [_separation_chart(layer, edges, *reached) for layer in known[::step]],
            ),
            Figure(
                "Joint probability of drafted nodes, accepted and rejected, drawn alike.",
                [_separation_chart(node, edges, *accepted) for node in nodes[::step]],
                ("ECHO", "Figure 2, which Figures 6 to 9 repeat for four pairs,"),
            ),
        ],
        tables=[
            _separation_table("Layer confidence, rounds", layers, *reached),
            _separation_table("Joint probability, nodes", nodes, *accepted),
        ],
        notes=[
            "Nodes: all drafted ones whose fate is known, most of them far from the target's path, "
            "which makes their AUC flattering. Layer: the largest joint probability of a depth, "
            "one a round, against whether the target's path reached that depth; ECHO gates on it.",
            f"Counted in {len(edges) - 1} fixed bins (steps of 0.01, finer below {SHOWN_WIDTH}); "
            f"binning moves no AUC by more than {worst_bin:.3f}.",
        ],
        data=figures.confidence,
    )


def density_chart(
    alt: str,
    x_label: str,
    counts: Mapping[str, Sequence[int]],
    edges: Sequence[float],
    **looks: Any,
) -> Chart:
    """Probability densities of counts in bins of [0, 1], drawn over each other."""
    middles = (np.arange(round(1 / SHOWN_WIDTH)) + 0.5) * SHOWN_WIDTH
    series = [
        Series(
            f"{name} (n={sum(of):,})",
            middles.tolist(),
            densities(of, edges).tolist(),
            kind="area",
            style=style,
        )
        for style, (name, of) in enumerate(counts.items())
    ]
    return Chart(alt, x_label, "density", series, x_range=PROBABILITY, **looks)


def _separation_chart(
    depth: Separation, edges: Sequence[float], accepted: str, rejected: str
) -> Chart:
    return density_chart(
        f"Depth {depth.depth}: densities of joint probability, {accepted} and {rejected}; AUC "
        f"{number(depth.auc.value)}.",
        f"joint probability, depth {depth.depth}",
        {accepted: depth.accepted, rejected: depth.rejected},
        edges,
        y_range=(0.0, MAX_DENSITY),
        width=THIRD,
        height=240,
    )


def densities(counts: Sequence[int], edges: Sequence[float]) -> np.ndarray:
    """`[50]` probability density in steps of `SHOWN_WIDTH`; 0 without counts."""
    step = (np.asarray(edges[:-1]) / SHOWN_WIDTH + 1e-6).astype(np.int64)
    shown = np.bincount(step, counts, round(1 / SHOWN_WIDTH))
    return np.asarray(shown / max(1.0, shown.sum()) / SHOWN_WIDTH)


def _separation_table(
    caption: str, found: Sequence[Separation], accepted: str, rejected: str
) -> Table:
    counts = {accepted: "num_accepted:,", rejected: "num_rejected:,", "unknown": "num_unknown:,"}
    return Table.of(caption, found, {"depth": "depth", **counts, "AUC": "auc:.3f"})
