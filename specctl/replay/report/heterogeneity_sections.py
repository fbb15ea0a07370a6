"""Sections on HeteroSpec's two observations: TCR and Φ."""

from __future__ import annotations

import numpy as np

from specctl.replay.report.chart import Chart, Series
from specctl.replay.report.evidence import Evidence
from specctl.replay.report.heterogeneity import Concentration, PhiAcceptance
from specctl.replay.report.page import Figure, Section, Table
from specctl.replay.report.words import (
    BY_PROMPT,
    NOTHING,
    PROBABILITY,
    count,
    plain,
    reference_words,
    share,
    span,
)


def tcr_section(evidence: Evidence) -> Section:
    found, title = evidence.concentration, "Terminal confidence rank"
    if found is None:
        return Section(
            "tcr",
            title,
            missing="No round accepted a draft token, so no accepted path ends anywhere. Collect "
            "with a drafter that fits the target.",
        )
    quarter = found.top_shares["25%"]
    reading = (
        f"{share(quarter)} of accepted paths end within the top quarter of the draft tokens "
        f"submitted, by joint probability; half of them by rank {found.quantiles['p50']}, 90% by "
        f"rank {found.quantiles['p90']} of {found.num_draft_tokens}."
    )
    basis = (
        f"n = {count(found.num_rounds, 'round')} with an accepted token, of "
        f"{reference_words(evidence)} over {count(evidence.num_prompts, 'prompt')}; "
        f"{count(found.num_empty, 'round')} accepted nothing, {found.num_cut:,} cut by the end of "
        f"the text left out; {BY_PROMPT}."
    )
    notes = [
        "A path of d tokens never ranks above d, because its ancestors outrank it: a peak at the "
        "depth of the tree is the likeliest path accepted whole.",
        *_support_note(evidence),
    ]
    return Section(
        "tcr",
        title,
        reading=reading,
        basis=basis,
        figures=[Figure("Where accepted paths end in the order of confidence.", _tcr(found))],
        tables=[_tcr_table(found)],
        notes=notes,
        data=plain(found),
    )


def _support_note(evidence: Evidence) -> list[str]:
    if not evidence.num_unsupported:
        return []
    part = evidence.num_unsupported / evidence.num_reference
    return [
        f"In {part:.1%} of these rounds the log lacks an expansion that the tree asked for: these "
        "may have accepted more. Collect with nested support to remove that."
    ]


def _tcr(found: Concentration) -> list[Chart]:
    ranks = list(range(1, len(found.counts) + 1))
    shares = np.array(found.counts) / found.num_rounds
    most = f"Its largest share is {shares.max():.0%} at rank {int(shares.argmax()) + 1}."
    bars = Chart(
        f"Bar chart of the share of rounds by terminal confidence rank. {most}",
        "TCR (rank)",
        "share of rounds",
        [Series("", ranks, shares.tolist(), kind="bars")],
        x_range=(0.0, len(ranks) + 1.0),
        whole_x=True,
        width=460,
    )
    running = Chart(
        f"Line chart of the cumulative share of rounds by rank: half by rank "
        f"{found.quantiles['p50']}, 90% by rank {found.quantiles['p90']}.",
        "TCR (rank)",
        "cumulative share",
        [Series("", ranks, shares.cumsum().tolist(), kind="area", style=2)],
        x_range=(0.0, len(ranks) + 1.0),
        y_range=PROBABILITY,
        whole_x=True,
        width=460,
    )
    return [bars, running]


def _tcr_table(found: Concentration) -> Table:
    return Table(
        "Concentration",
        ("best part of what was submitted", "share of accepted paths that end in it"),
        [(f"top {name}", share(value)) for name, value in found.top_shares.items()],
    )


def phi_section(evidence: Evidence) -> Section:
    found, title = evidence.phi, "Φ against acceptance"
    if found is None:
        return Section("phi", title, missing="No round carries Φ: nothing was drafted.")
    first, last = found.bins[0], found.bins[-1]
    reading = (
        f"Rounds of the lowest Φ accept τ {span(first.tau)} tokens per call, those of the highest "
        f"{span(last.tau)}; Spearman's ρ {_rho(found)}. "
        + (
            "Φ tells easy contexts from hard ones here."
            if first.tau.low > last.tau.high
            else "The intervals overlap, so Φ does not tell easy contexts from hard ones here."
        )
    )
    basis = (
        f"n = {count(found.num_rounds, 'round')} of {reference_words(evidence)} over "
        f"{count(evidence.num_prompts, 'prompt')}; {found.num_left_out:,} left out (cut by the end "
        f"of the text, or of another depth); Φ over {count(found.depth, 'level')}; {BY_PROMPT}."
    )
    return Section(
        "phi",
        title,
        reading=reading,
        basis=basis,
        figures=[Figure("τ in ten bins of equally many rounds, at their mean Φ.", [_phi(found)])],
        tables=[_phi_table(found)],
        notes=_support_note(evidence),
        data=plain(found),
    )


def _rho(found: PhiAcceptance) -> str:
    return NOTHING if found.spearman is None else f"{found.spearman:.2f}"


def _phi(found: PhiAcceptance) -> Chart:
    bins = found.bins
    series = Series(
        "",
        [b.mean_phi for b in bins],
        [b.tau.value for b in bins],
        [b.tau.low for b in bins],
        [b.tau.high for b in bins],
        kind="points",
    )
    alt = (
        f"Chart of mean acceptance length in {len(bins)} bins of phi, from "
        f"{bins[0].tau.value:.2f} at {bins[0].mean_phi:.1f} nats to {bins[-1].tau.value:.2f} at "
        f"{bins[-1].mean_phi:.1f} nats, with error bars."
    )
    return Chart(alt, "Φ (nats)", "τ (tokens per call)", [series])


def _phi_table(found: PhiAcceptance) -> Table:
    return Table(
        "Bins of Φ",
        ("Φ from (nats)", "to (nats)", "rounds", "τ (tokens per call)"),
        [(f"{b.low:.2f}", f"{b.high:.2f}", f"{b.num_rounds:,}", span(b.tau)) for b in found.bins],
    )
