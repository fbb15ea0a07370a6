"""Figures of the papers from one pass over the nodes of a trace set.

children of accepted nodes ─► acceptance by entropy and rank (C2T, arXiv:2502.13652, figure 2)
first token of every draft ─► the target's two best logits (MARS, arXiv:2601.15498, figures 1, 5)
likeliest paths (dense) ────► AdaSD's tokens and thresholds (arXiv:2512.11280, figures 2, 3)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specctl.logs.positions import Bools, Floats, Longs
from specctl.logs.tree_log import LogChunk, Support, chain_of, join_chunks
from specctl.policy import EntropyStop, build_shape
from specctl.policy.adasd import EntropyStopShape
from specctl.policy.mars import Mars
from specctl.replay.fit_inputs import DISTANCE, tested_nodes
from specctl.replay.outcomes import online_steps
from specctl.results import EntropyRanks, Spread, StopThresholds, TargetMargins, TestedSignals
from specctl.stats import Resamples, sums_by

COLUMNS = (
    *("sibling_rank", "target_rank", "target_logp", "target_top1_logit", "target_top2_logit"),
    DISTANCE,
)
"""Columns of nodes that the figures need, besides entropies."""
ENTROPY_BOUNDS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Seven intervals, nats, as in C2T's figure, whose bounds the paper does not print."""
MAX_RANKS = 10
NUM_STEPS, NUM_LOGITS = 50, 40
"""Bins of ratios and distances in [0, 1], and of logits."""
SAMPLE_SIZE = 400
"""Points of a scatter plot."""
MAX_PLACES = 64
"""Positions at which thresholds are read."""


class PaperCounts:
    """What the figures are made of, gathered a chunk at a time.

    Args:
        sampling: of the traces. prompt_ids: in the order of the resamples.
        drawn: draft tokens were drawn from the drafter, so that their order among siblings says
            nothing.
    """

    def __init__(
        self,
        sampling: Mapping[str, Any],
        support: Support,
        prompt_ids: Sequence[str],
        *,
        is_dense: bool,
        drawn: bool,
    ) -> None:
        plain = {"temperature": (0, 1), "top_k": (0,), "top_p": (1,)}
        self._is_plain = all(sampling[name] in values for name, values in plain.items())
        self._support, self._is_dense = support, is_dense
        self._is_ranked = support.top_k > 0 and not drawn
        self._codes = {name: code for code, name in enumerate(prompt_ids)}
        cells = (len(ENTROPY_BOUNDS), min(MAX_RANKS, support.top_k))
        self._cells = np.zeros((3, *cells))  # nodes, their probabilities, accepted ones
        self._tops: list[Floats] = []  # first logit, second, probability of the first, rank, prompt
        self._chains: list[LogChunk] = []

    def watched(self, chunks: Iterable[LogChunk]) -> Iterator[LogChunk]:
        """The chunks, read with entropies and `COLUMNS`, each counted as it passes."""
        for chunk in chunks:
            if self._is_ranked:
                self._count_children(chunk)
                self._note_tops(chunk)
            if self._is_dense:
                self._chains.append(chain_of(chunk))
            yield chunk

    def _children(self, chunk: LogChunk, parents: Longs) -> tuple[Longs, Any]:
        """Log indices of their first children `[M, K]`, and which of these exist."""
        ranks = np.arange(self._support.top_k)
        index = chunk.first_child.numpy()[parents][:, None] + ranks
        inside = index < chunk.num_nodes
        index = np.where(inside, index, 0)
        return index, inside & (chunk.extra["sibling_rank"][index] == ranks)

    def _count_children(self, chunk: LogChunk) -> None:
        """Children of nodes on the path, of known fate."""
        expanded = chunk.on_path.numpy() & (chunk.first_child.numpy() >= 0)
        index, exists = self._children(chunk, np.flatnonzero(expanded))
        index, exists = index[:, :MAX_RANKS], exists[:, :MAX_RANKS]
        entropy = chunk.entropy.numpy()[index]
        chosen = exists & chunk.known.numpy()[index] & np.isfinite(entropy)
        row = np.searchsorted(ENTROPY_BOUNDS, entropy[chosen], side="right") - 1
        place = np.clip(row, 0, None) * self._cells.shape[2] + np.nonzero(chosen)[1]
        node = index[chosen]
        values = [np.ones(len(node)), np.exp(chunk.draft_logp.numpy()[node].astype(float))]
        sums = sums_by(place, self._cells[0].size, [*values, chunk.on_path.numpy()[node]])
        self._cells += sums.T.reshape(self._cells.shape)

    def _note_tops(self, chunk: LogChunk) -> None:
        """The target's two best at every root whose first draft token carries them."""
        rows = np.flatnonzero(chunk.first_child.numpy()[chunk.root.numpy()] >= 0)
        index, exists = self._children(chunk, chunk.root.numpy()[rows])
        first, second, rank, logp = (
            chunk.extra[name][index].astype(np.float64)
            for name in ("target_top1_logit", "target_top2_logit", "target_rank", "target_logp")
        )
        held = exists[:, 0] & np.isfinite(first[:, 0] + second[:, 0] + rank[:, 0])
        best, gap = first[held, 0], first[held, 0] - second[held, 0]
        rank, exists = rank[held], exists[held]
        # A child that is the target's best or second gives the log-probability of the best.
        best_logp = np.where(rank == 2, logp[held] + gap[:, None], logp[held])
        best_logp = np.where(exists & (rank <= 2) & self._is_plain, best_logp, -np.inf).max(1)
        prob = np.where(np.isfinite(best_logp), np.exp(best_logp), np.nan)
        prompt = [self._codes[name] for name in chunk.positions.row_prompts[rows[held]]]
        columns = (best, best - gap, prob, np.minimum(rank[:, 0], 3), prompt)
        self._tops.append(np.stack(columns, 1))

    def entropy_ranks(self) -> EntropyRanks | None:
        """None where no node counts."""
        nodes, probs, accepted = self._cells
        if not nodes.any():
            return None
        with np.errstate(invalid="ignore"):
            shares = [(values / nodes).tolist() for values in (probs, accepted)]
        mean_prob, accepted_frac = (tuple(map(tuple, rows)) for rows in shares)
        return EntropyRanks(
            bounds=ENTROPY_BOUNDS,
            num_nodes=tuple(map(tuple, nodes.astype(int).tolist())),
            mean_prob=mean_prob,
            accepted_frac=accepted_frac,
        )

    def margins(self, resamples: Resamples, *, seed: int) -> TargetMargins | None:
        """None where the log holds no logits of the target.

        Args:
            seed: of the sample.
        """
        if not any(map(len, self._tops)):
            return None
        first, second, prob, ranks, prompts = np.concatenate(self._tops).T
        rank = ranks.astype(np.int64)
        defined = second > 0  # then so is the first
        ratio = np.where(defined, second / np.where(defined, first, 1.0), np.nan)
        theta = Mars().theta
        low = ratio > theta
        logits, edges = np.histogram(first, NUM_LOGITS)
        generator = np.random.default_rng(seed)
        drawn = generator.choice(len(first), min(SAMPLE_SIZE, len(first)), replace=False)
        sampled = (values[drawn].tolist() for values in (first, second, prob, rank))
        low_ranks, other_ranks = (
            tuple(np.bincount(rank[chosen], minlength=4)[1:].tolist()) for chosen in (low, ~low)
        )
        return TargetMargins(
            num_positions=len(first),
            num_negative=int((first < 0).sum()),
            num_undefined=int((~defined).sum()),
            theta=theta,
            low_margin=resamples.mean(low, prompts.astype(np.int64)),
            logit_edges=tuple(edges.tolist()),
            logits=tuple(logits.tolist()),
            logit_ratios=_steps(ratio[defined]),
            prob_ratios=_steps(np.exp(second - first)),
            low_ranks=low_ranks,
            other_ranks=other_ranks,
            sample=tuple(zip(*sampled, strict=True)),
        )

    def thresholds(self) -> StopThresholds | None:
        """None of live traces, which hold no round but those that ran."""
        if not self._chains:
            return None
        return _stop_thresholds(join_chunks(self._chains), self._support.depth)


def _steps(values: Floats) -> tuple[int, ...]:
    """Histogram in `NUM_STEPS` from 0 to 1."""
    return tuple(np.histogram(values, NUM_STEPS, (0, 1))[0].tolist())


@torch.inference_mode()
def _stop_thresholds(chunk: LogChunk, depth: int) -> StopThresholds:
    """AdaSD's rounds over Q requests of R positions, no deeper than the log.

    Args:
        chunk: chains, with the column `js_distance`.
    """
    shape = EntropyStop(between="rejected", min_samples=1)
    shape = shape.model_copy(update={"window": min(shape.window, depth)})
    rule = build_shape(shape)
    assert isinstance(rule, EntropyStopShape)
    positions = chunk.positions
    threshold, last = np.full(positions.num_rows, np.nan), np.zeros(positions.num_rows, np.int64)
    tested, num_rounds, num_unsupported = [], 0, 0
    for step in online_steps(rule, chunk):
        threshold[step.rows] = rule.threshold(step.memory).numpy()
        last[step.rows] = step.rows
        place, accepted, node = tested_nodes(step)
        tested.append((positions.request[step.rows[place]], accepted, node))
        num_rounds += len(step.rows)
        num_unsupported += int((step.draft.expansions.missing > 0).sum())
    threshold = threshold[np.maximum.accumulate(last)]  # that of the round which emits a position
    threshold[~np.isfinite(threshold)] = np.nan  # none was learned yet
    request, accepted, node = (np.concatenate(column) for column in zip(*tested, strict=True))
    entropy = chunk.entropy.numpy()[node].astype(np.float64)
    distance = chunk.extra[DISTANCE][node].astype(np.float64)
    lengths = np.diff(positions.start)

    def signals(fate: Bools) -> TestedSignals:
        spreads = []
        for values in (entropy, distance):
            known = fate & np.isfinite(values)
            columns = (values[known], np.ones(int(known.sum())))
            total, size = sums_by(request[known], len(lengths), columns).T
            spreads.append(Spread.of(total[size > 0] / size[size > 0]))
        steps = _steps(distance[fate & np.isfinite(distance)])
        return TestedSignals(
            num_tokens=int(fate.sum()), entropy=spreads[0], distance=spreads[1], distances=steps
        )

    longest = int(lengths.max())
    grid = np.unique(np.linspace(0, longest - 1, min(MAX_PLACES, longest)).astype(int))
    place = np.minimum(positions.start[:-1, None] + grid, len(threshold) - 1)
    table = np.where(grid < lengths[:, None], threshold[place], np.nan)
    some = np.isfinite(table).any(0)
    quartiles = np.full((3, len(grid)), np.nan)
    quartiles[:, some] = np.nanquantile(table[:, some], (0.25, 0.5, 0.75), axis=0)
    # Examples: of the longest answers that have a threshold, those of a low and of a high one.
    whole = np.flatnonzero((lengths >= np.quantile(lengths, 0.9)) & np.isfinite(table).any(1))
    order = sorted(whole, key=lambda row: float(np.nanmean(table[row])))
    shown = sorted({int(q * (len(order) - 1)) for q in (0.1, 0.9)} if order else ())
    return StopThresholds(
        policy=f"adasd-paper:window={shape.window}",
        num_requests=len(lengths),
        num_rounds=num_rounds,
        num_unsupported=num_unsupported,
        accepted=signals(accepted),
        rejected=signals(~accepted),
        positions=tuple((grid + 1).tolist()),
        quartiles=tuple(map(tuple, quartiles.tolist())),
        paths=tuple(tuple(table[order[place]].tolist()) for place in shown),
    )
