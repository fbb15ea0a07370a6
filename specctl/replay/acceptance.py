"""Acceptance in one trace set, by depth and by category of prompts, for a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from specctl.errors import TraceEmptyError, TraceMismatchError
from specctl.logs.parquet import collected, scan_files
from specctl.logs.positions import Ints
from specctl.logs.trace_set import TraceSet, hardware_of
from specctl.logs.tree_log import DenseLog, Support, segment_files
from specctl.policy import Policy, StaticTree
from specctl.replay.facts import PairFacts, ResultRecord
from specctl.replay.rounds import replay
from specctl.runtime.words import words_of
from specctl.stats import Interval, Resamples, first_over_second, sums_by

if TYPE_CHECKING:
    import polars as pl


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
    hardware: tuple[str, ...] | None  # that collected the traces; None if they do not say
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


# --------------------------------------------------------------------------------- the figures

COUNTS = ("offered_depth", "num_drafted", "num_accepted", "num_emitted")


def trace_figures(traces: TraceSet, *, seed: int = 0) -> TraceFigures:
    """Reads a trace set, dense or live.

    Args:
        seed: of the resamples of prompts behind every interval.

    Raises:
        TraceEmptyError: no round with a draft. TraceMismatchError: live and dense rounds together.
        TraceError: see `specctl.errors`.
    """
    import polars as pl

    rounds = read_rounds(traces)
    if not (rounds["offered_depth"] > 0).any():
        raise TraceEmptyError(
            "no round of these traces has a draft: they come from plain decoding",
            hint="collect with a drafter and a policy that drafts",
        )
    resamples = Resamples.draw(rounds["prompt_id"].n_unique(), seed=seed)
    log = tree = None
    if rounds["kind"][0] == "dense":
        log = DenseLog.open(traces)
        tree = reference_tree(log.support)
        known = {name: rounds.schema[name] for name in ("prompt_id", "category")}
        reference = replayed_rounds(log, tree).cast(known)  # type: ignore[arg-type]
    else:  # live rounds with a draft are their own reference
        drafted = rounds.filter(pl.col("offered_depth") > 0)
        reference = drafted.with_columns(is_unsupported=pl.lit(value=False))

    def tau(of: pl.DataFrame) -> Interval:
        """1 + accepted draft tokens a round, pooled."""
        return resamples.mean(of["num_accepted"].to_numpy() + np.float64(1), prompt_codes(of))

    def category(name: str) -> CategoryFigures:
        inside, chosen = (of.filter(pl.col("category") == name) for of in (rounds, reference))
        return CategoryFigures(
            name=name,
            num_prompts=inside["prompt_id"].n_unique(),
            num_rounds=len(chosen),
            tau=tau(chosen),
            depths=acceptance_by_depth(inside, resamples),
        )

    header = traces.header
    return TraceFigures(
        kind=rounds["kind"][0],
        hardware=hardware_of(traces),
        target=str(header.collect.get("target", "unnamed")),
        drafter=str(header.collect.get("drafter", "unnamed")),
        target_digest=header.target_digest,
        drafter_digest=header.drafter_digest,
        sampling=header.sampling,
        traces_digest=traces.digest,
        num_prompts=rounds["prompt_id"].n_unique(),
        num_rows=len(rounds),
        num_nodes=int(rounds["num_drafted"].sum()),
        support=None if log is None else vars(log.support).copy(),
        tree=None if tree is None else words_of(Policy(shape=tree)),
        num_reference=len(reference),
        num_unsupported=int(reference["is_unsupported"].sum()),
        tau=tau(reference),
        depths=acceptance_by_depth(rounds, resamples),
        categories=tuple(map(category, sorted(rounds["category"].unique().cast(pl.String)))),
    )


def read_rounds(traces: TraceSet) -> pl.DataFrame:
    """The `rounds` rows of every file, in the order of the log's chunks; prompts and categories as
    enumerations, in order of appearance."""
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
    known = {
        name: pl.Enum(table[name].unique(maintain_order=True)) for name in ("prompt_id", "category")
    }
    return table.cast(known)  # type: ignore[arg-type]


def replayed_rounds(log: DenseLog, tree: StaticTree) -> pl.DataFrame:
    """The tree's rounds over a dense log."""
    import polars as pl

    [run] = replay(log, [Policy(shape=tree)], with_bounds=False)
    positions, request = run.positions, run.request
    categories = np.array(positions.categories, object)[positions.category]
    return pl.DataFrame(
        {
            "prompt_id": np.array(positions.prompt_ids, object)[positions.prompt][request],
            "category": categories[request],
            "num_accepted": run.outcomes.accepted,
            "is_unsupported": run.outcomes.missing > 0,
        }
    )


def reference_tree(support: Support) -> StaticTree:
    """The default EAGLE-2 tree, no deeper and no wider than the log: its rounds are the reference
    of dense traces."""
    default = StaticTree()
    top_k, depth = min(default.top_k, support.top_k), min(default.depth, support.depth)
    most = 1 + top_k + (depth - 1) * top_k**2
    return StaticTree(depth=depth, top_k=top_k, num_tokens=min(default.num_tokens, most))


def prompt_codes(rounds: pl.DataFrame) -> Ints:
    """`[R]` prompt of each row."""
    return rounds["prompt_id"].to_physical().to_numpy().astype(np.int32)


def acceptance_by_depth(rounds: pl.DataFrame, resamples: Resamples) -> tuple[DepthAcceptance, ...]:
    """Acceptance at every offered depth, without censored rounds.

    A round is *at risk* at depth d if its path reached depth d - 1, depth d was offered and the
    text went on. The accepted share of these is the conditional acceptance a_d. The marginal one is
    the product a_1 ... a_d, the product-limit estimate of Kaplan and Meier (1958); without
    censoring it is the plain share. A depth with rounds at risk in fewer than `MIN_PROMPTS` prompts
    has no interval.
    """
    accepted, offered, emitted = (
        rounds[name].to_numpy() for name in ("num_accepted", "offered_depth", "num_emitted")
    )
    is_cut = emitted == accepted  # the text ended on the accepted path
    depths, columns = range(1, int(offered.max(initial=0)) + 1), []
    for d in depths:
        reached, hit = accepted >= d - 1, accepted >= d
        seen = hit | (reached & ~is_cut & (offered >= d))  # at risk
        columns += [hit, seen, reached & ~seen]
    if not columns:
        return ()
    sums = sums_by(prompt_codes(rounds), resamples.weights.shape[1], columns)
    drawn = resamples.drawn(sums).reshape(-1, len(depths), 3)
    conditional = first_over_second(drawn)
    marginal = conditional.cumprod(1)
    at_risk = np.count_nonzero(sums.reshape(-1, len(depths), 3)[:, :, 1], 0)  # prompts, by depth
    enough = [resamples.of_prompts(int(number)) for number in at_risk]
    return tuple(
        DepthAcceptance(
            depth=d,
            num_at_risk=int(drawn[0, d - 1, 1]),
            num_accepted=int(drawn[0, d - 1, 0]),
            num_censored=int(drawn[0, d - 1, 2]),
            conditional_prob=enough[d - 1].read(conditional[:, d - 1]),
            marginal_prob=enough[d - 1].read(marginal[:, d - 1]),
        )
        for d in depths
    )
