"""Sections on traces: acceptance by depth and by category."""

from __future__ import annotations

from typing import Any

from specctl.formatting import Table, count, listed, number
from specctl.replay.acceptance import CategoryFigures, TraceFigures
from specctl.report.charts import Chart, Series
from specctl.report.page import Figure, Section
from specctl.report.result_sections import BY_PROMPT
from specctl.stats import MIN_PROMPTS

MAX_LINES = 6
"""Categories drawn as lines; the table holds all."""
BY_DEPTH: dict[str, Any] = {
    "x_label": "depth (levels)", "y_label": "probability", "y_range": (0.0, 1.0), "whole_x": True,
}  # fmt: skip
"""Settings of a chart of probabilities by depth."""


def rows_of(figures: TraceFigures) -> str:
    """The number of prompts and rows, in words."""
    noun = "position" if figures.kind == "dense" else "round"
    return f"{count(figures.num_prompts, 'prompt')}, {count(figures.num_rows, noun)}"


def depth_section(figures: TraceFigures) -> Section:
    """Conditional and marginal acceptance by depth."""
    depths = figures.depths
    tree = "the logged tree" if figures.kind == "dense" else "the submitted trees"
    judged = [d for d in depths if d.conditional_prob.is_bounded]
    first, further = depths[0], ""
    if judged:
        last, weakest = judged[-1], min(judged, key=lambda d: d.conditional_prob.value)
        further = (
            f", and all {count(last.depth, 'token')} ahead {last.marginal_prob.text('.0%')}. Given "
            f"that the path held so far, the weakest step is depth {weakest.depth} at "
            f"{weakest.conditional_prob.text('.0%')}"
        )
    deepest = depths[-1].marginal_prob.value
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
        f"{first.marginal_prob.value:.2f} to {deepest:.2f}. The table below holds "
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
        f"{first.conditional_prob.text('.0%')} of the time{further}.",
        basis=f"n = {rows_of(figures)}; {BY_PROMPT}.",
        figures=[Figure("Acceptance of the target's own path by draft depth.", chart)],
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
    judged = sorted((c for c in found if c.tau.is_bounded), key=lambda c: -c.tau.value)
    reading = f"Fewer than two categories have {MIN_PROMPTS} prompts, so none are compared."
    if len(found) == 1:
        reading = f"All prompts are of one category, τ {found[0].tau.text('.2f')} tokens per call."
    elif len(judged) > 1:
        best, worst = judged[0], judged[-1]
        apart = best.tau.low > worst.tau.high
        verdict = "the intervals are apart" if apart else "the intervals overlap"
        reading = (
            f"Most is accepted in {_name(best)}, τ {best.tau.text('.2f')}, least in "
            f"{_name(worst)}, τ {worst.tau.text('.2f')} tokens per call; {verdict}."
        )
        if len(judged) > 2:
            reading += (
                f" Each interval is by itself: of {len(judged)} categories the highest and the "
                "lowest may be apart by chance."
            )
    few = [_name(category) for category in found if not category.tau.is_bounded]
    words = f"Fewer than {MIN_PROMPTS} prompts, so without intervals and not compared"
    rough = [f"{words}: {listed(few)}."] if few else []
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
    of = f"{count(figures.num_reference, 'live round')} with a draft"
    if figures.tree is not None:
        of = f"{count(figures.num_reference, 'round')} of {figures.tree}, replayed"
    if figures.num_unsupported:
        rough.append(
            f"In {figures.num_unsupported / figures.num_reference:.1%} of these rounds the log "
            "lacks an expansion that the tree needs: these may have accepted more. Collect with "
            "nested support to remove that."
        )
    rows = [
        (
            _name(c),
            f"{c.num_prompts:,}",
            f"{c.num_rounds:,}",
            c.tau.text(".2f"),
            number(c.depths[0].conditional_prob if c.depths else None, ".0%"),
        )
        for c in found
    ]
    columns = ("category", "prompts", "rounds", "τ (tokens per call)", "first token")
    return Section(
        "category",
        reading=reading,
        basis=f"n = {rows_of(figures)}; τ over {of}; {BY_PROMPT}.",
        figures=[Figure("Marginal acceptance by depth and category.", chart)],
        tables=[Table("By category", columns, rows)],
        notes=rough,
        data=found,
    )


def _name(category: CategoryFigures) -> str:
    return category.name or "(none)"
