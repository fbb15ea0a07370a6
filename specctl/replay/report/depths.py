"""Acceptance by depth, what was not seen left out of the question rather than counted as refused.

At depth d a round is *at risk* where its path reached depth d - 1, depth d was offered, and the
text went on. The share of those that accept is the conditional acceptance a_d; the marginal one is
the product a_1 ... a_d, the product-limit estimate of Kaplan and Meier (1958), which is the plain
share where nothing is censored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Bools, Floats
from specctl.replay.report.rows import RoundRows
from specctl.stats import Interval, Resamples, sums_by


@dataclass(frozen=True)
class DepthAcceptance:
    """Depth d of one group of rounds.

    Attributes:
        num_at_risk, num_accepted: rounds. num_censored: rounds that reached d - 1 and were not
            seen at d, because the text ended or the tree did.
        conditional_prob: accepted at d, given accepted at d - 1. marginal_prob: accepted at d.
    """

    depth: int
    num_at_risk: int
    num_accepted: int
    num_censored: int
    conditional_prob: Interval
    marginal_prob: Interval


def acceptance_by_depth(
    rounds: RoundRows, resamples: Resamples, inside: Bools | None = None
) -> tuple[DepthAcceptance, ...]:
    """Every offered depth.

    Args:
        inside: `[R]`, the rounds that count; all by default.
    """
    chosen = np.ones(len(rounds.prompt), np.bool_) if inside is None else inside
    depth = int(rounds.offered_depth[chosen].max(initial=0))
    sums = _sums(rounds, chosen, depth)
    total = sums.sum(0)
    return tuple(
        DepthAcceptance(
            d,
            int(total[d - 1, 0]),
            int(total[d - 1, 1]),
            int(total[d - 1, 2]),
            resamples.interval(sums[:, d - 1], _conditional),
            resamples.interval(sums[:, :d].reshape(len(sums), -1), _marginal),
        )
        for d in range(1, depth + 1)
    )


def _sums(rounds: RoundRows, chosen: Bools, depth: int) -> Floats:
    """`[P, D, 3]`: rounds at risk, accepted and censored at each depth, a prompt."""
    accepted, offered = rounds.accepted, rounds.offered_depth
    columns = []
    for d in range(1, depth + 1):
        reached = chosen & (accepted >= d - 1)
        hit = chosen & (accepted >= d)
        at_risk = hit | (reached & ~rounds.is_cut & (offered >= d))
        columns += [at_risk, hit, reached & ~at_risk]
    values = np.stack(columns, 1).astype(np.float64)
    return sums_by(rounds.prompt, rounds.num_prompts, values).reshape(-1, depth, 3)


def _conditional(sums: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[..., 1] / sums[..., 0])


def _marginal(sums: Floats) -> Floats:
    """Product over the depths of flattened `[..., d * 3]` sums."""
    return np.asarray(_conditional(sums.reshape(*sums.shape[:-1], -1, 3)).prod(-1))
