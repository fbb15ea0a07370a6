"""`fit hetero`: HeteroSpec's entropy bins (arXiv:2505.13254), from a `rounds` table.

    rounds ─select_rounds─► Φ and labels ─find_edges─► edges ─► EntropyBins ─► report

*Eligible* rounds were drafted by the base tree and have its Φ; shares and acceptance lengths are
over these. *Used* rounds also pass the filter and have the label; the bins are fitted to these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import RecordError, TraceEmptyError, TraceMismatchError, UsageError
from specctl.features import ENTROPY_TOP_K, phi
from specctl.formatting import Detail, Table, count
from specctl.logs.logged_draft import LoggedDraft
from specctl.logs.parquet import collected, scan_files
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LiveLog, Support, sampled
from specctl.policy import EntropyBins, Policy, StaticTree, build_shape
from specctl.policy.hetero import entropy_bin, entropy_bins_shape
from specctl.records import Record, floor_float32
from specctl.runtime.twins import Port
from specctl.runtime.words import resolve_policy, words_of
from specctl.stats import MIN_PROMPTS, Floats, Interval, Resamples, Split, split_prompts
from specctl.train.configs import CartConfig
from specctl.train.positions import position_rows
from specctl.train.report import Fit, FitReport, check_twin

if TYPE_CHECKING:  # slow to import
    import polars as pl

Phis = NDArray[np.float32]
Bins = NDArray[np.int64]
USED = "used"
INELIGIBLE = ("other_tree", "no_phi")
UNLABELLED = ("not_fully_accepted", "nothing_accepted")
"""Reasons to leave a round out; see `_fate`."""
ROUND_COLUMNS = (
    "prompt_id", "offered_depth", "top_k", "phi", "phi_depth", "num_accepted", "fully_accepted",
    "tcr",
)  # fmt: skip
"""Columns of a `rounds` table that the fit reads."""


# --------------------------------------------------------------------------- the report's record


class BinSide(Record):
    """One bin on one side of the split."""

    num_rounds: int  # eligible ones
    share_frac: float  # of the side's eligible rounds
    num_used: int
    mean_label: float | None  # over used rounds
    mean_tcr: float | None  # rank, over eligible rounds that accepted something
    mean_acceptance_length: float | None  # tokens, 1 + accepted, over eligible rounds


class BinReport(Record):
    """One bin: Φ in (low, high] nats, its plan (levels; nodes, root counted), both sides."""

    index: int
    low: float | None
    high: float | None
    depth: int
    num_tokens: int
    train: BinSide
    held_out: BinSide


class HeldOut(Record):
    """Error of the training means of bins on held-out rounds, in squared units of the label."""

    num_used: int
    mse: float
    mse_interval: tuple[float, float] | None  # by prompt; null with too few prompts
    constant_mse: float  # of the training mean alone
    r_squared: float | None  # 1 - mse / constant_mse


class CartReport(Record):
    """`report.json` of a fit."""

    config: CartConfig
    rounds_by_fate: dict[str, int]  # `used`, or the reason to leave them out
    prompts: dict[str, int]
    bins: tuple[BinReport, ...]
    held_out: HeldOut


# --------------------------------------------------------------------------- the fit


def fit_cart(traces: TraceSet, config: CartConfig, base: str | None = None) -> Fit[CartReport]:
    """Fits bins to the rounds of live traces, or of a base tree on dense ones.

    Args:
        base: see `rounds_to_fit`; overrides the configuration's.

    Raises:
        TraceMismatchError: live traces of another family. UsageError, TraceError: see
            `rounds_to_fit` and `fit_rounds`.
    """
    rounds, policy = rounds_to_fit(traces, base, config)
    shape = policy["shape"]
    if shape["kind"] != "eagle2":
        raise TraceMismatchError(
            f"fit hetero needs traces of a static tree; these are of {shape['kind']}",
            hint="collect again with --policy eagle2",
        )
    tree = StaticTree(**shape)
    fitted = fit_rounds(rounds, config.model_copy(update={"base": tree}))
    return replace(fitted, notes=(f"base tree: {words_of(Policy(shape=tree))}",))


def fit_rounds(rounds: pl.DataFrame, config: CartConfig) -> Fit[CartReport]:
    """Fits bins of Φ on the training prompts and reports on the held-out ones.

    CART may find fewer than 2^max_leaf_depth bins in few rounds; the report shows it.

    Raises:
        UsageError: options contradict each other.
        TraceEmptyError: too few prompts, rounds, or bins for the gammas.
    """
    import polars as pl

    frame, split, fates = select_rounds(rounds, config)
    used = frame.filter("used")
    phi, label = (used.filter(~used["held_out"])[name].to_numpy() for name in ("phi", "label"))
    edges = find_edges(phi, label, config)
    wanted = max(2, len(config.gammas))
    if len(edges) + 1 < wanted:
        raise TraceEmptyError(
            f"{len(config.gammas)} gammas need at least {wanted} bins: {config.algorithm} found "
            f"{len(edges) + 1} in {len(phi)} training rounds with {len(np.unique(phi))} values of "
            f"phi and {len(np.unique(label))} of {config.label}",
            hint="collect more rounds, give fewer gammas, or use --filter all --label accepted",
        )
    plan = config.model_dump(include={"gammas", "alpha", "index_base", "cap_tokens", "path"})
    try:
        shape = EntropyBins(base=config.base, edges=tuple(edges), **plan)
    except RecordError as error:
        raise UsageError(
            f"the bins make no valid policy: {error.message}",
            hint="lower --alpha or the gammas",
        ) from None
    unseen = torch.from_numpy(frame.filter("held_out")["phi"].to_numpy().copy())
    rule = entropy_bins_shape(shape, unseen.device)
    bins = entropy_bin(unseen, rule.edges)
    plans = {"bin": bins, "depth": rule.bin_depths[bins], "num_tokens": rule.bin_tokens[bins]}
    decided = {Port("phi", name, torch.int64): plan for name, plan in plans.items()}
    check = functools.partial(check_twin, rows=unseen, wanted=decided)
    bin_of = pl.Series("bin", bins_of(frame["phi"].to_numpy(), edges))
    frame = frame.with_columns(bin_of)
    data = CartReport(
        config=config,
        rounds_by_fate=fates,
        prompts={"train": len(split.train), "held_out": len(split.held_out)},
        bins=tuple(
            BinReport(
                index=index,
                low=edges[index - 1] if index else None,
                high=edges[index] if index < len(edges) else None,
                depth=shape.plan_depths[index],
                num_tokens=shape.plan_tokens[index],
                train=_side(frame.filter(~frame["held_out"]), index),
                held_out=_side(frame.filter("held_out"), index),
            )
            for index in range(len(edges) + 1)
        ),
        held_out=_held_out_error(frame.filter("used")),
    )
    return Fit(Policy(shape=shape), report_of(data), split.train, check)


def bins_of(phi: Phis, edges: tuple[float, ...] | list[float]) -> Bins:
    """`[n]` bin of each Φ, by the runtime's rule."""
    table = torch.tensor(edges, dtype=torch.float32)
    return entropy_bin(torch.from_numpy(phi.copy()), table).numpy()


# --------------------------------------------------------------------------- edges


def find_edges(phi: Phis, label: Floats, config: CartConfig) -> list[float]:
    """Thresholds t by the configured method, ascending, nats: `Φ <= t` is to the left.

    They are floored to float32, and at most 2^max_leaf_depth - 1.
    """
    depth, min_rows = config.max_leaf_depth, config.min_rows
    if config.algorithm == "printed":
        return sorted(printed_edges(phi, label, depth=depth, min_rows=min_rows))
    from sklearn.tree import DecisionTreeRegressor

    found = DecisionTreeRegressor(
        max_depth=depth, min_samples_leaf=min_rows, random_state=config.seed
    )
    tree = found.fit(phi[:, None], label).tree_
    return sorted(floor_float32(t) for t in tree.threshold[tree.feature == 0])


def printed_edges(phi: Phis, label: Floats, *, depth: int, min_rows: int) -> list[float]:
    """Thresholds of a greedy tree that minimises HeteroSpec's Eq. 2 as printed (arXiv:2505.13254).

    The loss of a side is its share of the rows times its *summed* squared error, n_j/n · SSE_j,
    where regression trees take SSE_j: it favours a small error on the larger side. Every node that
    can be cut is cut; of equal cuts the lowest is taken. Thresholds are not sorted.
    """
    order = np.argsort(phi, kind="stable")
    values, centred = phi[order], (label - label.mean())[order]
    size = len(values)
    left = np.arange(1, size)
    fits = (values[1:] > values[:-1]) & (left >= min_rows) & (size - left >= min_rows)
    if not depth or not fits.any() or np.ptp(centred) == 0:
        return []
    sums, squares = np.cumsum(centred), np.cumsum(centred**2)
    of_left = squares[:-1] - sums[:-1] ** 2 / left
    of_right = squares[-1] - squares[:-1] - (sums[-1] - sums[:-1]) ** 2 / (size - left)
    loss = (left * of_left + (size - left) * of_right) / size
    cut = int(np.where(fits, loss, np.inf).argmin()) + 1
    below = printed_edges(values[:cut], centred[:cut], depth=depth - 1, min_rows=min_rows)
    above = printed_edges(values[cut:], centred[cut:], depth=depth - 1, min_rows=min_rows)
    # Never below the lower value, always below the higher one.
    middle = floor_float32((float(values[cut - 1]) + float(values[cut])) / 2)
    return [*below, middle, *above]


# --------------------------------------------------------------------------- rounds


def rounds_to_fit(
    traces: TraceSet, base: str | None, config: CartConfig
) -> tuple[pl.DataFrame, Mapping[str, Any]]:
    """Rounds of live traces, or of a base tree replayed on dense ones, and their policy's record.

    Args:
        base: static tree to draft at every position, e.g. `eagle2:depth=6`; for dense traces only.
            None: `default_base`.
    """
    import polars as pl

    is_conditional = config.path == "conditional"
    if "dense" not in traces.header.collect:
        if base is not None:
            raise UsageError(
                "--base needs dense traces: live ones hold the rounds of their own tree",
                hint="leave it out, or collect with --dense",
            )
        if is_conditional:
            raise UsageError(
                "--path conditional needs dense traces: Φ of live ones was summed along the "
                "likeliest path",
                hint="leave it out, or collect with --dense",
            )
        live = sampled(LiveLog.open(traces), config.max_positions, config.seed)
        rounds = pl.concat(
            [
                collected(scan_files("rounds", [files["rounds"]]).select(*ROUND_COLUMNS))
                for files in live.files
            ]
        )
        if live.prompts is not None:
            rounds = rounds.filter(pl.col("prompt_id").cast(pl.String).is_in([*live.prompts]))
        return rounds, traces.header.policy
    log = sampled(DenseLog.open(traces), config.max_positions, config.seed)
    held = log.support
    if base is None:
        base = "eagle2:depth={}:top_k={}".format(*default_base(config, held))
    shape = resolve_policy(base).policy.shape
    if not isinstance(shape, StaticTree):
        raise UsageError(f"--base must be a static tree such as eagle2:6x8/48, not {base}")
    if shape.depth > held.depth or shape.top_k > held.top_k:
        raise UsageError(
            f"--base {base} is larger than the traces, which hold depth={held.depth}:"
            f"top_k={held.top_k}",
            hint="name a smaller tree, or collect deeper or wider (--depth, --children)",
        )

    def columns(draft: LoggedDraft) -> dict[str, Tensor]:
        return {
            "phi": phi(draft.pool, conditional=is_conditional),
            "tcr": draft.terminal_rank.int(),
        }

    found = position_rows(log, build_shape(shape), columns)
    found.warn_left_out()
    depth, top_k = (pl.lit(value, pl.Int16) for value in (shape.depth, shape.top_k))
    rounds = found.rows.rename({"accepted": "num_accepted"}).with_columns(
        offered_depth=depth,
        top_k=top_k,
        phi_depth=depth,
        fully_accepted=pl.col("num_accepted") == shape.depth,
        tcr=pl.when(pl.col("tcr") > 0).then("tcr"),
    )
    policy = Policy(shape=shape).model_dump(mode="json")
    return rounds, policy


def default_base(config: CartConfig, held: Support) -> tuple[int, int]:
    """Levels and children of the largest tree up to eagle2's that the log holds when the first bin
    extends it."""
    usual = StaticTree()
    depth = min(usual.depth, held.depth)
    while depth > 1:
        alpha = math.ceil(depth / 2) if config.alpha is None else config.alpha
        if depth + alpha - config.index_base <= held.depth:
            break
        depth -= 1
    return depth, min(usual.top_k, held.top_k)


def select_rounds(
    rounds: pl.DataFrame, config: CartConfig
) -> tuple[pl.DataFrame, Split, dict[str, int]]:
    """Filters, labels and splits a `rounds` table; raises as `fit_cart`.

    Returns:
        Eligible rounds: `phi` (nats), `label` of the configured kind, `tcr` (1-based rank),
        `num_accepted` draft tokens, `used`, `held_out`, and `prompt`, a code from 0. The split.
        The number of rounds by fate.
    """
    import polars as pl

    if config.label == "accepted" and config.filter == "fully_accepted":
        raise UsageError(
            "--label accepted is the same in all rounds that --filter fully_accepted leaves",
            hint="use --filter all, or --label tcr",
        )
    frame = rounds.select(*ROUND_COLUMNS, _fate(config).alias("fate"))
    counts = dict(sorted(frame["fate"].value_counts().iter_rows()))
    listed = ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "no rounds"
    eligible = frame.filter(~frame["fate"].is_in(INELIGIBLE))
    if USED not in counts:
        is_filtered = any(counts.get(reason) for reason in UNLABELLED)
        offered = sorted(set(frame.select("offered_depth", "top_k").iter_rows()))[:5]
        raise TraceEmptyError(
            f"none of {frame.height} rounds is of depth {config.base.depth} and top_k "
            f"{config.base.top_k} and passes --label {config.label} --filter {config.filter} "
            f"({listed}; offered (depth, top_k): {offered})",
            hint="use --filter all --label accepted"
            if is_filtered
            else "collect with the base tree, or give its depth and top_k",
        )
    prompt_ids = eligible["prompt_id"].cast(pl.String)
    split = split_prompts(prompt_ids.unique(), held_out_frac=config.held_out_frac, seed=config.seed)
    label = pl.col("tcr" if config.label == "tcr" else "num_accepted")
    frame = eligible.select(
        pl.col("phi").cast(pl.Float32),
        label.cast(pl.Float64).alias("label"),
        pl.col("tcr", "num_accepted").cast(pl.Float64),
        used=pl.col("fate") == USED,
        held_out=prompt_ids.is_in(split.held_out),
        prompt=prompt_ids.rank("dense").cast(pl.Int64) - 1,
    )
    num_held_out = frame.filter("used", "held_out").height
    sizes = frame["used"].sum() - num_held_out, num_held_out
    if min(sizes) == 0:
        raise TraceEmptyError(
            f"the split by prompt leaves {sizes[0]} rounds for training and {sizes[1]} held out; "
            f"both sides need some ({listed})",
            hint="collect more prompts, use another --seed, or --filter all --label accepted",
        )
    return frame, split, counts


def _fate(config: CartConfig) -> pl.Expr:
    """`used`, or the first reason to leave a round out.

    Labels of rounds with another drafted depth are censored differently and do not compare.
    """
    import polars as pl

    depth, col = config.base.depth, pl.col
    has_phi = col("phi").is_finite().fill_null(value=False) & col("phi_depth").eq_missing(depth)
    reasons = {
        "other_tree": (col("offered_depth") != depth) | (col("top_k") != config.base.top_k),
        "no_phi": ~has_phi,
        "not_fully_accepted": ~col("fully_accepted") & pl.lit(config.filter == "fully_accepted"),
        "nothing_accepted": col("tcr").is_null() & pl.lit(config.label == "tcr"),
    }
    return pl.coalesce(
        *(pl.when(holds).then(pl.lit(name)) for name, holds in reasons.items()), pl.lit(USED)
    )


# --------------------------------------------------------------------------- figures


def _side(rounds: pl.DataFrame, index: int) -> BinSide:
    """One bin of the rounds of one side."""

    def mean(values: pl.Series) -> float | None:
        return float(values.to_numpy().mean()) if len(values) else None

    rows = rounds.filter(rounds["bin"] == index)
    used = rows.filter("used")
    return BinSide(
        num_rounds=rows.height,
        share_frac=rows.height / rounds.height,
        num_used=used.height,
        mean_label=mean(used["label"]),
        mean_tcr=mean(rows["tcr"].drop_nulls()),
        mean_acceptance_length=mean(1.0 + rows["num_accepted"]),
    )


def _held_out_error(used: pl.DataFrame) -> HeldOut:
    """Squared error of the bins' training means on held-out rounds, and of one constant.

    No bin is empty, since the edges lie between used training rounds.
    """
    train, test = used.filter(~used["held_out"]), used.filter("held_out")
    bins, label = train["bin"].to_numpy(), train["label"].to_numpy()
    means, unseen = np.bincount(bins, label) / np.bincount(bins), test["label"].to_numpy()
    squared = (unseen - means[test["bin"].to_numpy()]) ** 2
    mse, constant = float(squared.mean()), float(np.mean((unseen - label.mean()) ** 2))
    names, prompts = np.unique(test["prompt"].to_numpy(), return_inverse=True)
    ends = Resamples.draw(len(names)).mean(squared, prompts)
    return HeldOut(
        num_used=test.height,
        mse=mse,
        mse_interval=None if np.isnan(ends.low) else (ends.low, ends.high),
        constant_mse=constant,
        r_squared=1.0 - mse / constant if constant > 0 else None,
    )


# --------------------------------------------------------------------------- what is shown

BIN_COLUMNS = {
    "bin": "index",
    "Φ ≤": "high:.3f",
    "depth": "depth",
    "tokens": "num_tokens",
    "train rounds": "train.num_rounds",
    "train TCR": "train.mean_tcr:.2f",
    "train τ": "train.mean_acceptance_length:.2f",
    "rounds": "held_out.num_rounds",
    "share": "held_out.share_frac:.0%",
    "TCR": "held_out.mean_tcr:.2f",
    "τ": "held_out.mean_acceptance_length:.2f",
}
WIDE = ("train rounds", "train TCR", "train τ", "share", "TCR")


def report_of(data: CartReport) -> FitReport[CartReport]:
    """The figures as they are shown and published."""
    held_out, config = data.held_out, data.config
    low, high = held_out.mse_interval or (np.nan, np.nan)
    legend = (
        "Φ: draft entropy up to the bin's end, nats; depth: drafted levels; tokens: verified, root "
        "counted; rounds and τ: of the base tree, held out, a dense log has one at each position"
    )
    return FitReport(
        kind="hetero",
        title="HeteroSpec policy",
        what=f"Bins of Φ, the drafter's cumulative top-{ENTROPY_TOP_K} entropy along its best "
        "path, choose how deep each draft tree grows and how many of its nodes the target verifies "
        "(arXiv:2505.13254).",
        config=config.model_dump(mode="json"),
        data=data,
        splits={
            side: (data.prompts[side], sum(getattr(row, side).num_rounds for row in data.bins))
            for side in ("train", "held_out")
        },
        metrics={
            "held_out_mse": Interval(held_out.mse, low, high),
            "held_out_constant_mse": held_out.constant_mse,
            "held_out_r_squared": held_out.r_squared,
        },
        verdict=_verdict(data),
        summary=_summary(data),
        tables=(Table.of("Bins of entropy", data.bins, BIN_COLUMNS, legend, WIDE),),
        limits=(
            f"The thresholds hold for this pair, for K = {ENTROPY_TOP_K} and for a base tree of "
            f"{config.base.depth} levels. Φ is a sum over levels, so another K, depth or pair "
            "needs another fit.",
            "Figures are of the base tree's rounds, not of the policy's own. Compare it with "
            "`specctl run --compare` before you trust it.",
        ),
        twin="Other runtimes can evaluate `policy.onnx`: `phi` float32 `[n]` to `bin`, `depth`, "
        "`num_tokens`.",
    )


def _verdict(data: CartReport) -> str:
    held_out, r_squared = data.held_out, data.held_out.r_squared
    total = sum(row.held_out.num_rounds for row in data.bins)
    which = ", those accepted whole" if data.config.filter == "fully_accepted" else ""
    rounds = f"{held_out.num_used:,} of {total:,} held-out rounds{which}"
    what = "accepted node's rank" if data.config.label == "tcr" else "accepted length"
    bins, prompts = f"{len(data.bins)} bins", count(data.prompts["held_out"], "prompt")
    if r_squared is None:
        return f"{bins} cannot be judged: all {rounds} have the same {what}."
    if held_out.mse_interval is None:
        return f"{bins} cannot be judged: {rounds}, are of fewer than {MIN_PROMPTS} prompts."
    if r_squared <= 0:
        return f"These bins show no gain over a constant on {rounds} ({prompts})."
    return f"{bins} explain {r_squared:.0%} of the variance of the {what} on {rounds} ({prompts})."


def _summary(data: CartReport) -> tuple[str, ...]:
    fates, config = data.rounds_by_fate, data.config
    left_out = ", ".join(f"{number:,} {fate}" for fate, number in fates.items() if fate != USED)
    return (
        Detail(
            f"{config.algorithm} on label {config.label}, filter {config.filter}: {fates[USED]} "
            f"rounds used ({left_out or 'none'} left out), {data.prompts['train']} prompts for "
            f"training; TCR: mean rank of the deepest accepted node"
        ),
    )
