"""Sections that repeat figures of the papers on the user's own traces; none without data.

HeteroSpec's terminal ranks, C2T's entropies, MARS's margins, AdaSD's thresholds. ECHO's confidence
is in `trace_sections`; what is drawn from results of other verbs is in `result_sections`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from specctl.formatting import Table, count, listed, number
from specctl.report.charts import BACKGROUND, HALF, THIRD, Cells, Chart, Rows, Series
from specctl.report.page import PAPERS, Figure, Section
from specctl.report.result_sections import BY_PROMPT, spread_table
from specctl.report.trace_sections import density_chart, reference, rows_of, support_note
from specctl.results import RankedRounds, Spread, StopThresholds, TargetMargins, TraceFigures

MAX_CATEGORIES = 3
"""Categories of which ranks are drawn; the table holds all."""


def tcr_section(figures: TraceFigures) -> Section:
    """Where accepted paths end in the order of confidence, and how long they are."""
    found = figures.ranks
    if found is None:
        return Section(
            "tcr",
            missing="No round accepted a draft token, so no accepted path ends anywhere. Collect "
            "with a drafter that fits the target.",
        )
    whole, p50, p90 = found.whole, found.whole.quantiles["p50"], found.whole.quantiles["p90"]
    shares, running, lengths, phis = _rank_charts(whole)
    drawn = found.categories[:MAX_CATEGORIES] if len(found.categories) > 1 else ()
    drawings = [
        Figure(
            "Where accepted paths end in the order of confidence.",
            [shares, running],
            ("HeteroSpec", "Figures 1c and 1e"),
        ),
        Figure(
            "Acceptance length, and the drafter's uncertainty Φ, by the rank where the path ends; "
            "the paper draws both over one axis.",
            [lengths, phis],
            ("HeteroSpec", "Figures 1d and 4"),
        ),
    ]
    notes = [
        "A path of d tokens never ranks above d, because its ancestors outrank it: a peak at "
        "the depth of the tree is the likeliest path accepted whole.",
    ]
    if drawn:
        caption = "The same for the categories with the most rounds."
        charts = [chart for one in drawn for chart in _rank_charts(one)[::2]]
        drawings.append(Figure(caption, charts, ("HeteroSpec", "Figure 3")))
    else:
        notes.append(
            "Figure 3 of HeteroSpec sets workloads side by side: collect prompts of several "
            "categories, or give their trace folders together."
        )
    top = [(f"top {name}", value.text(".0%")) for name, value in found.top_shares.items()]
    rows = [
        (
            one.name or "all",
            f"{one.num_prompts:,}",
            f"{one.num_rounds:,}",
            *(str(one.quantiles[name]) for name in ("p50", "p90")),
        )
        for one in (whole, *found.categories)
    ]
    return Section(
        "tcr",
        reading=f"{found.top_shares['25%'].text('.0%')} of accepted paths end within the top "
        f"quarter of the draft tokens submitted, by joint probability; half of them by rank {p50}, "
        f"90% by rank {p90} of {found.num_draft_tokens}.",
        basis=f"n = {count(whole.num_rounds, 'round')} with an accepted token, of "
        f"{reference(figures)} over {count(figures.num_prompts, 'prompt')}; "
        f"{count(found.num_empty, 'round')} accepted nothing, {found.num_cut:,} cut by the end of "
        f"the text left out; {BY_PROMPT}.",
        figures=drawings,
        tables=[
            Table(
                "Concentration",
                ("best part of the submitted tokens", "share of accepted paths that end in it"),
                top,
            ),
            Table(
                "Rounds by category",
                ("category", "prompts", "rounds", "half end by rank", "90% by"),
                rows,
            ),
        ],
        notes=[*notes, *support_note(figures)],
        data=found,
    )


def _rank_charts(found: RankedRounds) -> list[Chart]:
    """Share of rounds, cumulative share, acceptance length and Φ by terminal rank."""
    ranks = list(range(1, len(found.counts) + 1))
    shares = np.array(found.counts) / found.num_rounds
    lengths = [tau.value for tau in found.tau if tau.known]
    name = "" if found.name is None else f", {found.name}"
    drawn = (
        (
            f"Bar chart of the share of rounds, the largest {shares.max():.0%} at rank "
            f"{int(shares.argmax()) + 1}",
            "share of rounds",
            Series("", ranks, shares.tolist(), kind="bars"),
        ),
        (
            f"Chart of the cumulative share of rounds, half by rank {found.quantiles['p50']} and "
            f"90% by rank {found.quantiles['p90']}",
            "cumulative share",
            Series("", ranks, shares.cumsum().tolist(), kind="area"),
        ),
        (
            f"Chart of mean acceptance length, from {min(lengths):.2f} to {max(lengths):.2f} "
            "tokens, with error bars",
            "τ (tokens per call)",
            Series.of("", ranks, found.tau, kind="points"),
        ),
        ("Line chart of mean phi", "mean Φ (nats)", Series("", ranks, found.mean_phi)),
    )
    return [
        Chart(
            f"{alt}, by terminal confidence rank{name}.",
            f"TCR (rank){name}",
            y_label,
            [series],
            x_range=(0.0, len(ranks) + 1.0),
            whole_x=True,
            width=HALF,
            height=260,
        )
        for alt, y_label, series in drawn
    ]


def entropy_section(figures: TraceFigures) -> Section:
    """Probability and acceptance by entropy and rank (C2T, figure 2)."""
    found = figures.entropy_ranks
    if found is None:
        return Section(
            "entropy",
            missing="No draft token behind an accepted one has a known fate and a rank among its "
            "siblings (drafts that are drawn have none). specctl collect --dense logs them.",
        )
    prob, accepted = 100 * np.array(found.mean_prob), 100 * np.array(found.accepted_frac)
    bias, sizes = accepted - prob, np.array(found.num_nodes)
    names = [f"{low:g} to {high:g}" for low, high in pairwise(found.bounds)]
    names.append(f"from {found.bounds[-1]:g}")
    shown = np.flatnonzero(sizes.any(1))
    lowest, highest = shown[0], shown[-1]
    charts = [
        Cells(
            f"Heat map of {label}, by entropy and rank; the likeliest token has "
            f"{values[lowest, 0]:{spec}} at the lowest entropy and {values[highest, 0]:{spec}} at "
            "the highest.",
            f"{label}, by rank",
            "entropy (nats)",
            (),
            values=values[shown].tolist(),
            x_names=[str(rank + 1) for rank in range(values.shape[1])],
            y_names=[names[row] for row in shown],
            most=most,
            spec=spec,
            width=THIRD,
            height=260,
        )
        for label, values, most, spec in (
            ("mean probability (%)", prob, 100.0, ".0f"),
            ("accepted (%)", accepted, 100.0, ".0f"),
            ("difference (points)", bias, max(5.0, float(np.nanmax(np.abs(bias)))), "+.0f"),
        )
    ]
    rows = [
        (
            names[row],
            f"{sizes[row].sum():,}",
            *(f"{values[row, 0]:.1f}" for values in (prob, accepted)),
            f"{bias[row, 0]:+.1f}",
        )
        for row in shown
    ]
    columns = ("entropy (nats)", "draft tokens", "likeliest: probability", "accepted", "difference")
    return Section(
        "entropy",
        reading=f"Where the drafter's entropy is lowest ({names[lowest]} nats) its likeliest token "
        f"has probability {prob[lowest, 0]:.0f}% and is accepted {accepted[lowest, 0]:.0f}% of the "
        f"time, {bias[lowest, 0]:+.1f} points; where it is highest ({names[highest]} nats) "
        f"{prob[highest, 0]:.0f}% and {accepted[highest, 0]:.0f}%, {bias[highest, 0]:+.1f} points.",
        basis=f"n = {rows_of(figures)}, {count(int(sizes.sum()), 'draft token')} whose parent was "
        "accepted and whose own fate is known.",
        figures=[
            Figure(
                "Draft tokens by the entropy of the distribution that they come from and by their "
                "rank in it: the drafter's probability given the parent, the share accepted given "
                "that the parent was, and the second less the first.",
                charts,
                ("C2T", "Figure 2"),
            )
        ],
        tables=[Table("By entropy (percent, points)", columns, rows)],
        notes=["The paper does not print the bounds of its seven intervals; these are ours."],
        data=found,
    )


def margin_section(figures: TraceFigures) -> Section:
    """The target's two best logits (MARS, figures 1 and 5)."""
    found = figures.margins
    if found is None:
        return Section(
            "margins",
            missing="The traces hold no logits of the target behind drafts whose rank is known. "
            "specctl collect logs them, with --dense at every position.",
        )
    kinds = (("above", found.low_ranks), ("others", found.other_ranks))
    rows = [
        (name, f"{num:,}", *(number(n / num if num else None, ".1%") for n in ranks))
        for name, ranks in kinds
        for num in (sum(ranks),)
    ]
    columns = (f"z2 / z1 above {found.theta:g}", "positions", "the best", "the second", "lower")
    negative, undefined = (
        f"{n / found.num_positions:.1%}" for n in (found.num_negative, found.num_undefined)
    )
    return Section(
        "margins",
        reading=f"At {found.low_margin.text('.0%')} of the positions the target's two best logits "
        f"are close, z2 / z1 above {found.theta:g}: there the drafter's likeliest token is the "
        f"target's second in {rows[0][3]}, which relaxed acceptance keeps; elsewhere in "
        f"{rows[1][3]}.",
        basis=f"n = {count(figures.num_prompts, 'prompt')}; "
        f"{count(found.num_positions, 'position')} with both logits, of which the scatter plots "
        f"show {len(found.sample):,}, drawn at random.",
        figures=[
            Figure(
                "The target's two best tokens, by logit z and probability p. Relaxed: accepted by "
                "relaxation alone, the drafter's token is the second and z2 / z1 is above the "
                "threshold. The last drawing holds only positions above it.",
                _scatters(found),
                ("MARS", "Figure 1"),
            ),
            Figure(
                "The target's best logit, and second over best, of logits and of probabilities.",
                _histograms(found),
                ("MARS", "Figure 5"),
            ),
        ],
        tables=[Table("Rank that the target gives to the drafter's token", columns, rows)],
        notes=[
            f"The best logit is negative at {negative} of the positions; at {undefined} one of the "
            "two is not above 0, so that their ratio says nothing. Relaxed acceptance is lossy: "
            "specctl fit mars certifies a threshold.",
        ],
        data=found,
    )


def _scatters(found: TargetMargins) -> list[Chart]:
    first, second, prob, rank = np.array(found.sample, float).T
    share = np.exp(second - first)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(second > 0, second / first, np.nan)
    low = ratio > found.theta
    relaxed = low & (rank == 2)
    others = (("others", ~relaxed, BACKGROUND), ("relaxed", relaxed, 1))
    fates = (
        ("rejected: lower", low & (rank > 2), 1),
        ("kept: best or second", low & (rank < 3), 2),
    )
    charts = []
    for x_label, x, y_label, y, groups in (
        ("best logit z1", first, "second logit z2", second, others),
        ("best probability p1", prob, "second probability p2", prob * share, others),
        ("ratio z2 / z1", ratio, "ratio p2 / p1", share, others),
        (f"ratio z2 / z1 above {found.theta:g}", ratio, "ratio p2 / p1", share, fates),
    ):
        known = np.isfinite(x) & np.isfinite(y)
        drawn = [
            Series(name, x[inside].tolist(), y[inside].tolist(), kind="dots", style=style)
            for name, inside, style in ((name, known & here, style) for name, here, style in groups)
            if inside.any()
        ]
        if drawn:
            sizes = listed(f"{len(one.x)} {one.label}" for one in drawn)
            alt = f"Scatter plot of {y_label} against {x_label}: {sizes}."
            charts.append(Chart(alt, x_label, y_label, drawn, width=HALF))
    return charts


def _histograms(found: TargetMargins) -> list[Chart]:
    steps = np.linspace(0, 1, len(found.logit_ratios) + 1)
    return [
        Chart(
            f"Histogram of {name} with a line at {limit:g}; the fullest bin holds {max(counts):,} "
            f"of {count(sum(counts), 'position')}.",
            name,
            "positions",
            [
                Series(
                    "", [(low + high) / 2 for low, high in pairwise(edges)], counts, kind="bars"
                ),
                Series(f"{limit:g}", [limit], [0.0], kind="limit", style=1),
            ],
            width=THIRD,
            height=260,
        )
        for name, edges, counts, limit in (
            ("best logit z1", found.logit_edges, found.logits, 0.0),
            ("ratio z2 / z1", steps, found.logit_ratios, found.theta),
            ("ratio p2 / p1", steps, found.prob_ratios, found.theta),
        )
        if any(counts)
    ]


def threshold_section(figures: TraceFigures) -> Section:
    """AdaSD's signals and its threshold as it moves (AdaSD, figures 2 and 3, section 4.3)."""
    found = figures.thresholds
    if found is None:
        return Section(
            "thresholds",
            missing="Live traces hold the rounds of one policy, so AdaSD's cannot be replayed on "
            "them. Collect with --dense.",
        )
    fates = {"accepted": found.accepted, "first rejected": found.rejected}
    drawings, measured = [], []
    spreads: dict[str, Spread] = {}
    for signal, unit in (("entropy", "nats"), ("distance", "√bit")):
        by_fate = {name: getattr(fate, signal) for name, fate in fates.items()}
        boxes = {name: spread for name, spread in by_fate.items() if spread is not None}
        spreads |= {f"{signal} ({unit}), {name}": spread for name, spread in boxes.items()}
        if boxes:
            measured.append(Rows.boxes(f"mean {signal} of a request ({unit})", boxes))
    if measured:
        caption = (
            "Mean of each request over the tokens that verification accepted, and over the first "
            "rejected ones. Whiskers 5 to 95%, diamond the mean."
        )
        drawings.append(Figure(caption, measured, ("AdaSD", "Figure 2")))
    notes = [
        "The threshold of the relaxed acceptance is not drawn: it changes the text, so a log of "
        "the target's own text does not tell it.",
    ]
    distances = {name: fate.distances for name, fate in fates.items()}
    if any(map(any, distances.values())):
        chart = density_chart(
            "Densities of the Jensen-Shannon distance of drafter and target.",
            "Jensen-Shannon distance (√bit)",
            distances,
            np.linspace(0, 1, len(found.accepted.distances) + 1).tolist(),
        )
        caption = "How far the drafter's distribution is from the target's at these tokens."
        drawings.append(Figure(caption, [chart], ("AdaSD", "Figure 3")))
    else:
        notes.append("The log holds no js_distance; specctl collect --dense logs it.")
    reading = "No request learned a threshold: none rejected a token before its last round."
    medians = [value for value in found.quartiles[1] if np.isfinite(value)]
    if medians:
        drawings.append(
            Figure(
                "The drafting threshold of requests as their answers grow: the median and the "
                "quartiles of those that have one, and single requests. The rule is section 4.3 "
                f"of AdaSD, {PAPERS['AdaSD']}; the paper draws no such figure.",
                [_path_chart(found, medians)],
            )
        )
        accepted, rejected = (number(f.entropy and f.entropy.mean) for f in fates.values())
        reading = (
            f"Accepted tokens were drafted at a mean entropy of {accepted} nats, first rejected "
            f"ones at {rejected}; the median threshold ends at {medians[-1]:.2f}."
        )
    if found.num_unsupported:
        part = found.num_unsupported / found.num_rounds
        notes.append(f"In {part:.1%} of the rounds the log ends before the rule would stop.")
    return Section(
        "thresholds",
        reading=reading,
        basis=f"n = {count(figures.num_prompts, 'prompt')}, "
        f"{count(found.num_requests, 'request')}, {count(found.num_rounds, 'round')} of "
        f"{found.policy}, replayed; {found.accepted.num_tokens:,} accepted and "
        f"{found.rejected.num_tokens:,} first rejected tokens.",
        figures=drawings,
        tables=[spread_table("Tokens that were tested, a mean a request", spreads)],
        notes=notes,
        data=found,
    )


def _path_chart(found: StopThresholds, medians: list[float]) -> Chart:
    low, middle, high = found.quartiles
    paths = [
        Series(f"request {place}", found.positions, path, style=3 + place)
        for place, path in enumerate(found.paths, start=1)
    ]
    return Chart(
        f"Line chart of the entropy threshold by position in the answer: its median goes from "
        f"{medians[0]:.2f} to {medians[-1]:.2f} nats.",
        "tokens of the answer",
        "threshold (nats)",
        [Series("median, quartiles", found.positions, middle, low, high), *paths],
    )
