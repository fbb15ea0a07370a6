"""`fit gbdt`: boosted trees that prune draft trees, and the network that they teach.

    logged nodes ─read_sides─► rows ─boost─► trees ─► TreesScorer ─┐
                                 └── trees' probabilities ─fit_network─► FfnScorer (--distill)

Rows, thresholds and report are those of `fit c2t`. A third part of the prompts decides when
boosting stops; the held-out ones decide nothing.

No LightGBM file or text is ever written or loaded: its dumped structure becomes a `TreesScorer`,
thresholds rounded down to float32, which keeps every `x <= t` of a float32 x, and leaves rounded to
a grid on which every sum of them is exact in float32. So fit, replay, runtime and the ONNX twin
find the same bits, whatever order they add in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.formatting import Table
from specctl.logs.node_sample import LoggedNodes, NodeRows
from specctl.logs.positions import Bools
from specctl.policy import FfnScorer, Scorer, TreesScorer
from specctl.records import Record, floor_float32
from specctl.stats import split_prompts
from specctl.train.c2t import fit_network
from specctl.train.configs import GbdtConfig, TreesConfig
from specctl.train.report import Fit
from specctl.train.scored import (
    LabelQuality,
    ScoredReport,
    judge,
    label_quality,
    log_odds,
    read_sides,
    scored_figures,
    scored_fit,
)

DRAFTER = "drafter"
"""The drafter's own probability as a predictor, where a feature holds it."""
LABELS, TREES, DISTILLED = "network of labels", "trees", "network of trees"
EXACT_BITS = 23
"""Sums of grid points below 2^k are exact in float32 on a grid of 2^(k - 23)."""
RISING = ("joint_logp", "joint_prob", "draft_logp")
FALLING = ("sibling_rank",)
"""Features in which acceptance cannot fall, or rise, all others being equal: the drafter would
have to know better by saying less. Depth and entropy are free: what is left of a path that was
accepted so far may be likelier, or less likely, to go on."""


class Boosted(Record):
    """The course of boosting.

    Attributes:
        num_leaves: of all trees. validation_log_loss: nats a row, of the last tree kept.
        gains: share of the training loss that each feature's splits took off.
    """

    num_trees: int
    num_leaves: int
    validation_log_loss: float
    gains: dict[str, float]


class Fidelity(Record):
    """A network beside the trees that taught it, on held-out nodes.

    Attributes:
        mean_gap: mean |difference| of log-odds, nats. correlation: of log-odds.
        gain_kept: share of the trees' advantage in log-loss over a network of labels that it
            keeps; none where they have none.
    """

    mean_gap: float
    correlation: float
    gain_kept: float | None


class GbdtReport(ScoredReport):
    """`report.json` of a fit.

    Attributes:
        boosted: the trees. quality: of each scorer on the label, held out.
        joint_ece: calibration error of the path's probability.
        fidelity: of the published network; none where the trees are published.
    """

    config: GbdtConfig
    boosted: Boosted
    quality: dict[str, LabelQuality]
    joint_ece: float
    fidelity: Fidelity | None


# --------------------------------------------------------------------------- the fit


def fit_gbdt(
    source: LoggedNodes,
    prompt_ids: Iterable[str],
    config: GbdtConfig,
    *,
    on_tree: Callable[[int], None] | None = None,
) -> Fit[GbdtReport]:
    """Fits on training prompts, chooses beta there, reports on held-out ones.

    Reads the log `scored.NUM_PASSES` times; raises as `fit_c2t`.
    """
    sides = read_sides(source, prompt_ids, config)
    trees, boosted = fit_trees(sides.train, config, on_tree=on_tree)
    scorers: dict[str, Scorer] = {TREES: trees, LABELS: fit_network(sides.train, config)}
    if config.distill:
        scorers[DISTILLED] = distil(trees, sides.train, config)
    scorer = scorers.get(DISTILLED, trees)
    judged, rows = judge(source, scorer, config, sides.split), sides.held_out
    odds = {name: log_odds(one, rows) for name, one in scorers.items()}
    quality = {name: label_quality(found, rows) for name, found in odds.items()}
    losses, fidelity = {name: q.log_loss for name, q in quality.items()}, None
    if config.distill:
        gain = losses[LABELS] - losses[TREES]
        fidelity = Fidelity(
            mean_gap=float(np.abs(odds[TREES] - odds[DISTILLED]).mean()),
            correlation=float(np.corrcoef(odds[TREES], odds[DISTILLED])[0, 1]),
            gain_kept=(losses[LABELS] - losses[DISTILLED]) / gain if gain > 0 else None,
        )
    wanted = "draft_logp" if config.nodes.predicts == "conditional" else "joint_logp"
    if wanted in config.nodes.features:
        logp = rows.features[:, config.nodes.features.index(wanted)].astype(np.float64)
        drafters = logp - np.log(np.maximum(-np.expm1(logp), 1e-12))
        quality[DRAFTER] = label_quality(drafters, rows)
    data = GbdtReport(
        **scored_figures(config, scorer, sides, judged),
        boosted=boosted,
        quality=quality,
        joint_ece=judged.control.calibration.by_depth()[0].ece,
        fidelity=fidelity,
    )
    ensemble = f"{boosted.num_trees} boosted trees of {config.trees.num_leaves} leaves"
    title, said = "gbdt policy", f"An ensemble of {ensemble}"
    if config.distill:
        title = "Distilled gbdt policy"
        said = f"A network of {config.ffn.hidden} hidden units, taught by {ensemble},"
    cells = [(name, f"{q.log_loss:.5f}", f"{q.auc:.4f}") for name, q in quality.items()]
    legend = "log-loss in nats a node; the drafter's own probability for comparison"
    table = Table("The label, held out", ("scorer", "log-loss", "AUC"), cells, legend)
    return scored_fit(data, scorer, sides, "gbdt", title, said, _summary(data), (table,))


def fit_trees(
    rows: NodeRows, config: GbdtConfig, *, on_tree: Callable[[int], None] | None = None
) -> tuple[TreesScorer, Boosted]:
    """The trees of some rows, and how boosting went."""
    names = config.nodes.features
    booster = boost(rows, validation_rows(rows, config), names, config.trees, on_tree=on_tree)
    scorer = trees_scorer(booster, names, rows.log_kept)
    [losses] = booster.best_score.values()
    return scorer, Boosted(
        num_trees=len(scorer.roots),
        num_leaves=sum(scorer.num_leaves),
        validation_log_loss=float(losses["binary_logloss"]),
        gains=feature_gains(booster, names),
    )


def validation_rows(rows: NodeRows, config: GbdtConfig) -> Bools:
    """`[M]` bool: rows of the prompts that decide when to stop."""
    # Another seed than the held-out split's, whose training side ranks by the same hash.
    split = split_prompts(
        rows.prompt_ids, held_out_frac=config.trees.validation_frac, seed=config.seed + 1
    )
    return np.isin(rows.prompt_ids, split.held_out)[rows.prompt]


def distil(trees: TreesScorer, rows: NodeRows, config: GbdtConfig) -> FfnScorer:
    """A network that predicts the trees' probability of the rows.

    Its cross-entropy with that probability is least where its log-odds are the trees'.
    """
    soft = 1 / (1 + np.exp(rows.log_kept - log_odds(trees, rows)))
    return fit_network(rows, config, labels=soft.astype(np.float32))


def _summary(data: GbdtReport) -> tuple[str, ...]:
    boosted, found = data.boosted, data.fidelity
    gains = sorted(boosted.gains.items(), key=lambda item: -item[1])
    first = (
        f"{data.config.nodes.predicts} acceptance; {boosted.num_trees} trees, "
        f"{boosted.num_leaves} leaves, validation log-loss {boosted.validation_log_loss:.4f} nats; "
        "gain by feature: " + ", ".join(f"{name} {gain:.1%}" for name, gain in gains)
    )
    if found is None:
        return (first,)
    kept = "" if found.gain_kept is None else f"; keeps {found.gain_kept:.0%} of their gain"
    return (
        first,
        f"published: a network of {data.config.ffn.hidden} hidden units; mean gap to the trees' "
        f"log-odds {found.mean_gap:.3f} nats, correlation {found.correlation:.4f}{kept}",
    )


# --------------------------------------------------------------------------- LightGBM


def boost(
    rows: NodeRows,
    validation: Bools,
    names: tuple[str, ...],
    config: TreesConfig,
    *,
    on_tree: Callable[[int], None] | None = None,
) -> Any:
    """A LightGBM booster of the rows' label, stopped early on the validation rows.

    Args:
        validation: `[M]` rows that are not trained on. names: of the feature columns.
        on_tree: called with 1 after every tree.
    """
    import lightgbm as lgb

    parts = [rows.take(chosen) for chosen in (~validation, validation)]
    datasets = [
        lgb.Dataset(part.features, part.accepted.astype(np.float32), free_raw_data=True)
        for part in parts
    ]
    callbacks: list[Any] = [lgb.early_stopping(config.patience, verbose=False)]
    if on_tree is not None:
        callbacks.append(lambda _: on_tree(1))
    return lgb.train(
        parameters(names, config),
        datasets[0],
        num_boost_round=config.num_trees,
        valid_sets=[datasets[1]],
        callbacks=callbacks,
    )


def parameters(names: tuple[str, ...], config: TreesConfig) -> dict[str, Any]:
    """LightGBM's words for a configuration."""
    directions = [(name in RISING) - (name in FALLING) for name in names]
    constraints = (
        {"monotone_constraints": directions} if config.monotone and any(directions) else {}
    )
    return {
        "objective": "binary",
        "metric": "binary_logloss",
        "num_leaves": config.num_leaves,
        "min_data_in_leaf": config.min_rows,
        "learning_rate": config.lr,
        "lambda_l2": config.l2,
        "num_threads": config.threads,
        "seed": config.seed,
        "deterministic": True,
        "force_row_wise": True,
        "feature_pre_filter": False,
        "use_missing": False,
        "verbosity": -1,
        **constraints,
    }


def feature_gains(booster: Any, names: tuple[str, ...]) -> dict[str, float]:
    """Share of the training loss that the splits on each feature took off."""
    gains = booster.feature_importance("gain", iteration=booster.best_iteration)
    total = max(float(gains.sum()), 1e-30)
    return {name: float(gain) / total for name, gain in zip(names, gains, strict=True)}


# --------------------------------------------------------------------------- flat arrays


def trees_scorer(booster: Any, names: tuple[str, ...], log_kept: float = 0.0) -> TreesScorer:
    """The booster's trees up to its best iteration.

    Args:
        log_kept: added to the log-odds, see `NodeRows.log_kept`.
    """
    dumped = booster.dump_model(num_iteration=booster.best_iteration)["tree_info"]
    rows: list[list[float]] = []
    roots = []
    for tree in dumped:
        roots.append(len(rows))
        rows += _flat(tree["tree_structure"], len(rows))
    feature, threshold, left, right, values = zip(*rows, strict=True)
    value = np.array(values)
    is_leaf = np.array(feature) < 0
    first_tree = np.arange(len(rows)) < (roots[1] if len(roots) > 1 else len(rows))
    value[is_leaf & first_tree] += log_kept
    return TreesScorer(
        features=names,
        roots=tuple(roots),
        feature=tuple(map(int, feature)),
        threshold=tuple(floor_float32(t) for t in threshold),
        left=tuple(map(int, left)),
        right=tuple(map(int, right)),
        value=tuple(on_grid(np.where(is_leaf, value, 0.0), roots).tolist()),
    )


def _flat(structure: dict[str, Any], first: int) -> list[list[float]]:
    """Feature, threshold, left, right, value of a tree's nodes, parents first, from `first` on."""
    rows: list[list[float]] = [[]]
    pending = [(structure, 0)]
    while pending:
        node, place = pending.pop()
        if "leaf_value" in node:
            rows[place] = [-1, 0.0, -1, -1, node["leaf_value"]]
            continue
        assert node["decision_type"] == "<=", "only numbers are split"
        left, right = len(rows), len(rows) + 1
        rows += [[], []]
        rows[place] = [node["split_feature"], node["threshold"], first + left, first + right, 0.0]
        pending += ((node["right_child"], right), (node["left_child"], left))
    return rows


def on_grid(value: NDArray[np.float64], roots: list[int]) -> NDArray[np.float64]:
    """Values rounded so that any sum of one a tree is exact in float32."""
    largest = sum(float(np.abs(tree).max()) for tree in np.split(value, roots[1:]))
    grid = 2.0 ** (math.ceil(math.log2(largest + len(roots) * 2.0**-EXACT_BITS)) - EXACT_BITS)
    return np.round(value / grid) * grid + 0.0  # -0.0 becomes 0.0
