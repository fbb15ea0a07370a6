"""Sections on what was accepted: by depth and by category."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specctl.replay.report.chart import Chart, Series
from specctl.replay.report.depths import DepthAcceptance
from specctl.replay.report.evidence import CategoryFigures, Evidence
from specctl.replay.report.page import Figure, Section, Table
from specctl.replay.report.words import (
    BY_PROMPT,
    NOTHING,
    PROBABILITY,
    listed,
    plain,
    reference_words,
    rows_words,
    share,
    span,
)

MAX_LINES = 6
"""Categories drawn as lines; the table holds all."""


def depth_section(evidence: Evidence) -> Section:
    depths = evidence.depths
    tree = "the logged tree" if evidence.kind == "dense" else "the submitted trees"
    first, last = depths[0], depths[-1]
    fall = max(depths, key=lambda d: -_or(d.conditional_prob.value, 1.0))
    reading = (
        f"Of what the target wrote, {tree} held the next token "
        f"{share(first.conditional_prob)} of the time, and all {last.depth} tokens ahead "
        f"{share(last.marginal_prob)}. Given that the path held so far, the weakest step is depth "
        f"{fall.depth} at {share(fall.conditional_prob)}."
    )
    notes = [
        "Where the text or the tree ended first, a depth is censored: it leaves the count at risk "
        "and is never a rejection. Marginal acceptance is the product of the conditional ones "
        "(Kaplan-Meier)."
    ]
    if evidence.kind == "live":
        notes.append(
            "Counted where rounds started. A policy that drafts deeper where it is confident asks "
            "the deep levels of easy contexts only: their acceptance does not carry over."
        )
    return Section(
        "depth",
        "Acceptance by depth",
        reading=reading,
        basis=f"n = {rows_words(evidence)}; {BY_PROMPT}.",
        figures=[
            Figure("Acceptance of the target's own path by draft depth.", [_survival(depths)])
        ],
        tables=[_depth_table(depths)],
        notes=notes,
        data=plain(depths),
    )


def _survival(depths: Sequence[DepthAcceptance]) -> Chart:
    x = [d.depth for d in depths]
    kinds = (
        ("conditional: given the depth above", [d.conditional_prob for d in depths]),
        ("marginal: down to this depth", [d.marginal_prob for d in depths]),
    )
    series = [
        Series(
            label,
            x,
            [i.value for i in values],
            [i.low for i in values],
            [i.high for i in values],
            style=style,
        )
        for style, (label, values) in enumerate(kinds)
    ]
    ends = depths[0].marginal_prob.value, depths[-1].marginal_prob.value
    alt = (
        f"Line chart of acceptance probability by depth 1 to {len(depths)}: marginal from "
        f"{ends[0]:.2f} to {ends[1]:.2f}. The table below holds the values."
    )
    return Chart(alt, "depth (levels)", "probability", series, y_range=PROBABILITY, whole_x=True)


def _depth_table(depths: Sequence[DepthAcceptance]) -> Table:
    return Table(
        "Acceptance by depth",
        ("depth", "at risk", "accepted", "censored", "conditional", "marginal"),
        [
            (
                str(d.depth),
                f"{d.num_at_risk:,}",
                f"{d.num_accepted:,}",
                f"{d.num_censored:,}",
                span(d.conditional_prob, ".3f"),
                span(d.marginal_prob, ".3f"),
            )
            for d in depths
        ],
    )


def _or(value: float, other: float) -> float:
    return value if np.isfinite(value) else other


def category_section(evidence: Evidence) -> Section:
    found = evidence.categories
    if [category.name for category in found] == [""]:
        return Section(
            "category",
            "Acceptance by category",
            missing="The prompts carry no category. Give each a category field and collect again.",
        )
    by_tau = sorted(found, key=lambda c: -_or(c.tau.value, 0.0))
    best, worst = by_tau[0], by_tau[-1]
    reading = f"All prompts are of one category, τ {span(best.tau)} tokens per call."
    if len(found) > 1:
        apart = best.tau.low > worst.tau.high
        verdict = "the intervals are apart" if apart else "the intervals overlap"
        reading = (
            f"Most is accepted in {_name(best)}, τ {span(best.tau)}, least in {_name(worst)}, "
            f"τ {span(worst.tau)} tokens per call; {verdict}."
        )
    basis = f"n = {rows_words(evidence)}; τ and TCR over {reference_words(evidence)}; {BY_PROMPT}."
    return Section(
        "category",
        "Acceptance by category",
        reading=reading,
        basis=basis,
        figures=[Figure("Marginal acceptance by depth and category.", [_by_category(found)])],
        tables=[_category_table(found)],
        notes=_few_prompts(found),
        data=plain(found),
    )


def _name(category: CategoryFigures) -> str:
    return category.name or "(none)"


def _few_prompts(categories: Sequence[CategoryFigures]) -> list[str]:
    few = [_name(category) for category in categories if category.num_prompts < 10]
    return [f"Fewer than 10 prompts, so intervals are rough: {listed(few)}."] if few else []


def _by_category(categories: Sequence[CategoryFigures]) -> Chart:
    drawn = sorted(categories, key=lambda c: -c.num_rounds)[:MAX_LINES]
    series = [
        Series(
            _name(category),
            [d.depth for d in category.depths],
            [d.marginal_prob.value for d in category.depths],
            style=style,
        )
        for style, category in enumerate(sorted(drawn, key=_name))
    ]
    alt = (
        f"Line chart of marginal acceptance by depth for {listed(_name(c) for c in drawn)}. "
        f"The table below holds τ of each."
    )
    return Chart(alt, "depth (levels)", "probability", series, y_range=PROBABILITY, whole_x=True)


def _category_table(categories: Sequence[CategoryFigures]) -> Table:
    return Table(
        "By category",
        ("category", "prompts", "rounds", "τ (tokens per call)", "first token", "mean TCR"),
        [
            (
                _name(c),
                f"{c.num_prompts:,}",
                f"{c.num_rounds:,}",
                span(c.tau),
                share(c.depths[0].conditional_prob) if c.depths else NOTHING,
                span(c.mean_tcr, ".1f"),
            )
            for c in categories
        ],
    )
