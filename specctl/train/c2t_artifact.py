"""What the artifact of a C2T fit says: evidence, card, report, and the twin's check."""

from __future__ import annotations

import functools

from specctl.artifacts import Evidence, PairFingerprint, SplitSize
from specctl.artifacts.manifest import REPORT_JSON, REPORT_PNG
from specctl.train.c2t import C2TFit
from specctl.train.c2t_figure import report_png
from specctl.train.c2t_report import (
    LEGEND,
    STUDY_COLUMNS,
    TABLE_COLUMNS,
    C2TReport,
    report_json,
    study_rows,
    summary,
    table_rows,
)
from specctl.train.publish import Publication
from specctl.train.twin import check_scorer_twin

MOST_CHECKED = 100_000
"""Held-out rows that the twin is asked about."""


def c2t_publication(fit: C2TFit, pair: PairFingerprint, trace_digest: str) -> Publication:
    """Everything that `save_fit` writes of a fit.

    Args:
        trace_digest: identity of the traces that it was fitted on, `sha256:<hex>`.
    """
    features = fit.held_out.features[:MOST_CHECKED]
    return Publication(
        policy=fit.policy,
        settings={"kind": "c2t", **fit.config.model_dump(mode="json")},
        evidence=evidence(fit.report, trace_digest),
        card=write_card(fit, pair, trace_digest),
        reports={REPORT_JSON: report_json(fit.report), REPORT_PNG: report_png(fit.report)},
        check_twin=functools.partial(check_scorer_twin, fit.scorer, features),
    )


def evidence(report: C2TReport, trace_digest: str) -> Evidence:
    """What the manifest says of the data (positions as rounds) and of the held-out figures."""
    splits = {
        side: SplitSize(num_prompts=counts.num_prompts, num_rounds=counts.num_positions)
        for side, counts in report.sides.items()
    }
    changes = {f"change_at_recall_{row.recall:g}": row.change for row in report.comparisons}
    return Evidence(
        trace_digest=trace_digest,
        num_prompts=sum(size.num_prompts for size in splits.values()),
        num_rounds=sum(size.num_rounds for size in splits.values()),
        splits=splits,
        metrics={
            "held_out_recall": report.held_out.recall,
            "held_out_positive_rate": report.held_out.positive_rate,
            "held_out_num_tokens": report.held_out.num_tokens,
            "held_out_num_accepted": report.held_out.num_accepted,
            "held_out_auc": report.auc,
            "held_out_joint_auc": report.joint_auc,
            "held_out_ece": report.calibration[0].ece,
            "held_out_label_log_loss": report.label.log_loss,
            **changes,
        },
    )


def write_card(fit: C2TFit, pair: PairFingerprint, trace_digest: str) -> str:
    """Markdown; a pure function of its arguments."""
    parts = [
        _head(fit, pair),
        "## Evidence\n\n" + _evidence(fit.report, trace_digest),
        "## Against the plain threshold\n\n" + _markdown(TABLE_COLUMNS, table_rows(fit.report)),
        f"{LEGEND}.",
    ]
    if fit.report.study is not None:
        table = _markdown(STUDY_COLUMNS, study_rows(fit.report.study))
        parts += ["## Studies\n\n" + table, f"nodes at recall {fit.config.recall:g}, held out."]
    return "\n\n".join([*parts, "## Use\n\n" + _use(pair), "## Limits\n\n" + _limits(fit)]) + "\n"


def _head(fit: C2TFit, pair: PairFingerprint) -> str:
    nodes = fit.config.nodes
    label = {
        "joint": "whether the whole path to a node will be accepted (the paper's label)",
        "conditional": "whether a node will be accepted once its parent is, multiplied along "
        "the path",
    }[nodes.predicts]
    names = ", ".join(f"`{name}`" for name in nodes.features)
    return f"""# C2T policy for {pair.target} with {pair.drafter}

A network of {fit.config.ffn.hidden} hidden units reads {names}
of every draft token and predicts {label} (arXiv:2502.13652).
While a tree of at most {nodes.depth} levels grows, what scores below beta
= {fit.report.beta:.4g} is neither expanded nor verified.
Lossless: the emitted text follows the target's own law.

| part of the pair | name | digest |
|---|---|---|
| target | {_cell(pair.target)} | `{pair.target_digest}` |
| drafter | {_cell(pair.drafter)} | `{pair.drafter_digest}` |
| tokenizer | | `{pair.tokenizer_digest}` |"""


def _evidence(report: C2TReport, trace_digest: str) -> str:
    lines = (f"traces `{trace_digest}`", *summary(report))
    return "\n".join(f"- {line}" for line in lines)


def _markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (columns, ("---",) * len(columns), *rows)
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _use(pair: PairFingerprint) -> str:
    return f"""```
specctl show PATH
specctl run --policy PATH ...
```

specctl refuses to run it on another pair than {pair.target} with {pair.drafter}. Other runtimes
can evaluate `policy.onnx`: `features` float32 `[n, F]` to `log_odds` and `prob`."""


def _limits(fit: C2TFit) -> str:
    missing = f"{fit.report.missing_frac:.2f}"
    return f"""- Figures are means over logged positions, each taken as a start. A run visits some.
  `specctl replay` walks the log as a run would: compare there before you trust it.
- The network was fitted to nodes drafted by joint probability; the policy drafts by its own
  scores. Nodes that it asks for and the traces lack count as not accepted: {missing} expansions
  a position without a threshold.
- If the pair is specctl's embedded one, these figures are a fixture for people and tests; they
  say nothing about large models."""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
