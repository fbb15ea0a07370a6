"""What the artifact of ECHO's gates says: evidence, card, report, and the twin's check."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.artifacts import Evidence, Metric, PairFingerprint, SplitSize
from specctl.artifacts import card as cards
from specctl.artifacts.manifest import REPORT_JSON, REPORT_PNG
from specctl.artifacts.onnx_twin import twin_stops
from specctl.policy.gates import stop_levels
from specctl.policy.records import Budget, ElasticBudget, SparseGates
from specctl.train.echo import EchoFit
from specctl.train.echo_figure import report_png
from specctl.train.echo_report import (
    LEGEND,
    TABLE_COLUMNS,
    EchoReport,
    report_json,
    summary,
    table_rows,
)
from specctl.train.publish import Publication, metric_of, refuse_other_decisions


def echo_publication(fit: EchoFit, fingerprint: PairFingerprint, trace_digest: str) -> Publication:
    """Everything that `save_fit` writes of a fit.

    Args:
        trace_digest: identity of the traces that it was fitted on, `sha256:<hex>`.
    """
    shape = fit.policy.shape
    assert isinstance(shape, SparseGates)
    return Publication(
        policy=fit.policy,
        settings={"kind": "echo", **fit.config.model_dump(mode="json")},
        evidence=evidence(fit.report, trace_digest),
        card=write_card(fit, fingerprint, trace_digest),
        reports={REPORT_JSON: report_json(fit.report), REPORT_PNG: report_png(fit.report)},
        check_twin=functools.partial(check_twin_stops_alike, shape, fit.held_out_logp),
    )


def check_twin_stops_alike(
    shape: SparseGates, level_logp: NDArray[np.float32], model: bytes
) -> None:
    """Compares the twin with the rule on given confidences; raises `ArtifactError` otherwise."""
    wanted = stop_levels(shape, torch.from_numpy(level_logp.copy())).numpy()
    found = twin_stops(model, level_logp)
    refuse_other_decisions(wanted != found, level_logp)


def evidence(report: EchoReport, trace_digest: str) -> Evidence:
    """What the manifest says of the data (labelled positions) and of the held-out figures."""
    splits = {
        side: SplitSize(num_prompts=report.prompts[side], num_rounds=report.rows[side])
        for side in ("train", "held_out")
    }
    return Evidence.of_splits(trace_digest, splits, _metrics(report))


def _metrics(report: EchoReport) -> dict[str, Metric | float | None]:
    gated = report.replayed["gates"]
    areas = {
        f"held_out_auc_level_{row.level}": metric_of(row.held_out_auc, report.prompts["held_out"])
        for row in report.levels
        if row.threshold is not None
    }
    return {
        **areas,
        "held_out_loss_frac": report.recall.loss_frac,
        "held_out_mean_acceptance_length": gated.mean_acceptance_length,
        "held_out_verified_per_call": gated.verified_per_call,
        "held_out_utilisation": gated.utilisation,
    }


def write_card(fit: EchoFit, pair: PairFingerprint, trace_digest: str) -> str:
    """Markdown; a pure function of its arguments."""
    sections = (
        cards.head("ECHO gates", WHAT, fit.policy, pair),
        "## Evidence\n\n" + cards.bullets(f"traces `{trace_digest}`", *summary(fit.report)),
        f"## Levels\n\n{cards.table(TABLE_COLUMNS, table_rows(fit.report))}\n\n{LEGEND}.",
        f"## Use\n\n{cards.use_block(pair, REPLAY)} {TWIN}",
        _shared(fit.policy.budget),
        "## Limits\n\n" + _limits(fit),
    )
    return "\n\n".join(sections) + "\n"


WHAT = (
    "A draft grows level by level with a fixed width. At a few levels a gate compares the "
    "probability of the likeliest path with a threshold: below it the level is widened and "
    "drafting ends (arXiv:2604.09603)."
)
REPLAY = "specctl replay TRACES -p PATH+echo_budget:max_tokens=64 --batch-size 8 ..."
TWIN = (
    "Other runtimes can evaluate `policy.onnx`: `gate_logp` float32 `[n, G]`, the log-probability "
    "of the likeliest path at every gate, to `stopped_at`, the level of the gate that closes or 0."
)


def _shared(budget: Budget) -> str:
    if isinstance(budget, ElasticBudget):
        return f"A batch verifies {budget.max_tokens} nodes a round at most, roots counted."
    return "The batch verifies what the shape submits: no budget is set."


def _limits(fit: EchoFit) -> str:
    config = fit.config
    return f"""- The thresholds hold for this pair and for levels of {config.width} nodes.
- Areas are over every position of the texts, not over the rounds of a policy. A gate saves what
  is verified, or gives it to other requests; the draft step that it looks at was run already.
- Compare it with a static tree and with the survival budget at the same number of verified
  tokens before you trust it (docs/echo.md).
{cards.FIXTURE_LINE}"""
