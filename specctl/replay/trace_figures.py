"""Figures of one trace set for a report, read a part at a time.

rounds ─────────────────────────────► acceptance by depth and category
nodes ──────────────────────────────► confidence of accepted and rejected nodes, `paper_figures`
trees, replayed (dense) or live ────► terminal confidence ranks (TCR), Φ
trees, summarised (dense) ──────────► static settings
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from specctl.errors import TraceEmptyError
from specctl.features import phi
from specctl.logs.logged_draft import logged_drafts
from specctl.logs.positions import Bools, Floats, Ints, Longs, join_rows
from specctl.logs.round_table import RoundTable, read_round_table
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk, Support, open_log, support_of
from specctl.policy import Chain, Policy, Ratio, StaticTree, build_shape
from specctl.replay.ladder.static import static_submissions
from specctl.replay.paper_figures import COLUMNS, PaperCounts
from specctl.replay.score import rank_quantiles
from specctl.replay.walk import walk
from specctl.results import (
    CategoryFigures,
    ConfidenceFigures,
    DepthAcceptance,
    PhiAcceptance,
    PhiBin,
    RankedRounds,
    Separation,
    StaticPoint,
    TerminalRanks,
    TraceFigures,
)
from specctl.stats import Interval, Resamples, auc, first_over_second, spearman, sums_by

OnPositions = Callable[[int], None]
NODE_COLUMNS = ("depth", "joint_logp")
ACCEPTED, UNKNOWN = 1, -1
NUM_PHI_BINS = 10
TOP_SHARES = (0.1, 0.25, 0.5)
"""Of the submitted draft tokens; the paper's claim is about the top quarter."""
NUM_FINE = 30
EDGES = np.concatenate(
    [[0.0], 0.02 * 2.0 ** (np.arange(1 - NUM_FINE, 0) / 2), np.linspace(0.02, 1, 99)]
)
"""Bounds of the bins of confidence: steps of 0.01, and below 0.02, where most nodes of a tree lie,
of a factor of sqrt(2) down to 8.6e-7. Bin b holds EDGES[b] <= p < EDGES[b + 1], the last also 1."""
NUM_BINS = len(EDGES) - 1
TOP_KS = (1, 2, 4, 8, 10)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 11)
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Nodes submitted, root counted."""
Setting = tuple[int, int, int]
"""top_k, depth, num_tokens."""


def trace_figures(
    traces: TraceSet, *, seed: int = 0, on_positions: OnPositions = lambda _: None
) -> TraceFigures:
    """Reads a trace set, dense or live.

    Args:
        seed: of the resamples of prompts behind every interval.
        on_positions: called with the positions of each finished part; see `num_passes`.

    Raises:
        TraceError: see `specctl.errors`.
    """
    rounds = read_round_table(traces)
    depth = int(rounds.offered_depth.max())
    if depth == 0:
        raise TraceEmptyError(
            "traces",
            expected="rounds with a draft",
            found="plain decoding alone",
            fix="collect with a drafter and a policy that drafts",
        )
    resamples = Resamples.draw(rounds.num_prompts, seed=seed)
    opened = open_log(traces)
    log = opened if isinstance(opened, DenseLog) else None
    tree = None if log is None else reference_tree(log.support)
    if log is None or tree is None:
        reference = _live_rounds(rounds)
    else:
        parts = _ticked(log.chunks(), on_positions)
        reference = join_rows([_replayed_rounds(chunk, tree, rounds) for chunk in parts])
    nodes = opened.chunks(extra=(*NODE_COLUMNS, *COLUMNS))
    header = traces.header
    acceptance = Policy.model_validate(header.policy).acceptance
    papers = PaperCounts(
        header.sampling,
        opened.support,
        rounds.prompt_ids,
        is_dense=log is not None,
        drawn=isinstance(acceptance, Ratio),
    )
    watched = papers.watched(_ticked(nodes, on_positions))
    confidence = count_confidence(watched, rounds, depth, resamples)
    collected = header.collect
    return TraceFigures(
        kind=rounds.kind,  # type: ignore[arg-type]
        target=str(collected.get("target", "unnamed")),
        drafter=str(collected.get("drafter", "unnamed")),
        target_digest=traces.header.target_digest,
        drafter_digest=traces.header.drafter_digest,
        sampling=traces.header.sampling,
        traces_digest=traces.digest,
        num_prompts=rounds.num_prompts,
        num_rows=len(rounds.prompt),
        num_nodes=int(rounds.num_drafted.sum(dtype=np.int64)),
        support=None if log is None else vars(log.support).copy(),
        tree=None
        if tree is None
        else f"eagle2:depth={tree.depth}:top_k={tree.top_k}:num_tokens={tree.num_tokens}",
        num_reference=len(reference.accepted),
        num_unsupported=int(reference.is_unsupported.sum()),
        tau=_tau(reference, resamples),
        depths=acceptance_by_depth(rounds, resamples),
        categories=tuple(_categories(rounds, reference, resamples)),
        ranks=_terminal_ranks(reference, rounds.categories, resamples),
        phi=_phi_acceptance(reference, resamples),
        confidence=confidence,
        statics=()
        if log is None
        else tuple(sweep(log, resamples, rounds.prompt_ids, on_positions)),
        entropy_ranks=papers.entropy_ranks(),
        margins=papers.margins(resamples, seed=seed),
        thresholds=papers.thresholds(),
    )


def num_passes(traces: TraceSet) -> int:
    """Number of times that `trace_figures` reports every position: once a pass over the trees."""
    if traces.header.collect.get("dense") is None:
        return 1
    return 2 + len({top_k for top_k, _, _ in settings_of(support_of(traces.header))})


# ----------------------------------------------------------------------------------- by depth


def acceptance_by_depth(
    rounds: RoundTable, resamples: Resamples, inside: Bools | None = None
) -> tuple[DepthAcceptance, ...]:
    """Acceptance at every offered depth, censored rounds left out and never counted as rejected.

    At depth d a round is *at risk* where its path reached depth d - 1, depth d was offered, and the
    text went on. The share of those that accept is the conditional acceptance a_d; the marginal one
    is the product a_1 ... a_d, the product-limit estimate of Kaplan and Meier (1958), which is the
    plain share where nothing is censored.

    Args:
        inside: `[R]`, the rounds that count; all by default.
    """
    chosen = np.ones(len(rounds.prompt), np.bool_) if inside is None else inside
    accepted, offered = rounds.num_accepted, rounds.offered_depth
    depth = int(offered[chosen].max(initial=0))
    columns = []
    for d in range(1, depth + 1):
        reached, hit = chosen & (accepted >= d - 1), chosen & (accepted >= d)
        at_risk = hit | (reached & ~rounds.is_cut & (offered >= d))
        columns += [at_risk, hit, reached & ~at_risk]
    if not columns:
        return ()
    values = np.stack(columns, 1).astype(np.float64)
    sums = sums_by(rounds.prompt, rounds.num_prompts, values).reshape(-1, depth, 3)

    def conditional(sums: Floats) -> Floats:
        return first_over_second(sums[..., [1, 0]])

    def marginal(sums: Floats) -> Floats:
        """Product over the depths of flattened `[..., d * 3]` sums."""
        return np.asarray(conditional(sums.reshape(*sums.shape[:-1], -1, 3)).prod(-1))

    return tuple(
        DepthAcceptance(
            depth=d,
            num_at_risk=int(sums[:, d - 1, 0].sum()),
            num_accepted=int(sums[:, d - 1, 1].sum()),
            num_censored=int(sums[:, d - 1, 2].sum()),
            conditional_prob=resamples.interval(sums[:, d - 1], conditional),
            marginal_prob=resamples.interval(sums[:, :d].reshape(len(sums), -1), marginal),
        )
        for d in range(1, depth + 1)
    )


def _categories(
    rounds: RoundTable, reference: ReferenceRounds, resamples: Resamples
) -> Iterator[CategoryFigures]:
    """By name; prompts without a category go by the empty name."""
    for name, code in sorted((name, code) for code, name in enumerate(rounds.categories)):
        inside = rounds.category == code
        chosen = reference.pick(reference.category == code)
        ranked = chosen.pick(~chosen.is_cut & (chosen.tcr > 0))
        yield CategoryFigures(
            name=name,
            num_prompts=len(np.unique(rounds.prompt[inside])),
            num_rounds=len(chosen.accepted),
            tau=_tau(chosen, resamples),
            mean_tcr=resamples.mean(ranked.tcr, ranked.prompt),
            depths=acceptance_by_depth(rounds, resamples, inside),
        )


# ----------------------------------------------------------------------------- reference rounds


@dataclass(frozen=True)
class ReferenceRounds:
    """M rounds with a draft.

    Live traces bring the rounds that their policy ran. Dense traces hold a tree at every position
    and no rounds, so the default EAGLE-2 tree, as far as the log contains it, is replayed.

    Attributes:
        prompt, category: `[M]` int32, codes of `RoundTable`.
        accepted: `[M]` int32 draft tokens. submitted: `[M]` int32 nodes, root included.
        tcr: `[M]` int32, rank among the submitted; 0 where nothing was accepted.
        phi: `[M]` float64, nats, NaN where there is none. phi_depth: `[M]` int32, levels.
        is_cut: `[M]` bool, the text ended on the accepted path above the deepest level: more might
            have been accepted.
        is_unsupported: `[M]` bool, the log lacks an expansion that the tree needs.
    """

    prompt: Ints
    category: Ints
    accepted: Ints
    submitted: Ints
    tcr: Ints
    phi: Floats
    phi_depth: Ints
    is_cut: Bools
    is_unsupported: Bools

    def pick(self, rows: Bools) -> ReferenceRounds:
        """Some of the rounds."""
        return ReferenceRounds(*(getattr(self, field.name)[rows] for field in fields(self)))


def reference_tree(support: Support) -> StaticTree:
    """The default EAGLE-2 tree, no deeper and no wider than the log."""
    default = StaticTree()
    top_k, depth = min(default.top_k, support.top_k), min(default.depth, support.depth)
    most = 1 + top_k + (depth - 1) * top_k**2
    return StaticTree(depth=depth, top_k=top_k, num_tokens=min(default.num_tokens, most))


def _live_rounds(rounds: RoundTable) -> ReferenceRounds:
    """The live rounds that drafted anything."""
    found = ReferenceRounds(
        rounds.prompt,
        rounds.category,
        rounds.num_accepted,
        rounds.num_verified,
        rounds.tcr,
        rounds.phi,
        rounds.phi_depth,
        rounds.is_cut & (rounds.num_accepted < rounds.offered_depth),
        np.zeros(len(rounds.prompt), np.bool_),
    )
    return found.pick(rounds.offered_depth > 0)


@torch.inference_mode()
def _replayed_rounds(chunk: LogChunk, tree: StaticTree, rounds: RoundTable) -> ReferenceRounds:
    """The rounds that `tree` would run over a part of a dense log; codes are those of `rounds`."""
    positions, parts = chunk.positions, []
    for draft in logged_drafts(build_shape(tree), chunk):
        counts = (
            draft.num_accepted,
            (draft.submitted >= 0).sum(1),
            draft.terminal_rank,
            draft.expansions.missing,
        )
        whole = (count.to(torch.int32).numpy() for count in counts)
        parts.append((*whole, phi(draft.pool).numpy()))
    held, submitted, tcr, missing, phis = (np.concatenate(c) for c in zip(*parts, strict=True))
    accepted = np.minimum(held, positions.remaining)
    visited = walk(positions, accepted + 1)
    accepted, request = accepted[visited], positions.request[visited]
    prompt = _recoded(positions.prompt_ids, rounds.prompt_ids)[positions.prompt]
    category = _recoded(positions.categories, rounds.categories)[positions.category]
    return ReferenceRounds(
        prompt[request],
        category[request],
        accepted,
        submitted[visited],
        tcr[visited],
        phis[visited].astype(np.float64),
        np.full(len(accepted), tree.depth, np.int32),
        (positions.remaining[visited] == accepted) & (accepted < tree.depth),
        missing[visited] > 0,
    )


def _recoded(names: Sequence[str], known: Sequence[str]) -> Ints:
    """Codes in `known` of each of `names`."""
    place = {name: code for code, name in enumerate(known)}
    return np.array([place[name] for name in names], np.int32)


def _tau(rounds: ReferenceRounds, resamples: Resamples) -> Interval:
    """1 + accepted draft tokens a round, pooled."""
    return resamples.mean(rounds.accepted + np.float64(1), rounds.prompt)


def _terminal_ranks(
    rounds: ReferenceRounds, categories: Sequence[str], resamples: Resamples
) -> TerminalRanks | None:
    """Where accepted paths end; None where nothing was accepted."""
    whole = rounds.pick(~rounds.is_cut)
    used = whole.pick(whole.tcr > 0)
    if not len(used.tcr):
        return None
    most = int(rounds.submitted.max()) - 1
    top_shares = {
        f"{s:.0%}": resamples.mean(used.tcr <= np.ceil(s * (used.submitted - 1)), used.prompt)
        for s in TOP_SHARES
    }
    sizes = np.bincount(used.category, minlength=len(categories))
    return TerminalRanks(
        num_empty=len(whole.tcr) - len(used.tcr),
        num_cut=int(rounds.is_cut.sum()),
        num_draft_tokens=most,
        top_shares=top_shares,
        whole=_ranked(None, used, most, resamples),
        categories=tuple(
            _ranked(categories[code], used.pick(used.category == code), most, resamples)
            for code in np.argsort(-sizes, kind="stable")
            if sizes[code] and categories[code]
        ),
    )


def _ranked(
    name: str | None, rounds: ReferenceRounds, most: int, resamples: Resamples
) -> RankedRounds:
    """Rounds that accepted a token, by rank up to `most`."""
    has_phi = _comparable_phi(rounds)[1]
    phis = rounds.phi[has_phi]
    sums = sums_by(rounds.tcr[has_phi] - 1, most, [phis, np.ones(len(phis))])
    by_rank = [rounds.pick(rounds.tcr == rank) for rank in range(1, most + 1)]
    return RankedRounds(
        name=name,
        num_prompts=len(np.unique(rounds.prompt)),
        num_rounds=len(rounds.tcr),
        counts=tuple(len(of.tcr) for of in by_rank),
        tau=tuple(_tau(of, resamples) for of in by_rank),
        mean_phi=tuple(first_over_second(sums).tolist()),
        quantiles=rank_quantiles(np.bincount(rounds.tcr)),
    )


def _comparable_phi(rounds: ReferenceRounds) -> tuple[int, Bools]:
    """The most frequent depth of Φ, and the rounds `[M]` that have it.

    Φ of other depths does not compare (`specctl.features.phi`).
    """
    has_phi = np.isfinite(rounds.phi)
    counted = Counter(rounds.phi_depth[has_phi].tolist())
    depth = counted.most_common(1)[0][0] if counted else 0
    return depth, has_phi & (rounds.phi_depth == depth)


def _phi_acceptance(rounds: ReferenceRounds, resamples: Resamples) -> PhiAcceptance | None:
    """τ in ten bins of Φ of equally many rounds; None where no round has a Φ."""
    depth, has_phi = _comparable_phi(rounds)
    used = rounds.pick(has_phi & ~rounds.is_cut)
    if not len(used.phi):
        return None
    bounds = np.unique(np.quantile(used.phi, np.linspace(0, 1, NUM_PHI_BINS + 1)))
    place = np.clip(np.searchsorted(bounds, used.phi, side="left") - 1, 0, max(len(bounds) - 2, 0))
    return PhiAcceptance(
        depth=depth,
        num_rounds=len(used.phi),
        num_left_out=len(rounds.phi) - len(used.phi),
        spearman=spearman(used.phi, used.accepted),
        bins=tuple(
            PhiBin(
                low=float(chosen.phi.min()),
                high=float(chosen.phi.max()),
                mean_phi=float(chosen.phi.mean()),
                num_rounds=len(chosen.phi),
                tau=_tau(chosen, resamples),
            )
            for chosen in (used.pick(place == code) for code in np.unique(place))
        ),
    )


# ----------------------------------------------------------------------------------- confidence


class ConfidenceCounts:
    """Counts of one pass over nodes or layers: P prompts, D depths.

    Attributes:
        table: `[P, D, 2, bins]` int32, accepted and rejected ones. unknown: `[D]` int64.
    """

    def __init__(self, num_prompts: int, depth: int) -> None:
        self.table = np.zeros((num_prompts, depth, 2, NUM_BINS), np.int32)
        self.unknown = np.zeros(depth, np.int64)

    def add(self, prompt: Ints, depth: Longs, joint_logp: Any, fate: Any) -> None:
        """Counts rows `[T]`; those of depth 0, the roots, are no drafts.

        Args:
            joint_logp: nats. fate: 1 accepted, 0 rejected, -1 unknown.
        """
        unknown = (depth > 0) & (fate == UNKNOWN)
        self.unknown += np.bincount(depth[unknown] - 1, minlength=len(self.unknown))
        known = (depth > 0) & (fate != UNKNOWN)
        prompts, place = np.unique(prompt[known], return_inverse=True)
        shape = (len(prompts), *self.table.shape[1:])
        index = (place, depth[known] - 1, 1 - fate[known], bins_of(joint_logp[known]))
        counted = np.bincount(np.ravel_multi_index(index, shape), minlength=int(np.prod(shape)))
        self.table[prompts] += counted.reshape(shape).astype(np.int32)

    def separations(self, resamples: Resamples) -> Iterator[Separation]:
        """Depth by depth."""

        def area(counts: Floats) -> Floats:
            return auc(*np.split(counts, 2, axis=-1))

        for d, num_unknown in enumerate(self.unknown.tolist(), start=1):
            counts = self.table[:, d - 1]
            accepted, rejected = counts.sum(0, dtype=np.int64)
            pairs = float(accepted.sum()) * float(rejected.sum())
            tied = float((accepted.astype(np.float64) * rejected).sum())
            yield Separation(
                depth=d,
                num_accepted=int(accepted.sum()),
                num_rejected=int(rejected.sum()),
                num_unknown=num_unknown,
                auc=resamples.interval(counts.reshape(len(counts), -1).astype(np.float64), area),
                auc_resolution=tied / 2 / pairs if pairs else float("nan"),
                accepted=tuple(accepted.tolist()),
                rejected=tuple(rejected.tolist()),
            )


def count_confidence(
    chunks: Iterable[LogChunk], rounds: RoundTable, depth: int, resamples: Resamples
) -> ConfidenceFigures:
    """Separation of accepted from rejected by two signals of the drafter, in one pass.

    The joint probability of every drafted node, and the *layer confidence* of a round: the largest
    joint probability among the nodes of a depth (arXiv:2604.09603, Eq. 6), against whether the path
    reached that depth.

    Args:
        chunks: read with `NODE_COLUMNS`.
    """
    nodes = ConfidenceCounts(rounds.num_prompts, depth)
    layers = ConfidenceCounts(rounds.num_prompts, depth)
    for chunk in chunks:
        positions, root = chunk.positions, chunk.root.numpy()
        codes = _recoded(positions.prompt_ids, rounds.prompt_ids)[positions.prompt]
        prompt = np.repeat(codes[positions.request], np.diff(root, append=chunk.num_nodes))
        level, joint = chunk.extra["depth"].astype(np.int64), chunk.extra["joint_logp"]
        fate = torch.where(chunk.known, chunk.on_path.to(torch.int8), UNKNOWN).numpy()
        nodes.add(prompt, level, joint, fate)
        first = np.flatnonzero(np.diff(level, prepend=-1))  # of each level of each tree
        found = np.maximum.reduceat(fate, first)
        unknown = np.minimum.reduceat(fate, first) == UNKNOWN
        found = np.where((found != ACCEPTED) & unknown, UNKNOWN, found)
        layers.add(prompt[first], level[first], np.maximum.reduceat(joint, first), found)
    return ConfidenceFigures(
        edges=tuple(EDGES.tolist()),
        nodes=tuple(nodes.separations(resamples)),
        layers=tuple(layers.separations(resamples)),
    )


def _ticked(chunks: Iterable[LogChunk], on_positions: OnPositions) -> Iterator[LogChunk]:
    for chunk in chunks:
        yield chunk
        on_positions(chunk.positions.num_rows)


def bins_of(joint_logp: Any) -> Any:
    """Bin of each log-probability."""
    prob = np.exp(joint_logp.astype(np.float64))
    return np.clip(np.searchsorted(EDGES, prob, side="right") - 1, 0, NUM_BINS - 1)


# ------------------------------------------------------------------------------ static settings


def settings_of(support: Support) -> tuple[Setting, ...]:
    """The grid within the log: every chain, and trees that fill neither less nor more than they
    can hold."""
    depths = [d for d in DEPTHS if d <= support.depth]
    chains = [(1, d, d + 1) for d in depths]
    trees = [
        (k, d, size)
        for k in TOP_KS[1:]
        for d in depths
        for size in SIZES
        if k <= support.top_k and d < size <= 1 + k + (d - 1) * k * k
    ]
    return (*chains, *trees)


def sweep(
    log: DenseLog,
    resamples: Resamples,
    prompt_ids: Sequence[str],
    on_positions: OnPositions = lambda _: None,
) -> list[StaticPoint]:
    """Every setting of the grid over every request: verified tokens per output token against τ.

    Counts only, so it holds on any hardware; the cost of a verified token is the cost model's.

    Args:
        prompt_ids: in the order of the resamples.
        on_positions: called with the positions of each part, once a top_k.
    """
    settings = settings_of(log.support)
    shapes = [
        Chain(num_draft_tokens=d) if k == 1 else StaticTree(depth=d, top_k=k, num_tokens=n)
        for k, d, n in settings
    ]
    sums = np.zeros((len(settings), len(prompt_ids), 5))
    policies = [Policy(shape=shape) for shape in shapes]
    for index, of in static_submissions(log, policies, on_positions=on_positions):
        positions, accepted = of.positions, of.outcomes.accepted
        rows = np.flatnonzero(walk(positions, accepted + 1))
        columns = (
            np.ones(len(rows)),
            accepted[rows],
            np.minimum(accepted + 1, positions.remaining)[rows],
            of.outcomes.verified[rows],
            of.outcomes.missing[rows],
        )
        prompt = _recoded(positions.prompt_ids, prompt_ids)[positions.prompt]
        values = np.stack(columns, 1).astype(np.float64)
        sums[index] = sums_by(prompt[positions.request[rows]], len(prompt_ids), values)
    points = []
    for (top_k, depth, num_tokens), of_prompts in zip(settings, sums, strict=True):
        calls, *_, missing = of_prompts.sum(0)
        points.append(
            StaticPoint(
                top_k=top_k,
                depth=depth,
                num_tokens=num_tokens,
                calls=int(calls),
                support=float(1 - missing / calls),
                verified_per_token=resamples.interval(of_prompts, lambda s: s[..., 3] / s[..., 2]),
                tau=resamples.interval(of_prompts, lambda s: 1 + s[..., 1] / s[..., 0]),
                on_front=False,
            )
        )
    best = -np.inf
    for point in sorted(
        (point for point in points if point.is_supported),
        key=lambda p: (p.verified_per_token.value, -p.tau.value),
    ):
        if point.tau.value > best:
            best = point.tau.value
            points[points.index(point)] = point.model_copy(update={"on_front": True})
    return points
