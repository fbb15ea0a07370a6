"""`fit survival`: a table of acceptance, by the drafter's probability and what the text repeats.

    logged nodes ─read_sides─► rows ─count─► cells ─shrink, isotonic─► AcceptanceTable

A node's *survival*, the probability that its whole path is accepted, is the product of the table's
cells along the path. The policy is the marginal rule on it: a node is verified and expanded iff its
survival is worth its time, and a level is drafted iff the survival of all nodes that it would
expand is (`JointThreshold`, docs/ladder.md). The thresholds depend on a clock, so `specctl tune`
finds them under a cost model; here they are options.

A cell estimates acceptance among the children of accepted nodes. A cell with few nodes is shrunk
to its group (on a copy, beside a copy, no copy), and a group to all nodes. Weighted isotonic
regression makes acceptance rise with the drafter's probability in every row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specctl.errors import UsageError
from specctl.features import SUFFIX_TOKENS
from specctl.formatting import Table
from specctl.logs.node_sample import LoggedNodes, NodeRows
from specctl.logs.positions import Floats
from specctl.policy import AcceptanceTable
from specctl.train.configs import SurvivalConfig
from specctl.train.report import Fit
from specctl.train.scored import ScoredReport, judge, read_sides, scored_figures, scored_fit

LEAST, MOST = 1e-4, 1 - 1e-4
"""Bounds of a cell's acceptance, since no count proves 0 or 1."""
FAINTEST = -20.0
"""Lower log-probabilities fall into the first bin."""
GROUPS = {
    "beside a copy": slice(0, SUFFIX_TOKENS),
    "no copy": slice(SUFFIX_TOKENS, SUFFIX_TOKENS + 1),
    "on a copy": slice(SUFFIX_TOKENS + 1, None),
}
"""Rows of the table that share an estimate, by their `copy_length`."""


class SurvivalReport(ScoredReport):
    """`report.json` of a fit."""

    config: SurvivalConfig
    accepted: dict[str, float | None]  # share of the training nodes, by group; null without nodes


class Counts(NamedTuple):
    """Accepted and all training nodes of each cell, `[2 · SUFFIX_TOKENS + 1, bins]`."""

    accepted: Floats
    all: Floats

    def of(self, rows: slice) -> Counts:
        """Sums of some rows, `[bins]`."""
        return Counts(self.accepted[rows].sum(0), self.all[rows].sum(0))


def fit_survival(
    source: LoggedNodes, prompt_ids: Iterable[str], config: SurvivalConfig
) -> Fit[SurvivalReport]:
    """Fits the table on training prompts; reports on held-out ones.

    Raises:
        UsageError: the traces lack the text, or all draft probabilities are equal.
        TraceEmptyError: too few prompts, or labels of one kind.
    """
    sides = read_sides(source, prompt_ids, config)
    scorer, counts = fit_table(sides.train, num_bins=config.num_bins, weight=config.weight)
    judged = judge(source, scorer, config, sides.split)
    shares = {}
    for name, rows in GROUPS.items():
        accepted, number = (float(part.sum()) for part in counts.of(rows))
        shares[name] = accepted / number if number else None
    figures = scored_figures(scorer, sides, judged)
    data = SurvivalReport(**figures, accepted=shares)
    cells = [
        (name, f"{counts.of(rows).all.sum():.0f}", "-" if share is None else f"{share:.3f}")
        for (name, rows), share in zip(GROUPS.items(), shares.values(), strict=True)
    ]
    legend = "children of accepted nodes of the training prompts; copies are longest earlier "
    legend += f"matches of the text's end, up to {SUFFIX_TOKENS} tokens"
    heads = ("node", "number", "accepted")
    table = Table("Acceptance by copy", heads, cells, legend, is_detail=True)
    words = f"A table of {len(scorer.log_odds)} x {len(scorer.edges) + 1} cells"
    return scored_fit(data, scorer, sides, "survival", "Survival policy", words, (table,))


def fit_table(rows: NodeRows, *, num_bins: int, weight: float) -> tuple[AcceptanceTable, Counts]:
    """The table of rows with features `draft_logp` and `copy_length`."""
    logp, copied = rows.features.T
    edges = bin_edges(logp, logp[rows.accepted], num_bins)
    place = (copied.astype(np.int64) + SUFFIX_TOKENS, np.searchsorted(edges, logp))
    shape = (2 * SUFFIX_TOKENS + 1, len(edges) + 1)
    accepted, number = np.zeros(shape), np.zeros(shape)
    np.add.at(accepted, place, rows.weight * rows.accepted)
    np.add.at(number, place, rows.weight)
    counts = Counts(accepted, number)
    everywhere = rising(counts.of(slice(None)), np.zeros(shape[1]), 0.0)
    prob = np.empty(shape)
    for group in GROUPS.values():
        together = rising(counts.of(group), everywhere, weight)
        for row in range(shape[0])[group]:
            prob[row] = rising(Counts(accepted[row], number[row]), together, weight)
    log_odds = np.log(prob) - np.log1p(-prob)
    floats = tuple(tuple(row) for row in log_odds.tolist())
    return AcceptanceTable(edges=tuple(edges.tolist()), log_odds=floats), counts


def bin_edges(logp: Floats, of_accepted: Floats, num_bins: int) -> Floats:
    """Edges at quantiles of all nodes and of the accepted ones, float32, ascending."""
    inner = np.linspace(0, 1, num_bins // 2 + 1)[1:-1] if num_bins > 3 else np.array([0.5])
    parts = [np.quantile(one[one > FAINTEST], inner) for one in (logp, of_accepted)]
    edges = np.unique(np.concatenate(parts).astype(np.float32))
    edges = edges[edges < float(logp.max())]  # else the last bin is empty
    if len(edges) == 0:
        raise UsageError(
            "all accepted nodes of the traces have one draft probability, which separates nothing",
            hint="collect traces of more prompts",
        )
    ascending: Floats = edges.astype(np.float64)
    return ascending


def rising(counts: Counts, prior: Floats, weight: float) -> Floats:
    """`[bins]` non-decreasing acceptance in [`LEAST`, `MOST`].

    Args:
        prior: `[bins]`, which counts as `weight` nodes in every bin.
    """
    from sklearn.isotonic import IsotonicRegression

    total = counts.all + weight
    share = np.divide(
        counts.accepted + weight * prior, total, out=np.zeros(len(total)), where=total > 0
    )
    model = IsotonicRegression(y_min=LEAST, y_max=MOST)
    places = np.arange(len(total))
    found: Floats = model.fit(places, share, sample_weight=np.maximum(total, 1e-9)).predict(places)
    return found
