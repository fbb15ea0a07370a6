"""HeteroSpec's two observations on the reference rounds (arXiv:2505.13254, figures 1 and 4):
accepted paths end at high confidence ranks, and Φ foretells how much is accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Bools, Floats, Ints
from specctl.replay.report.reference import ReferenceRounds, comparable
from specctl.stats import Interval, Resamples, sums_by

NUM_PHI_BINS = 10
TOP_SHARES = (0.1, 0.25, 0.5)
"""Of the draft tokens submitted; the paper's claim is about the top quarter."""


@dataclass(frozen=True)
class Concentration:
    """Terminal confidence ranks.

    Attributes:
        num_rounds: rounds with an accepted token, not cut by the end of the text. num_empty:
            rounds that accepted nothing. num_cut: rounds left out.
        counts: rounds by rank, from 1 on. num_draft_tokens: most that a round submits.
        top_shares: share of rounds whose rank lies in the best part of what they submitted.
        quantiles: p50, p90, p99 of the rank.
    """

    num_rounds: int
    num_empty: int
    num_cut: int
    num_draft_tokens: int
    counts: tuple[int, ...]
    top_shares: dict[str, Interval]
    quantiles: dict[str, int]


@dataclass(frozen=True)
class PhiBin:
    """Rounds of one tenth of Φ, nats; `tau` is 1 + accepted, tokens, pooled."""

    low: float
    high: float
    mean_phi: float
    num_rounds: int
    tau: Interval


@dataclass(frozen=True)
class PhiAcceptance:
    """Φ against acceptance.

    Attributes:
        depth: levels that Φ sums over. num_rounds: used. num_left_out: of another depth, cut by
            the end of the text, or without Φ.
        spearman: rank correlation of Φ and accepted tokens, over rounds; None where either is
            constant.
    """

    depth: int
    num_rounds: int
    num_left_out: int
    spearman: float | None
    bins: tuple[PhiBin, ...]


def concentration(
    rounds: ReferenceRounds, num_prompts: int, resamples: Resamples
) -> Concentration | None:
    """Where accepted paths end; None where no round accepted anything."""
    whole = rounds.pick(~rounds.is_cut)
    used = whole.pick(whole.tcr > 0)
    if not len(used.tcr):
        return None
    most = int(rounds.submitted.max()) - 1
    levels = np.quantile(used.tcr, (0.5, 0.9, 0.99), method="inverted_cdf")
    return Concentration(
        num_rounds=len(used.tcr),
        num_empty=len(whole.tcr) - len(used.tcr),
        num_cut=int(rounds.is_cut.sum()),
        num_draft_tokens=most,
        counts=tuple(np.bincount(used.tcr, minlength=most + 1)[1:].tolist()),
        top_shares={f"{s:.0%}": _top_share(used, s, num_prompts, resamples) for s in TOP_SHARES},
        quantiles=dict(zip(("p50", "p90", "p99"), map(int, levels), strict=True)),
    )


def _top_share(
    rounds: ReferenceRounds, share: float, num_prompts: int, resamples: Resamples
) -> Interval:
    inside = rounds.tcr <= np.ceil(share * (rounds.submitted - 1))
    values = np.stack([inside, np.ones(len(inside))], 1).astype(np.float64)
    return resamples.interval(sums_by(rounds.prompt, num_prompts, values), _ratio)


def phi_acceptance(
    rounds: ReferenceRounds, num_prompts: int, resamples: Resamples
) -> PhiAcceptance | None:
    """τ in ten bins of equally many rounds; None where no round has a Φ."""
    depth, has_depth = comparable(rounds)
    used = rounds.pick(has_depth & ~rounds.is_cut)
    if not len(used.phi):
        return None
    bounds = np.unique(np.quantile(used.phi, np.linspace(0, 1, NUM_PHI_BINS + 1)))
    place = np.clip(np.searchsorted(bounds, used.phi, side="left") - 1, 0, max(len(bounds) - 2, 0))
    bins = (_phi_bin(used, place == code, num_prompts, resamples) for code in np.unique(place))
    return PhiAcceptance(
        depth,
        len(used.phi),
        len(rounds.phi) - len(used.phi),
        _spearman(used.phi, used.accepted),
        tuple(bins),
    )


def _phi_bin(
    rounds: ReferenceRounds, inside: Bools, num_prompts: int, resamples: Resamples
) -> PhiBin:
    chosen = rounds.pick(inside)
    return PhiBin(
        float(chosen.phi.min()),
        float(chosen.phi.max()),
        float(chosen.phi.mean()),
        len(chosen.phi),
        tau_of(chosen, num_prompts, resamples),
    )


def tau_of(rounds: ReferenceRounds, num_prompts: int, resamples: Resamples) -> Interval:
    """1 + accepted draft tokens a round, pooled."""
    return _mean(rounds, rounds.accepted + np.float64(1), num_prompts, resamples)


def mean_tcr(rounds: ReferenceRounds, num_prompts: int, resamples: Resamples) -> Interval:
    """Mean rank over rounds with an accepted token that the end of the text did not cut."""
    used = rounds.pick(~rounds.is_cut & (rounds.tcr > 0))
    return _mean(used, used.tcr.astype(np.float64), num_prompts, resamples)


def _mean(
    rounds: ReferenceRounds, values: Floats, num_prompts: int, resamples: Resamples
) -> Interval:
    columns = np.stack([values, np.ones(len(values))], 1)
    return resamples.interval(sums_by(rounds.prompt, num_prompts, columns), _ratio)


def _ratio(sums: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


def _spearman(left: Floats, right: Ints) -> float | None:
    from scipy.stats import spearmanr

    if min(len(np.unique(left)), len(np.unique(right))) < 2:
        return None
    return float(spearmanr(left, right).statistic)
