"""What the artifact of boosted trees says, or of the network that they taught."""

from __future__ import annotations

from specctl.artifacts import PairFingerprint
from specctl.artifacts.card import table
from specctl.train.c2t_artifact import Words, scorer_publication
from specctl.train.gbdt import GbdtFit
from specctl.train.gbdt_report import QUALITY_COLUMNS, quality_rows, summary
from specctl.train.publish import Publication


def gbdt_publication(fit: GbdtFit, pair: PairFingerprint, trace_digest: str) -> Publication:
    """Everything that `save_fit` writes of a fit.

    Args:
        trace_digest: identity of the traces that it was fitted on, `sha256:<hex>`.
    """
    trees = f"{fit.report.boosted.num_trees} boosted trees of {fit.config.trees.num_leaves} leaves"
    network = f"A network of {fit.config.ffn.hidden} hidden units, taught by {trees},"
    words = Words(
        kind="gbdt",
        name="Distilled gbdt" if fit.config.distill else "gbdt",
        scorer=network if fit.config.distill else f"An ensemble of {trees}",
        summary=summary(fit.report),
        sections=(
            "## The label, held out\n\n" + table(QUALITY_COLUMNS, quality_rows(fit.report)),
            "log-loss in nats a node; the drafter's own probability for comparison.",
        ),
    )
    return scorer_publication(fit, pair, trace_digest, words)
