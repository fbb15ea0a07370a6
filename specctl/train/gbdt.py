"""`fit gbdt`: boosted trees that prune draft trees, and the network that they teach.

    logged nodes ─read_sides─► rows ─boost─► trees ─► TreesScorer ─┐
                                 └── trees' probabilities ─train_ffn─► FfnScorer (--distill)

Rows, thresholds and report are those of `fit c2t`. A third part of the prompts decides when
boosting stops; the held-out ones decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from specctl.logs.node_sample import LoggedNodes, NodeRows
from specctl.logs.positions import Bools
from specctl.policy import FfnScorer, Scorer, TreesScorer
from specctl.records import Record
from specctl.stats import split_prompts
from specctl.train.c2t import fit_network
from specctl.train.configs import GbdtConfig
from specctl.train.ffn import train_ffn
from specctl.train.publish import Fit
from specctl.train.report import Table
from specctl.train.scored import (
    LabelQuality,
    ScoredReport,
    judge,
    label_quality,
    log_odds,
    read_sides,
    scored_figures,
    scored_fit,
    scored_report,
)
from specctl.train.trees import boost, feature_gains, trees_scorer

DRAFTER = "drafter"
"""The drafter's own probability as a predictor, where a feature holds it."""
LABELS, TREES, DISTILLED = "network of labels", "trees", "network of trees"


class Boosted(Record):
    """How boosting went.

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
    found = {name: log_odds(one, rows) for name, one in scorers.items()}
    quality = {name: label_quality(odds, rows) for name, odds in found.items()}
    wanted = "draft_logp" if config.nodes.predicts == "conditional" else "joint_logp"
    fidelity = _fidelity(found, quality) if config.distill else None
    if wanted in config.nodes.features:
        logp = rows.features[:, config.nodes.features.index(wanted)].astype(np.float64)
        odds = logp - np.log(np.maximum(-np.expm1(logp), 1e-12))
        quality[DRAFTER] = label_quality(odds, rows)
    data = GbdtReport(
        **scored_figures(config, scorer, sides, judged),
        boosted=boosted,
        quality=quality,
        joint_ece=judged.control.calibration.by_depth()[0].ece,
        fidelity=fidelity,
    )
    ensemble = f"{boosted.num_trees} boosted trees of {config.trees.num_leaves} leaves"
    network = f"A network of {config.ffn.hidden} hidden units, taught by {ensemble},"
    cells = [(name, f"{q.log_loss:.5f}", f"{q.auc:.4f}") for name, q in quality.items()]
    legend = "log-loss in nats a node; the drafter's own probability for comparison"
    report = scored_report(
        data,
        kind="gbdt",
        title="Distilled gbdt policy" if config.distill else "gbdt policy",
        scorer=network if config.distill else f"An ensemble of {ensemble}",
        first=_summary(data),
        tables=(Table("The label, held out", ("scorer", "log-loss", "AUC"), cells, legend),),
    )
    return scored_fit(scorer, config, judged.beta, sides, report)


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
    codes = [code for code, name in enumerate(rows.prompt_ids) if name in set(split.held_out)]
    return np.isin(rows.prompt, codes)


def distil(trees: TreesScorer, rows: NodeRows, config: GbdtConfig) -> FfnScorer:
    """A network that predicts the trees' probability of the rows.

    Its cross-entropy with that probability is least where its log-odds are the trees'.
    """
    soft = 1 / (1 + np.exp(rows.log_kept - log_odds(trees, rows)))
    return train_ffn(
        rows.features,
        soft.astype(np.float32),
        config.nodes.features,
        config.ffn,
        log_kept=rows.log_kept,
    )


def _fidelity(odds: Mapping[str, np.ndarray], quality: Mapping[str, LabelQuality]) -> Fidelity:
    losses = {name: q.log_loss for name, q in quality.items()}
    gain = losses[LABELS] - losses[TREES]
    return Fidelity(
        mean_gap=float(np.abs(odds[TREES] - odds[DISTILLED]).mean()),
        correlation=float(np.corrcoef(odds[TREES], odds[DISTILLED])[0, 1]),
        gain_kept=(losses[LABELS] - losses[DISTILLED]) / gain if gain > 0 else None,
    )


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
