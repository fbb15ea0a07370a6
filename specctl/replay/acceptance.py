"""Acceptance in one trace set, by depth and by category of prompts, for a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specctl.errors import TraceEmptyError, TraceMismatchError
from specctl.logs.parquet import collected, scan_files
from specctl.logs.positions import Bools, Floats, Ints, coded
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, Support, segment_files
from specctl.policy import Policy, StaticTree
from specctl.replay.facts import PairFacts, ResultRecord
from specctl.replay.rounds import replay
from specctl.stats import Interval, Resamples, first_over_second, sums_by


class DepthAcceptance(ResultRecord):
    """Acceptance at depth d of one group of rounds."""

    depth: int
    # num_at_risk, num_accepted: rounds
    num_at_risk: int
    num_accepted: int
    num_censored: int  # rounds that reached d - 1, where the text or the tree ended
    conditional_prob: Interval  # accepted at d, given accepted at d - 1
    marginal_prob: Interval  # accepted at d


class CategoryFigures(ResultRecord):
    """One category of prompts."""

    name: str
    num_prompts: int
    num_rounds: int  # reference rounds
    tau: Interval  # tokens
    depths: tuple[DepthAcceptance, ...]  # over its rounds (dense: its positions)


class TraceFigures(PairFacts):
    """The figures of a report on one trace set."""

    kind: Literal["dense", "live"]
    num_prompts: int
    num_rows: int  # rounds, or positions of dense traces
    num_nodes: int  # drafted, roots excluded
    # support, tree: None of live traces; `tree` is the static tree, in words, that was replayed for
    # the reference rounds
    support: dict[str, int | bool] | None
    tree: str | None
    num_reference: int  # reference rounds
    num_unsupported: int  # of these, rounds of which the log lacks an expansion
    tau: Interval
    depths: tuple[DepthAcceptance, ...]
    categories: tuple[CategoryFigures, ...]


# ----------------------------------------------------------------------------- the rounds table

COUNTS = ("offered_depth", "num_drafted", "num_accepted", "num_emitted")


@dataclass(frozen=True)
class RoundTable:
    """The `rounds` table as arrays: R rounds (dense: positions) of P prompts, in the order of the
    log's chunks."""

    is_dense: bool
    # prompt, category: `[R]` int32 codes into `prompt_ids` and `categories`
    prompt: Ints
    prompt_ids: tuple[str, ...]
    category: Ints
    categories: tuple[str, ...]
    # offered_depth, num_drafted, num_accepted, num_emitted: `[R]` int32
    offered_depth: Ints
    num_drafted: Ints
    num_accepted: Ints
    num_emitted: Ints

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.prompt_ids)

    @property
    def is_cut(self) -> Bools:
        """`[R]`: the text ended on the accepted path, so the next depth is unknown."""
        return np.equal(self.num_emitted, self.num_accepted)


def read_round_table(traces: TraceSet) -> RoundTable:
    """The `rounds` rows of every file.

    Raises:
        TraceEmptyError: no rounds. TraceMismatchError: live and dense rounds together.
    """
    import polars as pl

    rounds = scan_files("rounds", [files["rounds"] for files in segment_files(traces)])
    names = pl.col("prompt_id", "category", "kind").cast(pl.String)
    table = collected(rounds.select(names, pl.col(*COUNTS).cast(pl.Int32)))
    kinds = table["kind"].unique().to_list()
    if kinds not in (["dense"], ["live"]):
        raise TraceMismatchError(
            f"a report takes dense or live rounds; these traces hold {' and '.join(kinds)} ones",
            hint="report on these folders one at a time",
        )
    prompts, categories = coded(table["prompt_id"]), coded(table["category"])
    counts = (table[name].to_numpy() for name in COUNTS)
    return RoundTable(kinds == ["dense"], *prompts, *categories, *counts)


# --------------------------------------------------------------------------------- the figures


def trace_figures(traces: TraceSet, *, seed: int = 0) -> TraceFigures:
    """Reads a trace set, dense or live.

    Args:
        seed: of the resamples of prompts behind every interval.

    Raises:
        TraceError: see `specctl.errors`.
    """
    rounds = read_round_table(traces)
    if not rounds.offered_depth.any():
        raise TraceEmptyError(
            "no round of these traces has a draft: they come from plain decoding",
            hint="collect with a drafter and a policy that drafts",
        )
    resamples = Resamples.draw(rounds.num_prompts, seed=seed)
    log = DenseLog.open(traces) if rounds.is_dense else None
    tree = None if log is None else reference_tree(log.support)
    if log is None or tree is None:
        reference = _live_rounds(rounds)
    else:
        reference = _replayed_rounds(log, tree, rounds)
    header = traces.header
    return TraceFigures(
        kind="dense" if rounds.is_dense else "live",
        target=str(header.collect.get("target", "unnamed")),
        drafter=str(header.collect.get("drafter", "unnamed")),
        target_digest=header.target_digest,
        drafter_digest=header.drafter_digest,
        sampling=header.sampling,
        traces_digest=traces.digest,
        num_prompts=rounds.num_prompts,
        num_rows=len(rounds.prompt),
        num_nodes=int(rounds.num_drafted.sum(dtype=np.int64)),
        support=None if log is None else vars(log.support).copy(),
        tree=None if tree is None else spec_of(tree),
        num_reference=len(reference.accepted),
        num_unsupported=int(reference.is_unsupported.sum()),
        tau=_tau(reference, resamples),
        depths=acceptance_by_depth(rounds, resamples),
        categories=tuple(_categories(rounds, reference, resamples)),
    )


def acceptance_by_depth(
    rounds: RoundTable, resamples: Resamples, inside: Bools | None = None
) -> tuple[DepthAcceptance, ...]:
    """Acceptance at every offered depth, without censored rounds.

    A round is *at risk* at depth d if its path reached depth d - 1, depth d was offered and the
    text went on. The accepted share of these is the conditional acceptance a_d. The marginal one is
    the product a_1 ... a_d, the product-limit estimate of Kaplan and Meier (1958); without
    censoring it is the plain share.

    Args:
        inside: `[R]`, some rounds; None for all.
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
    """Figures by category; prompts without one have the empty name."""
    for name, code in sorted((name, code) for code, name in enumerate(rounds.categories)):
        inside, chosen = rounds.category == code, reference.category == code
        yield CategoryFigures(
            name=name,
            num_prompts=len(np.unique(rounds.prompt[inside])),
            num_rounds=int(chosen.sum()),
            tau=_tau(reference, resamples, chosen),
            depths=acceptance_by_depth(rounds, resamples, inside),
        )


# ----------------------------------------------------------------------------- reference rounds


@dataclass(frozen=True)
class ReferenceRounds:
    """M rounds with a draft: of live traces their own; of dense ones those of the default EAGLE-2
    tree within the log, replayed.
    """

    # prompt, category: `[M]` int32, codes of `RoundTable`
    prompt: Ints
    category: Ints
    accepted: Ints  # `[M]` int32 draft tokens
    is_unsupported: Bools  # `[M]` bool, the log lacks an expansion that the tree needs


def reference_tree(support: Support) -> StaticTree:
    """The default EAGLE-2 tree, no deeper and no wider than the log."""
    default = StaticTree()
    top_k, depth = min(default.top_k, support.top_k), min(default.depth, support.depth)
    most = 1 + top_k + (depth - 1) * top_k**2
    return StaticTree(depth=depth, top_k=top_k, num_tokens=min(default.num_tokens, most))


def spec_of(tree: StaticTree) -> str:
    """The tree as `--policy` takes it."""
    settings = tree.model_dump(exclude={"kind"}).items()
    return ":".join([tree.kind, *(f"{name}={value}" for name, value in settings)])


def _live_rounds(rounds: RoundTable) -> ReferenceRounds:
    drafted = rounds.offered_depth > 0
    accepted = rounds.num_accepted[drafted]
    lacks = np.zeros(len(accepted), np.bool_)
    return ReferenceRounds(rounds.prompt[drafted], rounds.category[drafted], accepted, lacks)


def _replayed_rounds(log: DenseLog, tree: StaticTree, rounds: RoundTable) -> ReferenceRounds:
    """The tree's rounds over a dense log, with the codes of `rounds`."""
    [run] = replay(log, [Policy(shape=tree)], with_bounds=False)
    positions, request = run.positions, run.request
    prompt = _recoded(positions.prompt_ids, rounds.prompt_ids)[positions.prompt]
    category = _recoded(positions.categories, rounds.categories)[positions.category]
    lacks = run.outcomes.missing > 0
    return ReferenceRounds(prompt[request], category[request], run.outcomes.accepted, lacks)


def _recoded(names: Sequence[str], known: Sequence[str]) -> Ints:
    """Codes of names in `known`."""
    place = {name: code for code, name in enumerate(known)}
    return np.array([place[name] for name in names], np.int32)


def _tau(
    rounds: ReferenceRounds, resamples: Resamples, inside: Bools | slice = slice(None)
) -> Interval:
    """1 + accepted draft tokens a round, pooled over some of the rounds."""
    return resamples.mean(rounds.accepted[inside] + np.float64(1), rounds.prompt[inside])
