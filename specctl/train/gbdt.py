"""`fit gbdt`: boosted trees that prune draft trees, and the network that they teach.

    logged nodes ─sample_nodes─► rows ─boost─► trees ─► TreesScorer ─┐
                                   └── trees' probabilities ─train_ffn─► FfnScorer (--distill)
    scorer ─trace_curve─► what every threshold keeps ─► beta (training prompts), report (held out)

Rows, thresholds and report are those of `fit c2t`. A third part of the prompts decides when
boosting stops; the held-out ones decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from specctl.policy.records import FfnScorer, Policy, ScoredTree, Scorer, TreesScorer
from specctl.stats import split_prompts
from specctl.train.c2t import OnStage, fit_scorer
from specctl.train.c2t_report import log_odds
from specctl.train.ffn import train_ffn
from specctl.train.gbdt_config import GbdtConfig
from specctl.train.gbdt_report import Boosted, GbdtReport, build_report
from specctl.train.nodes import Bools, NodeRows, NodeSource
from specctl.train.scored_fit import NUM_PASSES, Sides, judge, read_sides, shape_of
from specctl.train.trees import boost, feature_gains, trees_scorer

__all__ = ["NUM_PASSES", "GbdtFit", "fit_gbdt"]


@dataclass(frozen=True)
class GbdtFit:
    """A fitted policy and what is known of it.

    Attributes:
        sides: rows of training and of held-out prompts.
        trees: as LightGBM grew them, even where a network is published.
    """

    policy: Policy
    config: GbdtConfig
    report: GbdtReport
    sides: Sides
    trees: TreesScorer

    @property
    def scorer(self) -> Scorer:
        """The trees, or the network that they taught."""
        assert isinstance(self.policy.shape, ScoredTree)
        return self.policy.shape.scorer


def fit_gbdt(
    source: NodeSource,
    prompt_ids: Iterable[str],
    config: GbdtConfig,
    *,
    on_stage: OnStage | None = None,
    on_tree: Callable[[int], None] | None = None,
) -> GbdtFit:
    """Fits on training prompts, chooses beta there, reports on held-out ones.

    Reads the log `NUM_PASSES` times.

    Raises:
        As `fit_c2t`.
    """
    say = on_stage or (lambda stage: None)
    say("sampling nodes")
    sides = read_sides(source, prompt_ids, config)
    say("boosting")
    trees, boosted = fit_trees(sides.train, config, on_tree=on_tree)
    say("training networks")
    distilled = distil(trees, sides.train, config) if config.distill else None
    scorer: Scorer = distilled or trees
    scorers = {"trees": trees, "network of labels": fit_scorer(sides.train, config)}
    if distilled is not None:
        scorers["network of trees"] = distilled
    say("choosing beta, judging on held-out prompts")
    judged = judge(source, scorer, config, sides.split)
    report = build_report(config, scorer, sides, judged, boosted, scorers)
    policy = Policy(shape=shape_of(scorer, config, judged.beta))
    return GbdtFit(policy, config, report, sides, trees)


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
    """A network that says what the trees say of the rows.

    Its cross-entropy with the trees' probability is least where its log-odds are theirs.
    """
    soft = 1 / (1 + np.exp(rows.log_kept - log_odds(trees, rows)))
    return train_ffn(
        rows.features,
        soft.astype(np.float32),
        config.nodes.features,
        config.ffn,
        log_kept=rows.log_kept,
    )
