"""What a fitted node scorer is worth on prompts that it has not seen: figures, JSON."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.policy.parse import canonical_json
from specctl.policy.records import Record, Scorer
from specctl.policy.scoring import build_log_odds
from specctl.stats import auc_of
from specctl.train.c2t_config import C2TConfig
from specctl.train.calibration_error import DepthCalibration
from specctl.train.curves import Curve, CurvePoint, Interval
from specctl.train.nodes import NodeRows
from specctl.train.scored_fit import Judged, Sides

RECALLS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Shares of accepted tokens at which the table compares."""


class SideCounts(Record):
    """One side of the split; nodes are those that carry the label.

    Attributes:
        num_unknown: nodes of which the log does not tell.
        kept_frac: share of the rejected nodes that was sampled.
    """

    num_prompts: int
    num_positions: int
    num_accepted: int
    num_rejected: int
    num_unknown: int
    kept_frac: float


class LabelQuality(Record):
    """How well the scorer predicts its own label on held-out nodes.

    Attributes:
        log_loss: nats a node. auc: of accepted against rejected.
        base_rate: share accepted.
    """

    log_loss: float
    auc: float
    base_rate: float


class Comparison(Record):
    """Nodes per position, root counted, at equal recall; interpolated between thresholds.

    Attributes:
        num_tokens: none where the curve does not reach the recall.
        joint_num_tokens: of the plain threshold on the path's probability.
        change: relative, with 95 % of resamples of prompts.
    """

    recall: float
    num_tokens: float | None
    joint_num_tokens: float | None
    change: float | None
    change_interval: Interval | None


class StudyRow(Record):
    """One fit of a study, judged on held-out prompts.

    Attributes:
        num_tokens: nodes per position at the report's recall; none where it is not reached.
        auc: of the scores of all nodes; none where only some prompts were judged.
    """

    name: str
    tested_on: str
    num_rows: int
    num_tokens: float | None
    joint_num_tokens: float | None
    auc: float | None = None
    ece: float | None = None


class Study(Record):
    """Fits beside the one that is published; docs/c2t.md explains each table."""

    ablation: tuple[StudyRow, ...]
    hidden: tuple[StudyRow, ...]
    transfer: tuple[StudyRow, ...]
    fine_tuning: tuple[StudyRow, ...]


class C2TReport(Record):
    """Everything that is known of a fit; `report.json` is this record.

    Attributes:
        sides: `train` and `held_out`.
        train, held_out: what beta keeps. held_out_interval: 95 %, prompts resampled.
        comparisons: with the plain threshold, held out.
        curve, joint_curve: all thresholds, held out. auc, joint_auc: of scores of all nodes.
        calibration: of the scores as probabilities of the whole path, held out.
        missing_frac: expansions that the log lacked, per held-out position.
    """

    config: C2TConfig
    beta: float
    sides: dict[str, SideCounts]
    train: CurvePoint
    held_out: CurvePoint
    held_out_interval: dict[str, Interval]
    comparisons: tuple[Comparison, ...]
    label: LabelQuality
    auc: float
    joint_auc: float
    missing_frac: float
    calibration: tuple[DepthCalibration, ...]
    curve: tuple[CurvePoint, ...]
    joint_curve: tuple[CurvePoint, ...]
    study: Study | None = None


def build_report(config: C2TConfig, scorer: Scorer, sides: Sides, judged: Judged) -> C2TReport:
    """Figures of a fit."""
    curve, control = judged.curve, judged.control
    at = curve.index_of(judged.beta)
    return C2TReport(
        config=config,
        beta=judged.beta,
        sides={
            "train": _side(sides.train, judged.chosen),
            "held_out": _side(sides.held_out, curve),
        },
        train=judged.chosen.point(at),
        held_out=curve.point(at),
        held_out_interval=curve.intervals(at, config.seed),
        comparisons=tuple(compare(curve, control, r, config.seed) for r in RECALLS),
        label=label_quality(scorer, sides.held_out),
        auc=curve.calibration.auc(),
        joint_auc=control.calibration.auc(),
        missing_frac=curve.num_missing / curve.num_positions,
        calibration=curve.calibration.by_depth(),
        curve=curve.points(),
        joint_curve=control.points(),
    )


def _side(rows: NodeRows, curve: Curve) -> SideCounts:
    return SideCounts(
        num_prompts=len(curve.category),
        num_positions=curve.num_positions,
        num_accepted=rows.num_positives,
        num_rejected=rows.num_negatives,
        num_unknown=rows.num_unknown,
        kept_frac=rows.kept_frac,
    )


def compare(curve: Curve, control: Curve, recall: float, seed: int) -> Comparison:
    """Two curves over the same prompts at one recall."""
    [own], [other] = curve.tokens_at_recall(recall), control.tokens_at_recall(recall)
    change = own / other - 1
    resamples = curve.resamples(seed)
    ours, theirs = (side.tokens_at_recall(recall, resamples.weights) for side in (curve, control))
    low, high = resamples.bounds(ours / theirs - 1)
    is_known = bool(np.isfinite([change, low]).all())
    return Comparison(
        recall=recall,
        num_tokens=_known(own),
        joint_num_tokens=_known(other),
        change=_known(change),
        change_interval=Interval(low=low, high=high) if is_known else None,
    )


def log_odds(scorer: Scorer, rows: NodeRows) -> NDArray[np.float64]:
    """`[M]` what a scorer says of rows, by the runtime's own code."""
    with torch.inference_mode():
        return build_log_odds(scorer)(torch.from_numpy(rows.features)).double().numpy()


def label_quality(scorer: Scorer, rows: NodeRows) -> LabelQuality:
    """How well a scorer predicts the rows' label."""
    return quality_of(log_odds(scorer, rows), rows)


def quality_of(logit: NDArray[np.float64], rows: NodeRows) -> LabelQuality:
    """The same for log-odds `[M]`. Sampled negatives stand for those that were left out."""
    weight = np.where(rows.accepted, 1.0, 1.0 / rows.kept_frac)
    loss = np.logaddexp(0.0, np.where(rows.accepted, -logit, logit))
    return LabelQuality(
        log_loss=float((weight * loss).sum() / weight.sum()),
        auc=auc_of(logit, rows.accepted, weight),
        base_rate=rows.num_positives / (rows.num_positives + rows.num_negatives),
    )


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def report_json(report: C2TReport) -> bytes:
    """`report.json`: canonical JSON."""
    return canonical_json(report.model_dump(mode="json")).encode()
