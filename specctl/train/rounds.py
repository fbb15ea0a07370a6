"""Which decoding rounds a fit of HeteroSpec's bins may use, as arrays.

Two sets matter. *Eligible* rounds were drafted by the base tree and carry its Φ: shares and
acceptance lengths are over these. *Used* rounds also pass the filter and have the label: the
bins are fitted to these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from specctl.errors import TraceEmptyError, TraceSchemaError, UsageError
from specctl.logs.parquet import collected, decoding
from specctl.policy.records import MAX_DEPTH, PositiveInt, Record, StaticTree
from specctl.stats import Split, split_prompts
from specctl.train.partition import Floats, Phis

if TYPE_CHECKING:  # slow to import
    import polars as pl

Bools = NDArray[np.bool_]
COLUMNS = (
    "prompt_id",
    "offered_depth",
    "top_k",
    "phi",
    "phi_depth",
    "num_accepted",
    "fully_accepted",
    "tcr",
)
USED = "used"
INELIGIBLE = ("other_tree", "no_phi")
UNLABELLED = ("not_fully_accepted", "nothing_accepted")
"""Why a round is left out; see `_fate`."""


class CartConfig(Record):
    """How to fit HeteroSpec's bins.

    Attributes:
        base: the tree that the traces were drafted with and that the policy extends.
        max_leaf_depth: levels of the regression tree; the paper's 3 give 8 bins.
        label: what the bins predict: the rank of the deepest accepted node (the paper), or the
            number of accepted draft tokens.
        filter: fit to fully accepted rounds (the paper) or to all of them.
        method: greedy CART (the paper), or the exact least-squares optimum.
        min_rows: fewest rounds in a bin; the mean of fewer says nothing.
        held_out_frac: share of prompts kept for the report.
        seed: of the split and of CART's ties.
        gammas, alpha, index_base, cap_tokens: see `EntropyBins`.
    """

    base: StaticTree = StaticTree()
    max_leaf_depth: Annotated[int, Field(ge=1, le=5)] = 3
    label: Literal["tcr", "accepted"] = "tcr"
    filter: Literal["fully_accepted", "all"] = "fully_accepted"
    method: Literal["cart", "exact"] = "cart"
    min_rows: PositiveInt = 5
    held_out_frac: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    gammas: tuple[Annotated[float, Field(gt=0.0, le=4.0)], ...] = (0.3, 0.6, 1.0)
    alpha: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    index_base: Literal[0, 1] = 0
    cap_tokens: bool = False


@dataclass(frozen=True)
class Rounds:
    """Eligible rounds, one entry each.

    Attributes:
        phi: nats. label: of the configured kind, NaN where there is none.
        tcr: 1-based rank, NaN where nothing was accepted. accepted: draft tokens.
        used: the bins may be fitted to it. held_out: its prompt is held out.
        prompt: number of its prompt, from 0.
        split: the prompts. counts: rounds in the traces by fate, `used` or why not.
    """

    phi: Phis
    label: Floats
    tcr: Floats
    accepted: Floats
    used: Bools
    held_out: Bools
    prompt: NDArray[np.int64]
    split: Split
    counts: dict[str, int]


def select_rounds(rounds: pl.DataFrame | pl.LazyFrame, config: CartConfig) -> Rounds:
    """Reads, filters, labels and splits a `rounds` table.

    Raises:
        UsageError: a label that is constant by construction.
        TraceSchemaError: missing columns.
        TraceEmptyError: no round to fit to on one side of the split, or one prompt only.
    """
    _check_label(config)
    frame = _with_fate(rounds, config)
    counts = dict(sorted(frame["fate"].value_counts().iter_rows()))
    eligible = frame.filter(~frame["fate"].is_in(INELIGIBLE))
    if USED not in counts:
        raise _nothing_left(frame, counts, config)
    split = split_prompts(
        eligible["prompt_id"].unique(), held_out_frac=config.held_out_frac, seed=config.seed
    )
    chosen = _arrays(eligible, split, counts, config)
    _check_both_sides(chosen)
    return chosen


def _check_label(config: CartConfig) -> None:
    if config.label == "accepted" and config.filter == "fully_accepted":
        raise UsageError(
            "label accepted with filter fully_accepted",
            expected="a label that varies",
            found="the full depth in every round, by the filter",
            fix="use --filter all, or --label tcr",
        )


def _with_fate(rounds: pl.DataFrame | pl.LazyFrame, config: CartConfig) -> pl.DataFrame:
    lazy = rounds.lazy()
    with decoding("rounds table"):
        missing = sorted(set(COLUMNS) - set(lazy.collect_schema().names()))
    if missing:
        raise TraceSchemaError(
            "rounds table",
            expected=f"the columns {', '.join(COLUMNS)}",
            found=f"no {', '.join(missing)}",
            fix="collect the traces again with this version of specctl",
        )
    return collected(lazy.select(*COLUMNS, _fate(config).alias("fate")))


def _fate(config: CartConfig) -> pl.Expr:
    """`used`, or the first reason for which a round is left out.

    A round that was offered another depth has another censoring: its label does not compare.
    """
    import polars as pl

    depth, col = config.base.depth, pl.col
    other_tree = (col("offered_depth") != depth) | (col("top_k") != config.base.top_k)
    has_phi = col("phi").is_finite().fill_null(value=False) & col("phi_depth").eq_missing(depth)
    filtered = ~col("fully_accepted") & pl.lit(config.filter == "fully_accepted")
    unlabelled = col("tcr").is_null() & pl.lit(config.label == "tcr")
    return (
        pl.when(other_tree)
        .then(pl.lit("other_tree"))
        .when(~has_phi)
        .then(pl.lit("no_phi"))
        .when(filtered)
        .then(pl.lit("not_fully_accepted"))
        .when(unlabelled)
        .then(pl.lit("nothing_accepted"))
        .otherwise(pl.lit(USED))
    )


def _arrays(
    eligible: pl.DataFrame, split: Split, counts: dict[str, int], config: CartConfig
) -> Rounds:
    import polars as pl

    tcr = eligible["tcr"].cast(pl.Float64).to_numpy()
    accepted = eligible["num_accepted"].cast(pl.Float64).to_numpy()
    prompt_ids = eligible["prompt_id"].cast(pl.String)
    return Rounds(
        phi=eligible["phi"].cast(pl.Float32).to_numpy(),
        label=tcr if config.label == "tcr" else accepted,
        tcr=tcr,
        accepted=accepted,
        used=(eligible["fate"] == USED).to_numpy(),
        held_out=prompt_ids.is_in(split.held_out).to_numpy(),
        prompt=prompt_ids.rank("dense").cast(pl.Int64).to_numpy() - 1,
        split=split,
        counts=counts,
    )


def _nothing_left(frame: pl.DataFrame, counts: dict[str, int], config: CartConfig) -> Exception:
    fix = "collect with the base tree, or give its depth and top_k"
    if any(counts.get(reason) for reason in UNLABELLED):
        fix = "use --filter all --label accepted"
    offered = sorted(set(frame.select("offered_depth", "top_k").iter_rows()))[:5]
    return TraceEmptyError(
        f"fit cart to label {config.label}, filter {config.filter}",
        expected=f"rounds of depth {config.base.depth}, top_k {config.base.top_k}",
        found=f"0 of {frame.height} ({_listed(counts)}; offered (depth, top_k): {offered})",
        fix=fix,
    )


def _check_both_sides(rounds: Rounds) -> None:
    train = int((rounds.used & ~rounds.held_out).sum())
    held_out = int((rounds.used & rounds.held_out).sum())
    if min(train, held_out) == 0:
        raise TraceEmptyError(
            "fit cart, after the split by prompt",
            expected="rounds to fit to on both sides",
            found=f"{train} for training, {held_out} held out ({_listed(rounds.counts)})",
            fix="collect more prompts, use another --seed, or --filter all --label accepted",
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "no rounds"
