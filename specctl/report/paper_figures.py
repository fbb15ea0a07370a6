"""Figures of the five papers, drawn from the user's own traces and results; none without data.

Each caption names the paper's figure. What they are computed from is in `specctl.results`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from specctl.formatting import Table, count, listed, number
from specctl.report.charts import Cells, Chart, Row, Rows, Series
from specctl.report.page import Figure, Section
from specctl.results import (
    EntropyRanks,
    RankProfile,
    ReplayScores,
    RunScores,
    Spread,
    StopThresholds,
    TargetMargins,
    TraceFigures,
)

PAPERS = {
    "HeteroSpec": "arXiv:2505.13254",
    "C2T": "arXiv:2502.13652",
    "ECHO": "arXiv:2604.09603",
    "MARS": "arXiv:2601.15498",
    "AdaSD": "arXiv:2512.11280",
}
PARTS = {"draft_us": "draft", "verify_us": "verify", "policy_us": "policy", "other_us": "other"}
"""Times of rounds by field, and in words."""
MAX_CATEGORIES = 3
"""Categories drawn; the table holds all."""
WIDTHS = {1: 640, 2: 460, 3: 340, 4: 460}
"""Of charts by their number; more stand three in a row."""
PROBABILITY = (0.0, 1.0)


def like(figures: str, paper: str) -> str:
    """The end of a caption: the paper's figure that it shows again."""
    noun = "" if figures.startswith("Table") else "Figures " if " " in figures else "Figure "
    return f"As {noun}{figures} of {paper}, {PAPERS[paper]}."


def beside(caption: str, charts: Sequence[Chart]) -> Figure:
    """Charts side by side, each as wide as there is room."""
    width = WIDTHS.get(len(charts), 340)
    return Figure(caption, [replace(chart, width=width) for chart in charts])


# ----------------------------------------------------------------- of results


def runtime_figure(run: RunScores) -> Figure:
    """Shares of the rounds' time (HeteroSpec, figure 1b)."""
    rows, verified = [], []
    for one in run.policies:
        times = [getattr(one, name) for name in PARTS]
        shares = [time / max(sum(times), 1e-9) for time in times]
        rows.append(Row(one.policy, shares))
        verified.append(f"{one.policy} {shares[1]:.0%}")
    chart = Rows.of(
        f"Stacked bars of the shares of drafting, verification, decisions and the rest in the time "
        f"of rounds. Verification: {', '.join(verified)}.",
        "share of the rounds' time",
        rows,
        legend=tuple(PARTS.values()),
        x_range=PROBABILITY,
    )
    caption = "Where the time of rounds goes; the reading of prompts is left out."
    return Figure(f"{caption} {like('1b', 'HeteroSpec')}", [chart])


def utilisation_figure(replay: ReplayScores) -> Figure | None:
    """Box plots of utilisation per request (ECHO, figure 4); None where nothing was drafted."""
    policies = [policy for policy in replay.policies if policy.pooled.utilisation is not None]
    if not policies:
        return None
    groups = sorted(policies[0].by_category, key=lambda f: -f.num_requests)
    names = [f.group for f in groups[:MAX_CATEGORIES]] if len(groups) > 1 else []
    charts = []
    for name in (None, *names):
        rows = []
        for style, policy in enumerate(policies):
            [of] = [f for f in policy.by_category if f.group == name] or [policy.pooled]
            if of.utilisation is not None:
                rows.append(Row(policy.policy, box=_box(of.utilisation), style=style % 6))
        if rows:
            label = name or "all requests"
            medians = ", ".join(f"{row.name} {row.box[2]:.2f}" for row in rows)
            alt = f"Box plots of utilisation of {label}; medians: {medians}."
            charts.append(Rows.of(alt, f"u, {label}", rows, x_range=PROBABILITY))
    caption = (
        "Utilisation u of each request: accepted draft tokens over drafted levels. Boxes span the "
        "quartiles, whiskers 5 to 95%, the diamond is the mean over requests."
    )
    return beside(f"{caption} {like('4', 'ECHO')}", charts)


def utilisation_table(replay: ReplayScores) -> Table | None:
    """The numbers of the boxes."""
    named = ((policy, policy.pooled.utilisation) for policy in replay.policies)
    rows = [
        (policy.policy, f"{u.num_requests:,}", *(f"{value:.2f}" for value in _box(u)))
        for policy, u in named
        if u is not None
    ]
    columns = ("policy", "requests", "5%", "25%", "median", "75%", "95%", "mean")
    return Table("Utilisation per request", columns, rows) if rows else None


def ablation_figure(replay: ReplayScores) -> Figure | None:
    """Bars of scorers by the features that they read (C2T, table 1); None below two of them."""
    fitted = [policy for policy in replay.policies if policy.scorer_features]
    if len({policy.scorer_features for policy in fitted}) < 2:
        return None
    static = [p for p in replay.policies if p.policy == replay.baseline and p not in fitted]
    lengths: list[Row] = []
    verified: list[Row] = []
    for policy in (*static, *fitted):
        style = 0 if policy.scorer_features else 6
        name = " + ".join(policy.scorer_features or (policy.policy,))
        for rows, key in ((lengths, "mean_acceptance_length"), (verified, "verified_per_token")):
            value = policy.pooled.ratios[key]
            ends = (value.low, value.high)
            rows.append(Row(f"{name}: {value.text('.2f')}", (value.value,), ends, style=style))
    labels = "τ (tokens per call)", "verified tokens per output token"
    charts = [
        Rows.of(f"Bars of {label}: {'; '.join(row.name for row in rows)}.", label, rows)
        for label, rows in zip(labels, (lengths, verified), strict=True)
    ]
    caption = "Scorers by the features that they read, beside the baseline."
    return beside(f"{caption} {like('Table 1', 'C2T')}", charts)


NO_ABLATION = (
    "C2T's ablation (Table 1) is drawn where fits on different features are replayed together: "
    "specctl fit c2t TRACES --features ... -o each, and specctl replay TRACES with -p of each."
)


def _box(spread: Spread) -> tuple[float, ...]:
    s = spread
    return s.low, s.first, s.median, s.third, s.high, s.mean


# ----------------------------------------------------------------- of traces


def profile_section(figures: TraceFigures, basis: str) -> Section:
    """Acceptance length and Φ by terminal rank (HeteroSpec, figures 1d, 3 and 4)."""
    if not figures.profiles:
        return Section("profiles", missing="No round accepted a draft token.")
    whole, *categories = figures.profiles
    ranks, tops = _ranks(whole), [_rank_at(whole, q) for q in (0.5, 0.9)]
    low, high = _mean_tau(whole, 0, tops[0]), _mean_tau(whole, tops[0], len(whole.counts))
    phis = Chart(
        "Line chart of mean phi by terminal confidence rank.",
        "TCR (rank)",
        "mean Φ (nats)",
        [Series("", ranks, whole.mean_phi, style=2)],
        **_by_rank(whole),
    )
    drawings = [
        beside(
            "Acceptance length of rounds, and the drafter's uncertainty, by the rank where the "
            f"accepted path ends. {like('1d and 4', 'HeteroSpec')}",
            [_length_chart(whole, "all rounds"), phis],
        )
    ]
    drawn = categories[:MAX_CATEGORIES] if len(categories) > 1 else []
    for profile in drawn:
        shares = np.array(profile.counts) / profile.num_rounds
        bars = Chart(
            f"Bar chart of the share of rounds by terminal confidence rank in {profile.name}; the "
            f"largest is {shares.max():.0%} at rank {int(shares.argmax()) + 1}.",
            "TCR (rank)",
            "share of rounds",
            [Series("", ranks, shares.tolist(), kind="bars")],
            **_by_rank(profile),
        )
        drawings.append(
            beside(
                f"Terminal ranks and acceptance length, {profile.name}: n = "
                f"{count(profile.num_prompts, 'prompt')}, {count(profile.num_rounds, 'round')}. "
                f"{like('3', 'HeteroSpec')}",
                [bars, _length_chart(profile, str(profile.name))],
            )
        )
    rows = [
        (
            profile.name or "all",
            f"{profile.num_prompts:,}",
            f"{profile.num_rounds:,}",
            *(str(_rank_at(profile, q)) for q in (0.5, 0.9)),
            number(_mean_tau(profile, 0, len(profile.counts))),
        )
        for profile in figures.profiles
    ]
    columns = ("category", "prompts", "rounds", "half end by rank", "90% by", "mean length")
    return Section(
        "profiles",
        reading=f"Accepted paths that end at rank {tops[0]} or before, half of them, are "
        f"{low:.2f} tokens long with the target's own; those that end behind it "
        f"{number(high)}. A path of d tokens ends at rank d at the earliest.",
        basis=f"n = {count(whole.num_prompts, 'prompt')}, {count(whole.num_rounds, 'round')} with "
        f"an accepted token, {basis}.",
        figures=drawings,
        tables=[Table("Terminal ranks by category", columns, rows)],
        notes=[]
        if drawn
        else [
            "Figure 3 of HeteroSpec sets workloads side by side: collect prompts of several "
            "categories (a category field), or give their trace folders together."
        ],
        data=figures.profiles,
    )


def _ranks(profile: RankProfile) -> list[int]:
    return list(range(1, len(profile.counts) + 1))


def _by_rank(profile: RankProfile) -> dict[str, Any]:
    return {"x_range": (0.0, len(profile.counts) + 1.0), "whole_x": True}


def _rank_at(profile: RankProfile, part: float) -> int:
    """The rank by which so many of the paths end."""
    return int(np.searchsorted(np.cumsum(profile.counts), part * profile.num_rounds - 1e-9)) + 1


def _mean_tau(profile: RankProfile, first: int, last: int) -> float:
    """Of the rounds that end at ranks `first` + 1 to `last`; NaN of none."""
    counts = np.array(profile.counts[first:last], np.float64)
    lengths = np.array([tau.value for tau in profile.tau[first:last]])
    some = counts > 0
    return float((counts[some] @ lengths[some]) / counts.sum()) if some.any() else float("nan")


def _length_chart(profile: RankProfile, name: str) -> Chart:
    known = [tau.value for tau in profile.tau if tau.known]
    return Chart(
        f"Chart of mean acceptance length by terminal confidence rank, {name}: from "
        f"{min(known):.2f} to {max(known):.2f} tokens, with error bars.",
        "TCR (rank)",
        "τ (tokens per call)",
        [Series.of("", _ranks(profile), profile.tau, kind="points")],
        **_by_rank(profile),
    )


def entropy_section(found: EntropyRanks | None, basis: str) -> Section:
    """Probability and acceptance by entropy and rank (C2T, figure 2)."""
    if found is None:
        return Section(
            "entropy",
            missing="No draft token behind an accepted one has a known fate and a rank among its "
            "siblings (drafts that are drawn have none). specctl collect --dense logs them.",
        )
    prob, accepted = np.array(found.mean_prob), np.array(found.accepted_frac)
    bias, sizes = 100 * (accepted - prob), np.array(found.num_nodes)
    names = [f"{low:g} to {high:g}" for low, high in pairwise(found.bounds)]
    names.append(f"from {found.bounds[-1]:g}")
    shown = np.flatnonzero(sizes.any(1))
    lowest, highest = int(shown[0]), int(shown[-1])
    most = max(5.0, float(np.nanmax(np.abs(bias))))
    kinds = (
        ("mean probability that the drafter gives", prob, 1.0, ".2f"),
        ("share that the target accepted", accepted, 1.0, ".2f"),
        ("accepted less probability, points", bias, most, "+.0f"),
    )
    charts = [
        Cells(
            f"Heat map of {name} by entropy and rank; values of the likeliest token from "
            f"{values[lowest, 0]:.2f} at the lowest entropy to {values[highest, 0]:.2f} at the "
            "highest; the table below holds them.",
            f"rank; {name}",
            "entropy (nats)",
            (),
            values=values[shown].tolist(),
            x_names=[str(rank + 1) for rank in range(values.shape[1])],
            y_names=[names[row] for row in shown],
            most=top,
            spec=spec,
            height=260,
        )
        for name, values, top, spec in kinds
    ]
    rows = [
        (
            names[row],
            f"{sizes[row].sum():,}",
            *(f"{values[row, 0]:.1%}" for values in (prob, accepted)),
            f"{bias[row, 0]:+.1f}",
        )
        for row in shown
    ]
    columns = ("entropy (nats)", "draft tokens", "likeliest: probability", "accepted", "difference")
    return Section(
        "entropy",
        reading=f"Where the drafter's entropy is lowest ({names[lowest]} nats) its likeliest token "
        f"has probability {prob[lowest, 0]:.0%} and is accepted {accepted[lowest, 0]:.0%} of the "
        f"time, {bias[lowest, 0]:+.1f} points; where it is highest ({names[highest]} nats) "
        f"{prob[highest, 0]:.0%} and {accepted[highest, 0]:.0%}, {bias[highest, 0]:+.1f} points.",
        basis=f"n = {basis}, {count(int(sizes.sum()), 'draft token')} whose parent was accepted "
        "and whose own fate is known.",
        figures=[
            beside(
                "Draft tokens by the entropy of the distribution that they come from and by their "
                f"rank in it, given that their parent was accepted. {like('2', 'C2T')}",
                charts,
            )
        ],
        tables=[Table("By entropy; difference in points", columns, rows)],
        notes=["The paper does not print the bounds of its seven intervals; these are ours."],
        data=found,
    )


def margin_section(found: TargetMargins | None, basis: str) -> Section:
    """The target's two best logits (MARS, figures 1 and 5)."""
    if found is None:
        return Section(
            "margins",
            missing="The traces hold no logits of the target behind drafts whose rank is known. "
            "specctl collect logs them, with --dense at every position.",
        )
    low, num_low = found.low_ranks, sum(found.low_ranks)
    above = f"ratio above {found.theta:g}"
    rest, num_rest = found.other_ranks, sum(found.other_ranks)
    rows = [
        (name, f"{size:,}", *(f"{one / size:.1%}" if size else "-" for one in ranks))
        for name, size, ranks in ((above, num_low, low), ("others", num_rest, rest))
    ]
    columns = ("positions", "n", "draft is the best", "the second", "lower")
    saved = f" There the drafter's likeliest token is the best in {low[0] / num_low:.0%} and the "
    saved += (
        f"second in {low[1] / num_low:.0%}, which a relaxed acceptance keeps." if num_low else ""
    )
    return Section(
        "margins",
        reading=f"At {found.low_margin.text('.0%')} of the positions the target's two best logits "
        f"are close, z2 / z1 above {found.theta:g}."
        + (saved if num_low else "")
        + (f" Elsewhere it is the second in {rest[1] / num_rest:.0%}." if num_rest else ""),
        basis=f"n = {basis}; {count(found.num_positions, 'position')} with both logits; scatter "
        f"plots show {len(found.sample.draft_rank):,} of them, drawn at random.",
        figures=[
            beside(f"Where the target is undecided. {like('1', 'MARS')}", _scatters(found, above)),
            beside(
                f"The target's best logit, and second over best, of logits and of probabilities. "
                f"{like('5', 'MARS')}",
                _histograms(found),
            ),
        ],
        tables=[Table("The drafter's likeliest token, as the target ranks it", columns, rows)],
        notes=[
            f"The best logit is negative at {found.num_negative / found.num_positions:.1%} of the "
            f"positions; at {found.num_undefined / found.num_positions:.1%} one of the two is not "
            "above 0, so that their ratio says nothing. Relaxed acceptance is lossy: specctl fit "
            "mars certifies a threshold.",
        ],
        data=found,
    )


def _scatters(found: TargetMargins, above: str) -> list[Chart]:
    sample = found.sample
    first, second = np.array(sample.first_logit), np.array(sample.second_logit)
    prob, kept = np.array(sample.first_prob, float), np.array(sample.draft_rank) <= 2
    share = np.exp(second - first)
    ratio = np.where(second > 0, second / np.where(second > 0, first, 1.0), np.nan)
    low = ratio > found.theta
    by_margin = ((above, low, 1), ("others", ~low, 6))
    by_fate = (("kept: best or second", low & kept, 2), ("rejected: lower", low & ~kept, 1))
    kinds: list[tuple[str, Any, str, Any, Any, dict[str, Any]]] = [
        ("best logit z1", first, "second logit z2", second, by_margin, {}),
        ("ratio z2 / z1", ratio, "ratio p2 / p1", share, by_margin, {"y_range": PROBABILITY}),
        (f"z2 / z1 above {found.theta:g}", ratio, "ratio p2 / p1", share, by_fate, {}),
    ]
    if np.isfinite(prob).any():
        ranges = {"x_range": PROBABILITY, "y_range": (0.0, 0.5)}
        names = ("best probability p1", prob, "second probability p2", prob * share)
        kinds.insert(1, (*names, by_margin, ranges))
    return [
        Chart(
            f"Scatter of {y_name} against {x_name}: "
            + listed(f"{int(chosen.sum())} {name}" for name, chosen, _ in groups)
            + ".",
            x_name,
            y_name,
            [
                Series(name, x[chosen].tolist(), y[chosen].tolist(), kind="dots", style=style)
                for name, chosen, style in groups[::-1]
                if (chosen & np.isfinite(x) & np.isfinite(y)).any()
            ],
            **ranges,
        )
        for x_name, x, y_name, y, groups, ranges in kinds
        if any((chosen & np.isfinite(x) & np.isfinite(y)).any() for _, chosen, _ in groups)
    ]


def _histograms(found: TargetMargins) -> list[Chart]:
    kinds = (
        ("best logit z1", found.logit_edges, found.logits, 0.0),
        ("ratio z2 / z1", found.share_edges, found.logit_ratios, found.theta),
        ("ratio p2 / p1", found.share_edges, found.prob_ratios, found.theta),
    )
    return [
        Chart(
            f"Histogram of {name} with a line at {limit:g}; the fullest bin holds {max(counts):,} "
            f"of {sum(counts):,} positions.",
            name,
            "positions",
            [
                Series("", _middles(edges), counts, kind="bars"),
                Series(f"{limit:g}", [limit], [0.0], kind="limit", style=1),
            ],
            height=260,
        )
        for name, edges, counts, limit in kinds
        if any(counts)
    ]


def _middles(edges: Sequence[float]) -> list[float]:
    return [(low + high) / 2 for low, high in pairwise(edges)]


def threshold_section(found: StopThresholds | None) -> Section:
    """AdaSD's signals and its threshold as it moves (AdaSD, figures 2 and 3, section 4.3)."""
    if found is None:
        return Section(
            "thresholds",
            missing="Live traces hold the rounds of one policy, so AdaSD's cannot be replayed on "
            "them. Collect with --dense.",
        )
    names = ("accepted", "first rejected")
    figures, measured = [], []
    for label, spreads in (("entropy (nats)", found.entropy), ("JS distance", found.distance)):
        drawn = [
            Row(name, box=_box(spread), style=style)
            for style, (name, spread) in enumerate(zip(names, spreads, strict=True))
            if spread is not None
        ]
        if drawn:
            means = ", ".join(f"{row.name} {row.box[5]:.2f}" for row in drawn)
            alt = f"Box plots of the mean {label} of a request's tokens; over requests: {means}."
            measured.append(Rows.of(alt, f"mean {label} of a request", drawn))
    if measured:
        caption = (
            "Mean of each request over the tokens that verification accepted, and over the first "
            "rejected ones. Whiskers 5 to 95%, diamond the mean."
        )
        figures.append(beside(f"{caption} {like('2', 'AdaSD')}", measured))
    if any(map(any, found.distances)):
        caption = "How far the drafter's distribution is from the target's at these tokens."
        figures.append(Figure(f"{caption} {like('3', 'AdaSD')}", [_distance_chart(found)]))
    if any(found.num_at):
        caption = (
            "The drafting threshold of requests as their answers grow: the median and the "
            "quartiles of those that have one, and two single requests. The rule is section 4.3 "
            f"of AdaSD, {PAPERS['AdaSD']}; the paper draws no such figure."
        )
        figures.append(Figure(caption, [_path_chart(found)]))
    last = found.quartiles[1][max(np.flatnonzero(found.num_at), default=0)]
    notes = [
        "The threshold of the relaxed acceptance is not drawn: it changes the text, so a log of "
        "the target's own text does not tell it.",
    ]
    if found.distance == (None, None):
        notes.append("The log holds no js_distance; specctl collect --dense logs it.")
    if found.num_unsupported:
        part = found.num_unsupported / found.num_rounds
        notes.append(f"In {part:.1%} of the rounds the log ends before the rule would stop.")
    rows = [
        (f"{label}, {name}", f"{one.num_requests:,}", *(f"{value:.2f}" for value in _box(one)))
        for label, spreads in (("entropy, nats", found.entropy), ("distance", found.distance))
        for name, one in zip(names, spreads, strict=True)
        if one is not None
    ]
    columns = ("mean of a request", "requests", "5%", "25%", "median", "75%", "95%", "mean")
    accepted, rejected = found.entropy
    told = "No token was rejected, so no threshold was learned."
    if accepted is not None and rejected is not None:
        told = (
            f"Accepted tokens were drafted at a mean entropy of {accepted.mean:.2f} nats, first "
            f"rejected ones at {rejected.mean:.2f}; the median threshold ends at {last:.2f}."
        )
    return Section(
        "thresholds",
        reading=told,
        basis=f"n = {count(found.num_requests, 'request')}, {count(found.num_rounds, 'round')} of "
        f"{found.policy}, replayed; {found.num_accepted:,} accepted and {found.num_rejected:,} "
        "first rejected tokens.",
        figures=figures,
        tables=[Table("Tokens that were tested", columns, rows)] if rows else [],
        notes=notes,
        data=found,
    )


def _distance_chart(found: StopThresholds) -> Chart:
    middles = _middles(found.distance_edges)
    series = []
    for style, (name, counts) in enumerate(
        zip(("accepted", "first rejected"), found.distances, strict=True)
    ):
        density = np.array(counts) / max(1, sum(counts)) / (middles[1] - middles[0])
        label = f"{name} (n={sum(counts):,})"
        series.append(Series(label, middles, density.tolist(), kind="area", style=style))
    return Chart(
        "Densities of the Jensen-Shannon distance of drafter and target, accepted and first "
        "rejected tokens.",
        "Jensen-Shannon distance (square root of bits)",
        "density",
        series,
        x_range=PROBABILITY,
    )


def _path_chart(found: StopThresholds) -> Chart:
    low, middle, high = found.quartiles
    paths = [
        Series(f"request {place}", found.positions, path, style=3 + place)
        for place, path in enumerate(found.paths, start=1)
    ]
    known = [value for value in middle if np.isfinite(value)]
    return Chart(
        f"Line chart of the entropy threshold by position in the answer: its median goes from "
        f"{known[0]:.2f} to {known[-1]:.2f} nats.",
        "tokens of the answer",
        "threshold (nats)",
        [Series("median, quartiles", found.positions, middle, low, high), *paths],
    )
