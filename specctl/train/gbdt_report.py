"""What fitted trees, and the network that they taught, are worth on prompts they have not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specctl.policy.records import Record, Scorer
from specctl.train import c2t_report, c2t_table
from specctl.train.c2t_report import (
    C2TReport,
    LabelQuality,
    label_quality,
    log_odds,
    quality_of,
)
from specctl.train.gbdt_config import GbdtConfig
from specctl.train.nodes import NodeRows
from specctl.train.scored_fit import Judged, Sides
from specctl.train.tables import table

DRAFTER = "drafter"
"""The drafter's own probability as a predictor, where a feature holds it."""


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


class GbdtReport(C2TReport):
    """Everything that is known of a fit; `report.json` is this record.

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


def build_report(
    config: GbdtConfig,
    scorer: Scorer,
    sides: Sides,
    judged: Judged,
    boosted: Boosted,
    scorers: Mapping[str, Scorer],
) -> GbdtReport:
    """Figures of a fit.

    Args:
        scorer: the one that is published.
        scorers: `trees`, `network of labels` and, where it is published, `network of trees`.
    """
    common = c2t_report.build_report(config, scorer, sides, judged)
    rows = sides.held_out
    quality = {name: label_quality(scorer, rows) for name, scorer in scorers.items()}
    drafter = drafter_quality(config, rows)
    return GbdtReport(
        **{name: getattr(common, name) for name in C2TReport.model_fields},
        boosted=boosted,
        quality=quality if drafter is None else {**quality, DRAFTER: drafter},
        joint_ece=judged.control.calibration.by_depth()[0].ece,
        fidelity=fidelity(scorers, quality, rows) if config.distill else None,
    )


def drafter_quality(config: GbdtConfig, rows: NodeRows) -> LabelQuality | None:
    """The same figures of the drafter's own probability, where the features hold it."""
    wanted = "draft_logp" if config.nodes.predicts == "conditional" else "joint_logp"
    if wanted not in config.nodes.features:
        return None
    logp = rows.features[:, config.nodes.features.index(wanted)].astype(np.float64)
    odds = logp - np.log(np.maximum(-np.expm1(logp), 1e-12))
    return quality_of(odds, rows)


def fidelity(
    scorers: Mapping[str, Scorer], quality: Mapping[str, LabelQuality], rows: NodeRows
) -> Fidelity:
    """How much of the trees the network holds."""
    trees, network = (log_odds(scorers[n], rows) for n in ("trees", "network of trees"))
    losses = {name: q.log_loss for name, q in quality.items()}
    gain = losses["network of labels"] - losses["trees"]
    kept = (losses["network of labels"] - losses["network of trees"]) / gain if gain > 0 else None
    return Fidelity(
        mean_gap=float(np.abs(trees - network).mean()),
        correlation=float(np.corrcoef(trees, network)[0, 1]),
        gain_kept=kept,
    )


def summary(report: GbdtReport) -> tuple[str, ...]:
    """Lines that go with the table."""
    boosted, nodes = report.boosted, report.config.nodes
    gains = sorted(boosted.gains.items(), key=lambda item: -item[1])
    first = (
        f"{nodes.predicts} acceptance; {boosted.num_trees} trees, {boosted.num_leaves} leaves, "
        f"validation log-loss {boosted.validation_log_loss:.4f} nats; gain by feature: "
        + ", ".join(f"{name} {gain:.1%}" for name, gain in gains)
    )
    return (first, *_fidelity_line(report), *c2t_table.summary(report)[1:])


def _fidelity_line(report: GbdtReport) -> tuple[str, ...]:
    found = report.fidelity
    if found is None:
        return ()
    kept = "" if found.gain_kept is None else f"; keeps {found.gain_kept:.0%} of their gain"
    return (
        f"published: a network of {report.config.ffn.hidden} hidden units; mean gap to the trees' "
        f"log-odds {found.mean_gap:.3f} nats, correlation {found.correlation:.4f}{kept}",
    )


QUALITY_COLUMNS = ("scorer", "log-loss", "AUC")


def quality_rows(report: GbdtReport) -> list[tuple[str, ...]]:
    """One row a scorer."""
    return [(name, f"{q.log_loss:.5f}", f"{q.auc:.4f}") for name, q in report.quality.items()]


def render_report(report: GbdtReport) -> Any:
    """A rich renderable for the terminal."""
    from rich.console import Group

    pruning = table(c2t_table.TABLE_COLUMNS, c2t_table.table_rows(report), c2t_table.LEGEND)
    caption = "the label on held-out nodes; log-loss in nats a node"
    quality = table(QUALITY_COLUMNS, quality_rows(report), caption)
    return Group(pruning, quality, *summary(report))
