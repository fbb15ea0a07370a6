"""What the artifact of a C2T fit says: evidence, card, report, and the twin's check."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from specctl.artifacts import Evidence, Metric, PairFingerprint, SplitSize
from specctl.artifacts import card as cards
from specctl.artifacts.manifest import REPORT_JSON, REPORT_PNG
from specctl.policy.records import Policy, Scorer
from specctl.train.c2t import C2TFit
from specctl.train.c2t_config import C2TConfig
from specctl.train.c2t_figure import report_png
from specctl.train.c2t_report import C2TReport, report_json
from specctl.train.c2t_table import (
    LEGEND,
    STUDY_COLUMNS,
    TABLE_COLUMNS,
    study_rows,
    summary,
    table_rows,
)
from specctl.train.curves import Interval
from specctl.train.publish import Publication
from specctl.train.scored_fit import Sides
from specctl.train.twin import check_scorer_twin

MOST_CHECKED = 100_000
"""Held-out rows that the twin is asked about."""


class ScorerFit(Protocol):
    """A fitted scorer of any kind: `C2TFit` is one."""

    @property
    def policy(self) -> Policy: ...
    @property
    def config(self) -> C2TConfig: ...
    @property
    def report(self) -> C2TReport: ...
    @property
    def sides(self) -> Sides: ...
    @property
    def scorer(self) -> Scorer: ...


@dataclass(frozen=True)
class Words:
    """What differs between the artifacts of scorers.

    Attributes:
        kind: of the fit, in the manifest. name: of the policy, in titles.
        scorer: what it is, e.g. "A network of 48 hidden units". summary: lines of evidence.
        sections: more of the card, Markdown.
    """

    kind: str
    name: str
    scorer: str
    summary: tuple[str, ...]
    sections: tuple[str, ...] = ()


def c2t_publication(fit: C2TFit, pair: PairFingerprint, trace_digest: str) -> Publication:
    """Everything that `save_fit` writes of a fit.

    Args:
        trace_digest: identity of the traces that it was fitted on, `sha256:<hex>`.
    """
    sections: tuple[str, ...] = ()
    if fit.report.study is not None:
        rows = [[cards.cell(text) for text in row] for row in study_rows(fit.report.study)]
        note = f"nodes at recall {fit.config.recall:g}, held out."
        sections = ("## Studies\n\n" + cards.table(STUDY_COLUMNS, rows), note)
    network = f"A network of {fit.config.ffn.hidden} hidden units"
    words = Words("c2t", "C2T", network, summary(fit.report), sections)
    return scorer_publication(fit, pair, trace_digest, words)


def scorer_publication(
    fit: ScorerFit, pair: PairFingerprint, trace_digest: str, words: Words
) -> Publication:
    """The same for any scorer."""
    features = fit.sides.held_out.features[:MOST_CHECKED]
    picture = report_png(fit.report, words.name)
    return Publication(
        policy=fit.policy,
        settings={"kind": words.kind, **fit.config.model_dump(mode="json")},
        evidence=evidence(fit.report, trace_digest),
        card=write_card(fit, pair, trace_digest, words),
        reports={REPORT_JSON: report_json(fit.report), REPORT_PNG: picture},
        check_twin=functools.partial(check_scorer_twin, fit.scorer, features),
    )


def evidence(report: C2TReport, trace_digest: str) -> Evidence:
    """What the manifest says of the data (positions as rounds) and of the held-out figures."""
    splits = {
        side: SplitSize(num_prompts=counts.num_prompts, num_rounds=counts.num_positions)
        for side, counts in report.sides.items()
    }
    return Evidence.of_splits(trace_digest, splits, _metrics(report))


def _metrics(report: C2TReport) -> dict[str, Metric | float | None]:
    num_prompts = report.sides["held_out"].num_prompts

    def metric(value: float | None, found: Interval | None) -> Metric:
        ends = (None, None) if found is None else (found.low, found.high)
        return Metric.of(value, *ends, num_prompts=num_prompts)

    kept = {
        f"held_out_{name}": metric(getattr(report.held_out, name), found)
        for name, found in report.held_out_interval.items()
    }
    changes = {
        f"change_at_recall_{row.recall:g}": metric(row.change, row.change_interval)
        for row in report.comparisons
    }
    return {
        **kept,
        "held_out_auc": report.auc,
        "held_out_joint_auc": report.joint_auc,
        "held_out_ece": report.calibration[0].ece,
        "held_out_label_log_loss": report.label.log_loss,
        **changes,
    }


def write_card(fit: ScorerFit, pair: PairFingerprint, trace_digest: str, words: Words) -> str:
    """Markdown; a pure function of its arguments."""
    table = cards.table(TABLE_COLUMNS, table_rows(fit.report))
    sections = (
        cards.head(f"{words.name} policy", _what(fit, words), fit.policy, pair),
        "## Evidence\n\n" + cards.bullets(f"traces `{trace_digest}`", *words.summary),
        f"## Against the plain threshold\n\n{table}\n\n{LEGEND}.",
        *words.sections,
        f"## Use\n\n{cards.use_block(pair)} {TWIN}",
        "## Limits\n\n" + _limits(fit),
    )
    return "\n\n".join(sections) + "\n"


def _what(fit: ScorerFit, words: Words) -> str:
    nodes = fit.config.nodes
    label = {
        "joint": "whether the whole path to a node will be accepted (the paper's label)",
        "conditional": "whether a node will be accepted once its parent is, multiplied along "
        "the path",
    }[nodes.predicts]
    names = ", ".join(f"`{name}`" for name in nodes.features)
    return f"""{words.scorer} reads {names}
of every draft token and predicts {label} (arXiv:2502.13652).
While a tree of at most {nodes.depth} levels grows, what scores below beta
= {fit.report.beta:.4g} is neither expanded nor verified."""


TWIN = (
    "Other runtimes can evaluate `policy.onnx`: `features` float32 `[n, F]` to `log_odds` and "
    "`prob`."
)


def _limits(fit: ScorerFit) -> str:
    missing = f"{fit.report.missing_frac:.2f}"
    return f"""- Figures are means over logged positions, each taken as a start. A run visits some.
  `specctl replay` walks the log as a run would: compare there before you trust it.
- It was fitted to nodes drafted by joint probability; the policy drafts by its own
  scores. Nodes that it asks for and the traces lack count as not accepted: {missing} expansions
  a position without a threshold.
{cards.FIXTURE_LINE}"""
