"""What a fitted node scorer is worth on prompts that it has not seen: figures, table, JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.policy.parse import canonical_json
from specctl.policy.records import Record, Scorer
from specctl.policy.scoring import build_log_odds
from specctl.train.c2t_config import C2TConfig
from specctl.train.calibration_error import DepthCalibration
from specctl.train.curves import Curve, CurvePoint, Interval, resampled_prompts
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
    weights = resampled_prompts(len(curve.category), seed)
    changes = (
        curve.tokens_at_recall(recall, weights) / control.tokens_at_recall(recall, weights) - 1
    )
    known = changes[~np.isnan(changes)]
    interval = None
    if np.isfinite(change) and len(known):
        low, high = np.percentile(known, (2.5, 97.5))
        interval = Interval(low=float(low), high=float(high))
    return Comparison(
        recall=recall,
        num_tokens=_known(own),
        joint_num_tokens=_known(other),
        change=_known(change),
        change_interval=interval,
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
    from sklearn.metrics import roc_auc_score

    weight = np.where(rows.accepted, 1.0, 1.0 / rows.kept_frac)
    loss = np.logaddexp(0.0, np.where(rows.accepted, -logit, logit))
    return LabelQuality(
        log_loss=float((weight * loss).sum() / weight.sum()),
        auc=float(roc_auc_score(rows.accepted, logit, sample_weight=weight)),
        base_rate=rows.num_positives / (rows.num_positives + rows.num_negatives),
    )


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def report_json(report: C2TReport) -> bytes:
    """`report.json`: canonical JSON."""
    return canonical_json(report.model_dump(mode="json")).encode()


def summary(report: C2TReport) -> tuple[str, ...]:
    """Lines that go with the table: what was fitted, on how much, how well."""
    train, held_out = report.sides["train"], report.sides["held_out"]
    nodes, kept = report.config.nodes, report.held_out
    bounds = report.held_out_interval
    return (
        f"{nodes.predicts} acceptance from {', '.join(nodes.features)}; hidden "
        f"{report.config.ffn.hidden}; {train.num_accepted} accepted nodes and "
        f"{train.kept_frac:.1%} of {train.num_rejected} rejected ones from {train.num_prompts} "
        f"prompts",
        f"beta {report.beta:.4g} keeps, on {held_out.num_prompts} held-out prompts "
        f"({held_out.num_positions} positions): recall {kept.recall:.3f} "
        f"{_range(bounds['recall'])}, positive rate {kept.positive_rate:.4f}, "
        f"{kept.num_tokens:.1f} nodes {_range(bounds['num_tokens'])} and "
        f"{kept.num_accepted:.2f} accepted tokens a position",
        f"AUC {report.auc:.4f}, of the joint probability {report.joint_auc:.4f}; ECE "
        f"{report.calibration[0].ece:.4f}; log-loss of the label {report.label.log_loss:.4f} nats",
        *_warnings(report),
    )


def _range(bounds: Interval) -> str:
    return f"[{bounds.low:.3g}, {bounds.high:.3g}]"


def _warnings(report: C2TReport) -> tuple[str, ...]:
    lines = []
    if report.auc <= report.joint_auc:
        lines.append("warning: these scores order nodes no better than the joint probability")
    if report.missing_frac > 0.05:
        lines.append(
            f"warning: without a threshold it asks for {report.missing_frac:.2f} expansions a "
            "position that the traces lack; recalls near 1 are pessimistic"
        )
    return tuple(lines)


TABLE_COLUMNS = ("recall", "nodes", "joint", "change", "95 %")
LEGEND = (
    "nodes kept per position, root counted, where each curve passes the recall (share of accepted "
    "tokens kept), held out; joint: plain threshold on the path's probability, same depth; prompts "
    "resampled"
)


def table_rows(report: C2TReport) -> list[tuple[str, ...]]:
    """One row a recall, for the terminal and for the card."""
    return [
        (
            f"{row.recall:.2f}",
            _number(row.num_tokens, ".1f"),
            _number(row.joint_num_tokens, ".1f"),
            _number(row.change, "+.1%"),
            "-"
            if row.change_interval is None
            else f"[{row.change_interval.low:+.1%}, {row.change_interval.high:+.1%}]",
        )
        for row in report.comparisons
    ]


STUDY_COLUMNS = ("study", "fit", "tested on", "rows", "nodes", "joint", "AUC", "ECE")


def study_rows(study: Study) -> list[tuple[str, ...]]:
    """One row a fit."""
    return [
        (
            title,
            row.name,
            row.tested_on,
            str(row.num_rows),
            _number(row.num_tokens, ".1f"),
            _number(row.joint_num_tokens, ".1f"),
            _number(row.auc, ".4f"),
            _number(row.ece, ".4f"),
        )
        for title in Study.model_fields
        for row in getattr(study, title)
    ]


def render_report(report: C2TReport) -> Any:
    """A rich renderable for the terminal."""
    from rich.console import Group

    parts: list[Any] = [table(TABLE_COLUMNS, table_rows(report), LEGEND)]
    if report.study is not None:
        caption = f"nodes per position at recall {report.config.recall:g}, held out"
        parts.append(table(STUDY_COLUMNS, study_rows(report.study), caption))
    return Group(*parts, *summary(report))


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]], caption: str) -> Any:
    """A rich table, all columns to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    style: Any = {"box": SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
    made = Table(caption=caption, caption_justify="left", **style)
    for column in columns:
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
