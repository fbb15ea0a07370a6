"""A fitted node scorer in tables and a few lines, for the terminal and for the card."""

from __future__ import annotations

from typing import Any

from specctl.train.c2t_report import C2TReport, Study
from specctl.train.curves import Interval
from specctl.train.tables import number, table


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
            number(row.num_tokens, ".1f"),
            number(row.joint_num_tokens, ".1f"),
            number(row.change, "+.1%"),
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
            number(row.num_tokens, ".1f"),
            number(row.joint_num_tokens, ".1f"),
            number(row.auc, ".4f"),
            number(row.ece, ".4f"),
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
