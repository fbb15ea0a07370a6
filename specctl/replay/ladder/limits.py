"""The limits of a log: best trees at a price of time, the clairvoyant, the ceiling.

**Best trees.** The long-run rate is Σ tokens / Σ time, so at price λ (tokens per us) a tree S of n
nodes and d levels is worth 1 + Σ ρ(v) - λ (T_draft(d) + T_verify(n + 1)). For a given depth and
size the N nodes of highest ρ are best, since ρ never rises along a path; this leaves D · M
candidates in place of all closed subsets. λ is the rate that its own decisions achieve
(Dinkelbach's method). For linear times, the rule becomes "take v iff ρ(v) >= λ · ΔT". The depth of
a draft is chosen in hindsight, from the candidates of every level: a relaxation, so R_feat bounds
the policies with these features.

**The clairvoyant** knows the path of the text. At a position where the logged tree holds L tokens
of it, it drafts k <= L of them as a chain and verifies k + 1 nodes:

    F(t) = min over 0 <= k <= L(t) of  T_draft(k) + T_verify(k + 1) + F(t + k + 1)

A policy that accepts a <= L(t) tokens there drafts at least a levels and verifies at least a + 1
nodes, so F bounds every lossless policy on every request, if time never falls as levels, widths or
tokens grow. The ceiling is the same programme with L = D everywhere: a drafter without errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.logs.logged_draft import batches, logged_drafts
from specctl.logs.node_table import TABLE_COLUMNS, node_table
from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions, Singles, join_positions
from specctl.logs.tree_log import DenseLog, LogChunk, Support
from specctl.policy.rules import BaseShape, top_order
from specctl.progress import advance
from specctl.replay.cost.model import Steps
from specctl.replay.ladder.estimates import Estimates, joint_acceptance
from specctl.replay.metrics import LoadClock
from specctl.replay.outcomes import Outcomes
from specctl.replay.rounds import least_cost, walk_outcomes

BATCH_POSITIONS, BATCH_DECISIONS = 256, 2048
NOT_THERE = np.iinfo(np.int8).max
"""Depth of an empty slot, deeper than any tree."""
NUM_CONTEXTS = 8
"""Different context lengths in decisions; times are charged at the true length."""
CLOSE, MAX_STEPS = 1e-4, 12
"""Relative change of λ at convergence, and the most steps."""


# --------------------------------------------------------------------------------- ranked trees

WIDTHS = (1, 2, 4, 8)
"""Widths of ranked trees, besides the log's own top_k."""


def ranked_widths(support: Support) -> tuple[int, ...]:
    """Tree widths whose growth the log contains."""
    narrower = WIDTHS if support.nested else (1,)
    return tuple(sorted({*(w for w in narrower if w < support.top_k), 1, support.top_k}))


@dataclass(frozen=True)
class Ranked:
    """The M best nodes at R positions, among the nodes that a tree of `width` drafts.

    Any prefix of the order is a closed tree, and so are its nodes of depth <= d. Six bytes a node.
    """

    positions: Positions
    width: int  # top_k and frontier of the growth
    matched: Ints  # `[R]` int32, tokens of the text in the logged tree
    prob: Singles  # `[R, M]` float32, estimated joint acceptance, falling; 0 in empty slots
    depth: NDArray[np.int8]  # `[R, M]` int8
    on_path: Bools  # `[R, M]` bool

    def of(self, prompts: Collection[str]) -> Ranked:
        """The requests of some prompts alone."""
        names = np.array(self.positions.prompt_ids)[self.positions.prompt]
        requests = np.isin(names, list(prompts))
        rows = self.positions.rows_of(requests)
        return Ranked(
            self.positions.take(requests),
            self.width,
            self.matched[rows],
            self.prob[rows],
            self.depth[rows],
            self.on_path[rows],
        )


def rank_log(
    log: DenseLog,
    estimates: Estimates,
    widths: Sequence[int],
    *,
    num_kept: int,
) -> Iterator[tuple[tuple[str, int], Ranked]]:
    """Reads a log once: the ranked trees by name of the estimate and width, one after another."""
    read: list[Positions] = []
    matched, end = np.empty(log.num_positions, np.int32), 0
    kinds, most = (np.float32, np.int8, np.bool_), log.support.depth
    sizes = {width: min(num_kept, width + (most - 1) * width**2) for width in widths}
    wholes: dict[tuple[str, int], list[Any]] = {  # small arrays would leave holes
        (name, width): [np.empty((log.num_positions, sizes[width]), kind) for kind in kinds]
        for name, width in product(estimates.conditionals, widths)
    }
    for chunk in log.chunks(extra=TABLE_COLUMNS):
        nodes, positions = node_table(chunk), chunk.positions
        start, end = end, end + positions.num_rows
        read.append(positions)
        matched[start:end] = chunk.matched
        folds = [estimates.fold_of.get(name, 0) for name in positions.row_prompts]
        fold = np.array(folds)[nodes.row]
        pools = {width: _grow_pools(chunk, width) for width in widths}
        wanted = np.zeros(chunk.num_nodes + 1, np.bool_)
        for node, _ in chain.from_iterable(pools.values()):
            wanted[node.numpy()] = True  # -1 lands in the spare last place
        for name, conditional in estimates.conditionals.items():
            joint = joint_acceptance(conditional, nodes, fold, wanted[:-1])
            for width, pool in pools.items():
                columns = _rank_pools(chunk, pool, joint, sizes[width])
                for whole, column in zip(wholes[name, width], columns, strict=True):
                    whole[start:end] = column
        advance("positions", positions.num_rows)
    together = join_positions(read)
    for key in list(wholes):
        yield key, Ranked(together, key[1], matched[:end], *(c[:end] for c in wholes.pop(key)))


@torch.inference_mode()
def _grow_pools(chunk: LogChunk, width: int) -> list[tuple[Tensor, Tensor]]:
    """Nodes of the static tree of (top_k width, width), by the runtime's own growth.

    Returns:
        For each batch of rows, `[B, P]` int64 flat log indices, -1 in empty slots and for roots;
        and `[B, P]` int8 depths, `NOT_THERE` there.
    """
    rule, pools = BaseShape(chunk.support.depth, width, width, 2), []
    for draft in logged_drafts(rule, chunk, BATCH_POSITIONS):
        tree, node = draft.pool, draft.node
        empty = ~tree.valid | (node < 0)
        empty[:, 0] = True
        depth = tree.depth.masked_fill(empty, NOT_THERE).to(torch.int8)
        pools.append((node.masked_fill(empty, -1), depth))
    return pools


@torch.inference_mode()
def _rank_pools(
    chunk: LogChunk, pools: list[tuple[Tensor, Tensor]], joint: Singles, num_kept: int
) -> Iterator[Any]:
    """Columns of `Ranked`: the best nodes of every pool, given each logged node's acceptance."""
    score, parts = torch.from_numpy(joint), []
    for node, depth in pools:
        prob = score[node.clamp(min=0)].masked_fill(node < 0, -1.0)
        order = top_order(prob, num_kept)
        on_path = chunk.on_path[node.clamp(min=0)] & (node >= 0)
        parts.append([values.gather(1, order) for values in (prob.clamp(min=0), depth, on_path)])
    columns = [torch.cat(list(column)) for column in zip(*parts, strict=True)]
    short = num_kept - columns[0].shape[1]  # small pools are filled up
    return (
        torch.nn.functional.pad(column, (0, short), value=empty).numpy()
        for column, empty in zip(columns, (0.0, NOT_THERE, False), strict=True)
    )


# -------------------------------------------------------------------------- best trees at a price


@dataclass(frozen=True)
class TreeTimes:
    """Times of trees: `us` `[C, D + 1, M + 1]` by context, levels and draft nodes."""

    us: Floats
    context: Longs  # `[R]` int64, index of each position's context


def tree_times(ranked: Ranked, clock: LoadClock) -> TreeTimes:
    """Times at up to `NUM_CONTEXTS` typical lengths; the drafter reads one token."""
    lengths = ranked.positions.context_tokens
    typical = np.unique(np.quantile(lengths, np.linspace(0, 1, NUM_CONTEXTS), method="nearest"))
    context = np.searchsorted((typical[1:] + typical[:-1]) / 2, lengths)
    deepest = int(ranked.depth[ranked.prob > 0].max(initial=0))
    sizes, levels = np.arange(ranked.prob.shape[1] + 1) + 1, np.arange(deepest + 1)[:, None]
    steps = Steps(1, sizes, typical[:, None, None] - 1, levels, ranked.width, num_emitted=1)
    return TreeTimes(clock.share_us(steps), context)


def best_trees(ranked: Ranked, times: TreeTimes, tokens_per_us: float) -> Outcomes:
    """The best tree of every position at a price; a plain round if no tree pays."""
    parts = []
    for rows in batches(ranked.positions.num_rows, BATCH_DECISIONS):
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
        parts.append((accepted, size, levels))
    accepted, size, levels = (np.concatenate(column) for column in zip(*parts, strict=True))
    wanted = np.where(levels > 0, 1 + (levels - 1) * ranked.width, 0)
    return Outcomes.of(accepted.astype(np.int32), verified=size + 1, levels=levels, wanted=wanted)


def settle(rate_of: Callable[[float], float], start: float) -> tuple[float, float]:
    """Dinkelbach's iteration: the next price is the rate at the last one.

    If `rate_of` is optimal at each price, the rate rises to a fixed point, the highest rate. It is
    flat there, so on a finite text, where the price may oscillate, each of these prices is as good.

    Args:
        rate_of: tokens per us of the decisions at a price. start: any price above 0.

    Returns:
        The price, and the rate at it.
    """
    price, found = start, rate_of(start)
    for _ in range(MAX_STEPS):
        if abs(found - price) <= CLOSE * price:
            break
        price, found = found, rate_of(found)
    return price, found


def tune_price(ranked: Ranked, clock: LoadClock, start: float) -> tuple[float, float]:
    """The price at which these requests settle, and the rate at it."""
    times = tree_times(ranked, clock)

    def rate_of(price: float) -> float:
        run = walk_outcomes(None, ranked.positions, best_trees(ranked, times, price))
        return float(run.emitted.sum() / clock(run).sum())

    return settle(rate_of, start)


# ------------------------------------------------------------------ the clairvoyant, the ceiling


def clairvoyant(positions: Positions, reach: Ints, clock: LoadClock) -> Outcomes:
    """The outcomes of least time.

    Args:
        reach: `[R]` draft tokens that a round may accept, L(t).
    """
    limit = np.minimum(reach, positions.remaining - 1)  # the bonus token emits the last one
    one = np.ones_like(limit)
    _, emitted = least_cost(positions, round_costs(positions, limit, clock), one, limit + one)
    taken = emitted - 1
    return Outcomes.of(taken, verified=emitted, levels=taken, wanted=taken)  # one path


def round_costs(positions: Positions, limit: Ints, clock: LoadClock) -> Floats:
    """`[R, K + 1]` us of a round that drafts a chain of k tokens and accepts all."""
    taken = np.arange(int(limit.max(initial=0)) + 1)
    is_last = taken + 1 >= positions.remaining[:, None]
    emitted = np.where(is_last, 0, taken + 1)
    context = positions.context_tokens[:, None] - 1
    return clock.share_us(Steps(1, taken + 1, context, taken, level_width=1, num_emitted=emitted))
