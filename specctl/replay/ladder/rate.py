"""The best tree at a price of time, and the price that a load settles at.

The long-run rate is Σ tokens / Σ time, so at price λ (tokens per us) a tree S of n nodes and d
levels is worth 1 + Σ ρ(v) - λ (T_draft(d) + T_verify(n + 1)). For a given depth and size the N
nodes of highest ρ are best, since ρ never rises along a path; so the best tree is found among
D · M candidates instead of among all closed subsets. λ is the rate that its own decisions achieve
(Dinkelbach; notes/state-of-the-art.md, sections 2.1 and 2.2). On a line, that is the rule "take v
iff ρ(v) >= λ · ΔT"; on a staircase it is its global form.

How deep to draft is chosen in hindsight here, knowing the candidates of every level: a relaxation,
so that R_feat is a limit on policies with these features and not one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specctl.logs.logged_draft import batches
from specctl.logs.positions import Floats, Longs
from specctl.replay.ladder.clock import LoadClock
from specctl.replay.ladder.ranking import Ranked
from specctl.replay.ladder.tally import Decided, tally

NUM_CONTEXTS = 8
"""Context lengths that decisions tell apart; times are charged at the true length."""
BATCH_POSITIONS = 2048
CLOSE, MAX_STEPS = 1e-4, 12
"""Relative change of λ at which it has settled, and steps after which a swing is let be."""


@dataclass(frozen=True)
class TreeTimes:
    """What trees cost where: `us` `[C, D + 1, M + 1]` by context, levels and draft nodes.

    Attributes:
        context: `[R]` int64, index of each position's context.
    """

    us: Floats
    context: Longs


@dataclass(frozen=True)
class Priced:
    """A price λ and the rate that it achieves on the requests that it was settled on."""

    tokens_per_us: float
    achieved_per_us: float


def tree_times(ranked: Ranked, clock: LoadClock) -> TreeTimes:
    """Times at up to `NUM_CONTEXTS` typical lengths; the drafter's reading is that of one token."""
    lengths = ranked.positions.context_tokens
    typical = np.unique(np.quantile(lengths, np.linspace(0, 1, NUM_CONTEXTS), method="nearest"))
    context = np.searchsorted((typical[1:] + typical[:-1]) / 2, lengths)
    deepest = int(ranked.depth[ranked.prob > 0].max(initial=0))
    us = clock.share_us(
        context_tokens=typical[:, None, None],
        num_tokens=np.arange(ranked.prob.shape[1] + 1) + 1,
        levels=np.arange(deepest + 1)[:, None],
        level_width=ranked.width,
        num_emitted=1,
    )
    return TreeTimes(us, context)


def best_trees(ranked: Ranked, times: TreeTimes, tokens_per_us: float) -> Decided:
    """The best tree of every position at a price."""
    rows = batches(ranked.positions.num_rows, BATCH_POSITIONS)
    parts = [_best_of_rows(ranked, times, tokens_per_us, some) for some in rows]
    accepted, size, levels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Decided(accepted.astype(np.int32), size + 1, levels, ranked.width)


def _best_of_rows(
    ranked: Ranked, times: TreeTimes, tokens_per_us: float, rows: slice
) -> tuple[Longs, Longs, Longs]:
    """`[B]` accepted tokens, draft nodes and levels of some rows; no drafting unless it pays."""
    context, on_path = times.context[rows], ranked.on_path[rows]
    prob, depth = ranked.prob[rows].astype(np.float64), ranked.depth[rows]
    best = 1 - tokens_per_us * times.us[context, 0, 0]
    accepted, size, levels = np.zeros((3, len(prob)), np.int64)
    for deepest in range(1, times.us.shape[1]):
        inside = depth <= deepest
        count = inside.cumsum(1)
        price = tokens_per_us * times.us[context[:, None], deepest, count]
        surplus = 1 + (prob * inside).cumsum(1) - price
        place = surplus.argmax(1)[:, None]
        value = np.take_along_axis(surplus, place, 1)[:, 0]
        hits = np.take_along_axis((on_path & inside).cumsum(1), place, 1)[:, 0]
        better = value > best
        best = np.where(better, value, best)
        accepted, levels = np.where(better, hits, accepted), np.where(better, deepest, levels)
        size = np.where(better, np.take_along_axis(count, place, 1)[:, 0], size)
    return accepted, size, levels


def settle(rate_of: Callable[[float], float], start: float) -> tuple[float, float]:
    """Dinkelbach's iteration: the price becomes the rate that it brought.

    Where `rate_of` is the optimum at each price, the rate rises until it is its own price, and
    that is the highest there is. The rate is flat there, so on a finite text, where it may swing
    a little, any price of the swing is as good.

    Args:
        rate_of: tokens per us achieved by the decisions at a price. start: any price above 0.

    Returns:
        The price and the rate that it brings.
    """
    price, found = start, rate_of(start)
    for _ in range(MAX_STEPS):
        if abs(found - price) <= CLOSE * price:
            break
        price, found = found, rate_of(found)
    return price, found


def tune_price(ranked: Ranked, clock: LoadClock, start: float) -> Priced:
    """The price that these requests settle at."""
    times = tree_times(ranked, clock)

    def rate_of(price: float) -> float:
        return tally(ranked.positions, best_trees(ranked, times, price), clock).tokens_per_us

    return Priced(*settle(rate_of, start))
