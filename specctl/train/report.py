"""What fitted bins are worth on prompts that they have not seen: figures, table, JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.policy.hetero import entropy_bin
from specctl.policy.parse import canonical_json
from specctl.policy.records import EntropyBins, Record
from specctl.stats import Resamples, sums_by
from specctl.train.partition import Floats, Phis
from specctl.train.rounds import Bools, CartConfig, Rounds
from specctl.train.tables import number, table

HISTOGRAM_BARS = 60
Bins = NDArray[np.int64]


class BinSide(Record):
    """One bin on one side of the split.

    Attributes:
        num_rounds: eligible rounds. share_frac: of the side's eligible rounds.
        num_used: rounds that count for the label. mean_label: over these.
        mean_tcr: rank, over eligible rounds that accepted something.
        mean_acceptance_length: tokens, 1 + accepted, over eligible rounds.
    """

    num_rounds: int
    share_frac: float
    num_used: int
    mean_label: float | None
    mean_tcr: float | None
    mean_acceptance_length: float | None


class BinReport(Record):
    """One bin: Φ in (low, high] nats, its plan (levels; nodes, root counted), both sides."""

    index: int
    low: float | None
    high: float | None
    depth: int
    num_tokens: int
    train: BinSide
    held_out: BinSide


class Stability(Record):
    """Overlap of the low-entropy rounds with those of a deeper partition (Table 4)."""

    max_leaf_depth: int
    num_bins: int
    jaccard: float


class HeldOut(Record):
    """Error of the bin means of training on held-out rounds, in squared units of the label.

    Attributes:
        mse_interval: its ends, 95 % of resamples of held-out prompts; null with one prompt.
        constant_mse: of the training mean alone. r_squared: 1 - mse / constant_mse.
    """

    num_used: int
    mse: float
    mse_interval: tuple[float, float] | None
    constant_mse: float
    r_squared: float | None


class Histogram(Record):
    """Eligible rounds by Φ: `len(counts) + 1` bounds, nats."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class CartReport(Record):
    """Everything that is known of a fit; `report.json` is this record.

    Attributes:
        rounds_by_fate: rounds of the traces, `used` or why not.
        prompts: number on each side.
        spearman_phi_tcr, spearman_phi_accepted: rank correlation over eligible rounds; null
            where a side is constant.
    """

    config: CartConfig
    rounds_by_fate: dict[str, int]
    prompts: dict[str, int]
    bins: tuple[BinReport, ...]
    held_out: HeldOut
    stability: tuple[Stability, ...]
    spearman_phi_tcr: float | None
    spearman_phi_accepted: float | None
    histogram: Histogram


def bins_of(phi: Phis, edges: tuple[float, ...] | list[float]) -> Bins:
    """`[n]` bin of each Φ, by the rule that the runtime uses."""
    table = torch.tensor(edges, dtype=torch.float32)
    return entropy_bin(torch.from_numpy(phi.copy()), table).numpy()


def build_report(
    rounds: Rounds, shape: EntropyBins, config: CartConfig, stability: tuple[Stability, ...]
) -> CartReport:
    """Figures of a fitted shape on the rounds that it was fitted and held out on."""
    bins = bins_of(rounds.phi, shape.edges)
    counts, bounds = np.histogram(rounds.phi.astype(np.float64), bins=HISTOGRAM_BARS)
    return CartReport(
        config=config,
        rounds_by_fate=rounds.counts,
        prompts={"train": len(rounds.split.train), "held_out": len(rounds.split.held_out)},
        bins=_bin_reports(rounds, shape, bins),
        held_out=held_out_error(rounds, bins),
        stability=stability,
        spearman_phi_tcr=spearman(rounds.phi, rounds.tcr),
        spearman_phi_accepted=spearman(rounds.phi, rounds.accepted),
        histogram=Histogram(bounds=tuple(bounds.tolist()), counts=tuple(counts.tolist())),
    )


def _bin_reports(rounds: Rounds, shape: EntropyBins, bins: Bins) -> tuple[BinReport, ...]:
    lows, highs = (None, *shape.edges), (*shape.edges, None)
    return tuple(
        BinReport(
            index=index,
            low=lows[index],
            high=highs[index],
            depth=shape.plan_depths[index],
            num_tokens=shape.plan_tokens[index],
            train=_side(rounds, bins == index, ~rounds.held_out),
            held_out=_side(rounds, bins == index, rounds.held_out),
        )
        for index in range(len(lows))
    )


def _side(rounds: Rounds, in_bin: Bools, on_side: Bools) -> BinSide:
    rows = in_bin & on_side
    return BinSide(
        num_rounds=int(rows.sum()),
        share_frac=float(rows.sum() / on_side.sum()),
        num_used=int((rows & rounds.used).sum()),
        mean_label=_mean(rounds.label[rows & rounds.used]),
        mean_tcr=_mean(rounds.tcr[rows & ~np.isnan(rounds.tcr)]),
        mean_acceptance_length=_mean(1.0 + rounds.accepted[rows]),
    )


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def held_out_error(rounds: Rounds, bins: Bins) -> HeldOut:
    """Squared error of the bins' training means on held-out rounds, and of one constant.

    Every bin holds a training round that was used, since the bins were cut between those.
    """
    train, test = rounds.used & ~rounds.held_out, rounds.used & rounds.held_out
    totals = np.bincount(bins[train], rounds.label[train])
    means = totals / np.bincount(bins[train])
    squared = (rounds.label[test] - means[bins[test]]) ** 2
    mse = float(np.mean(squared))
    constant = float(np.mean((rounds.label[test] - rounds.label[train].mean()) ** 2))
    return HeldOut(
        num_used=int(test.sum()),
        mse=mse,
        mse_interval=_mean_interval(squared, rounds.prompt[test]),
        constant_mse=constant,
        r_squared=1.0 - mse / constant if constant > 0 else None,
    )


def _mean_interval(values: Floats, prompt: NDArray[np.int64]) -> tuple[float, float] | None:
    """Ends of a mean over rounds, by bootstrap over the prompts that they are of."""
    _, codes = np.unique(prompt, return_inverse=True)
    num_prompts = int(codes.max()) + 1
    if num_prompts == 1:
        return None
    sums = sums_by(codes, num_prompts, np.stack([values, np.ones_like(values)], axis=1))
    found = Resamples.draw(num_prompts).interval(sums, lambda s: s[..., 0] / s[..., 1])
    return found.low, found.high


def spearman(phi: Phis, values: Floats) -> float | None:
    """Rank correlation over rows where `values` is known; None where it is not defined."""
    from scipy.stats import spearmanr

    known = ~np.isnan(values)
    if len(np.unique(phi[known])) < 2 or len(np.unique(values[known])) < 2:
        return None
    return float(spearmanr(phi[known], values[known]).statistic)


def low_entropy_overlap(phi: Phis, edges: list[float], deeper: list[float], num_low: int) -> float:
    """Jaccard similarity of two partitions' low-entropy rounds (paper, A.4).

    Low are the first `num_low` bins, and in the deeper partition the same share of its bins.
    """
    share = num_low / (len(edges) + 1)
    low = bins_of(phi, edges) < num_low
    deeper_low = bins_of(phi, deeper) < round(share * (len(deeper) + 1))
    union = int((low | deeper_low).sum())
    return float((low & deeper_low).sum() / union) if union else 1.0


def report_json(report: CartReport) -> bytes:
    """`report.json`: canonical JSON."""
    return canonical_json(report.model_dump(mode="json")).encode()


def summary(report: CartReport) -> tuple[str, ...]:
    """Lines that go with the table: what was fitted, on how much, how well."""
    fates, held_out = report.rounds_by_fate, report.held_out
    left_out = ", ".join(f"{count} {fate}" for fate, count in fates.items() if fate != "used")
    overlaps = ", ".join(f"{s.max_leaf_depth}: {s.jaccard:.2f}" for s in report.stability)
    return (
        f"{report.config.method} on label {report.config.label}, filter {report.config.filter}: "
        f"{fates['used']} rounds used ({left_out or 'none'} left out), "
        f"{report.prompts['train']} prompts for training, {report.prompts['held_out']} held out",
        f"held-out error over {held_out.num_used} rounds: MSE {held_out.mse:.4g}, constant "
        f"{held_out.constant_mse:.4g}, R² {number(held_out.r_squared, '.3f')}",
        f"low-entropy overlap with deeper partitions (Jaccard), by depth: {overlaps or 'none'}",
        f"Spearman Φ~TCR {number(report.spearman_phi_tcr, '.3f')}, "
        f"Φ~accepted {number(report.spearman_phi_accepted, '.3f')}",
        *_warning(held_out),
    )


def _warning(held_out: HeldOut) -> tuple[str, ...]:
    if held_out.r_squared is None or held_out.r_squared > 0:
        return ()
    return ("warning: on held-out rounds these bins predict no better than a constant",)


TABLE_COLUMNS = (
    "bin",
    "Φ ≤",
    "depth",
    "tokens",
    "train n",
    "TCR",
    "τ",
    "test n",
    "share",
    "TCR",
    "τ",
)
LEGEND = (
    "Φ in nats; depth in levels; tokens submitted, root counted; n rounds drafted by the base "
    "tree, for training and held out (test); TCR mean rank of the deepest accepted node; τ mean "
    "acceptance length, 1 + accepted, tokens"
)
"""Short heads, so that the table fits a terminal of 80 columns, and what they mean."""


def table_rows(report: CartReport) -> list[tuple[str, ...]]:
    """One row a bin, for the terminal and for the card."""
    return [
        (
            str(row.index),
            number(row.high, ".3f"),
            str(row.depth),
            str(row.num_tokens),
            str(row.train.num_rounds),
            number(row.train.mean_tcr, ".2f"),
            number(row.train.mean_acceptance_length, ".2f"),
            str(row.held_out.num_rounds),
            f"{row.held_out.share_frac:.0%}",
            number(row.held_out.mean_tcr, ".2f"),
            number(row.held_out.mean_acceptance_length, ".2f"),
        )
        for row in report.bins
    ]


def render_report(report: CartReport) -> Any:
    """A rich renderable for the terminal."""
    from rich.console import Group

    return Group(table(TABLE_COLUMNS, table_rows(report), LEGEND), *summary(report))
