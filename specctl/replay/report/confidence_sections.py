"""The section on confidence: where accepted and rejected part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specctl.replay.report.chart import Chart, Series
from specctl.replay.report.confidence import EDGES, SHOWN_WIDTH, Separation, densities
from specctl.replay.report.evidence import Evidence
from specctl.replay.report.page import Figure, Section, Table
from specctl.replay.report.words import (
    BY_PROMPT,
    PROBABILITY,
    count,
    number,
    plain,
    rows_words,
    span,
)

MAX_DENSITY = 12.0
"""Top of the densities' axis, per unit of probability."""


def confidence_section(evidence: Evidence) -> Section:
    nodes, layers = evidence.confidence.nodes, evidence.confidence.layers
    known = [layer for layer in layers if np.isfinite(layer.auc.value)]
    title = "Confidence of accepted and rejected nodes"
    if not known:
        return Section(
            "confidence",
            title,
            missing="At every depth all rounds were accepted, or all rejected: there is nothing "
            "to tell apart. Collect more prompts.",
        )
    best = max(known, key=lambda layer: layer.auc.value)
    worst = min(known, key=lambda layer: layer.auc.value)
    reading = (
        f"A round's best joint probability tells best at depth {best.depth} whether the text will "
        f"reach it, AUC {span(best.auc)}, and worst at depth {worst.depth}, {span(worst.auc)}: "
        "depths of high AUC are where a gate on confidence can work."
    )
    total = sum(n.num_accepted + n.num_rejected for n in nodes)
    worst_bin = max(n.auc_resolution for n in (*nodes, *layers) if np.isfinite(n.auc_resolution))
    notes = [
        "Nodes: all drafted ones whose fate is known, most of them far from the target's path, "
        "which makes their AUC flattering. Layer: the largest joint probability of a depth, one a "
        "round, against whether the target's path reached that depth; ECHO gates on it.",
        f"Counted in {len(EDGES) - 1} fixed bins (steps of 0.01, finer below {SHOWN_WIDTH}); "
        f"binning moves no AUC by more than {worst_bin:.3f}.",
    ]
    return Section(
        "confidence",
        title,
        reading=reading,
        basis=f"n = {rows_words(evidence)}, {count(total, 'node')} of known fate; {BY_PROMPT}.",
        figures=[
            Figure("How well each signal separates, by depth. 0.5 is chance.", [_aucs(evidence)]),
            Figure(
                "Layer confidence of rounds that reached the depth and of those that did not: "
                f"probability density in steps of {SHOWN_WIDTH}, cut at {MAX_DENSITY:g}.",
                [_density(layer, "reached", "not reached") for layer in known],
            ),
            Figure(
                "Joint probability of drafted nodes, accepted and rejected, drawn alike.",
                [_density(node, "accepted", "rejected") for node in nodes],
            ),
        ],
        tables=[
            _separation_table("Layer confidence, rounds", layers, ("reached", "not reached")),
            _separation_table("Joint probability, nodes", nodes, ("accepted", "rejected")),
        ],
        notes=notes,
        data={"edges": EDGES.tolist(), "nodes": plain(nodes), "layers": plain(layers)},
    )


def _aucs(evidence: Evidence) -> Chart:
    kinds = (("layer", evidence.confidence.layers), ("nodes", evidence.confidence.nodes))
    series = [
        Series(
            label,
            [s.depth for s in found],
            [s.auc.value for s in found],
            [s.auc.low for s in found],
            [s.auc.high for s in found],
            style=style,
        )
        for style, (label, found) in enumerate(kinds)
    ]
    alt = "Line chart of AUC by depth, layer confidence and nodes; values in the table below."
    return Chart(alt, "depth (levels)", "AUC", series, y_range=(0.4, 1.0), whole_x=True)


def _density(depth: Separation, accepted: str, rejected: str) -> Chart:
    middles = (np.arange(round(1 / SHOWN_WIDTH)) + 0.5) * SHOWN_WIDTH
    sides = ((accepted, depth.accepted, 0), (rejected, depth.rejected, 1))
    series = [
        Series(
            f"{label} (n={sum(counts):,})",
            middles.tolist(),
            densities(counts).tolist(),
            kind="area",
            style=style,
        )
        for label, counts, style in sides
    ]
    alt = (
        f"Depth {depth.depth}: densities of joint probability, {accepted} and {rejected}; AUC "
        f"{number(depth.auc.value)}."
    )
    return Chart(
        alt,
        f"joint probability, depth {depth.depth}",
        "density",
        series,
        x_range=PROBABILITY,
        y_range=(0.0, MAX_DENSITY),
        width=340,
        height=240,
    )


def _separation_table(caption: str, found: Sequence[Separation], names: tuple[str, str]) -> Table:
    return Table(
        caption,
        ("depth", *names, "unknown", "AUC"),
        [
            (
                str(s.depth),
                f"{s.num_accepted:,}",
                f"{s.num_rejected:,}",
                f"{s.num_unknown:,}",
                span(s.auc, ".3f"),
            )
            for s in found
        ],
    )
