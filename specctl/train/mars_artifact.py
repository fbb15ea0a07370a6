"""What the artifact of a relaxed acceptance says: contract, table, card, evidence."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specctl.artifacts import Evidence, Metric, PairFingerprint, SplitSize
from specctl.artifacts import card as cards
from specctl.artifacts.manifest import REPORT_JSON, REPORT_PNG, as_metrics
from specctl.policy import policy_digest
from specctl.policy.parse import canonical_json
from specctl.policy.records import Policy
from specctl.runtime.output import write_whole
from specctl.train.mars import MarsSweep
from specctl.train.mars_report import (
    COLUMNS,
    MarsReport,
    report_json,
    report_png,
    summary,
    table_rows,
)
from specctl.train.publish import Publication, metric_of


def keep_report(report: MarsReport, folder: Path) -> None:
    """Leaves the report beside the answers, whatever the contract decides."""
    write_whole(folder / REPORT_JSON, report_json(report), "report")
    write_whole(folder / REPORT_PNG, report_png(report), "report")


def mars_publication(found: MarsSweep, report: MarsReport, pair: PairFingerprint) -> Publication:
    """Everything that `save_fit` writes of a sweep whose contract certified something."""
    assert report.chosen is not None, "a refused contract has nothing to publish"
    policy = found.policy(report.chosen)
    return Publication(
        policy=policy,
        settings={"kind": "mars", **report.config.model_dump(mode="json")},
        evidence=evidence(found, report, report.chosen),
        card=write_card(policy, report, report.chosen, pair),
        reports={REPORT_JSON: report_json(report), REPORT_PNG: report_png(report)},
    )


def evidence(found: MarsSweep, report: MarsReport, chosen: int) -> Evidence:
    """Sizes are prompts and calls of the chosen policy; the digest is that of all answers."""
    calls = sum(answer.calls for answer in found.relaxed[chosen].values())
    size = SplitSize(num_prompts=report.num_prompts, num_rounds=calls)
    return Evidence(
        trace_digest=answers_digest(found),
        num_prompts=size.num_prompts,
        num_rounds=size.num_rounds,
        splits={"paired": size},
        metrics=as_metrics(_metrics(report, chosen)),
    )


def answers_digest(found: MarsSweep) -> str:
    """Identity of the texts that were judged, `sha256:<hex>`."""
    policies = (found.base, *(found.policy(i) for i in range(len(found.relaxed))))
    texts = {
        policy_digest(policy): [
            [*key, list(answer.token_ids)] for key, answer in sorted(answers.items())
        ]
        for policy, answers in zip(policies, (found.strict, *found.relaxed), strict=True)
    }
    return "sha256:" + hashlib.sha256(canonical_json(texts).encode()).hexdigest()


def _metrics(report: MarsReport, chosen: int) -> dict[str, Metric | float | None]:
    row = report.rows[chosen]
    seen, trial = row.comparison, row.trial
    estimates = {
        "tokens_per_call": seen.tokens_per_call,
        "speedup": seen.speedup,
        "recovery": seen.recovery,
        "diverged": seen.diverged,
    }
    return {
        "theta": row.theta,
        "accuracy": seen.accuracy,
        "strict_accuracy": report.strict_accuracy,
        "mean_loss": trial.mean_loss,
        "p_value": trial.p_value,
        "max_certifiable": trial.max_certifiable,
        "num_checked": float(report.num_checked),
        **{name: metric_of(found, report.num_prompts) for name, found in estimates.items()},
    }


def write_card(policy: Policy, report: MarsReport, chosen: int, pair: PairFingerprint) -> str:
    """Markdown of `README.md`; a pure function of its arguments."""
    contract, row = report.config.contract, report.rows[chosen]
    rows = [tuple(cards.cell(cell) for cell in cells) for cells in table_rows(report)]
    evidence_lines = cards.bullets(*map(cards.cell, summary(report)))
    sections = (
        f"# Relaxed acceptance for {cards.cell(pair.target)} with {cards.cell(pair.drafter)}",
        "Accepts the target's second choice where the target is nearly indifferent "
        "(MARS, arXiv:2601.15498).",
        cards.law_line(policy),
        f"Certified: at confidence {contract.confidence:g} it loses at most "
        f"{contract.max_loss:g} right answers per prompt ({contract.kind} loss) on prompts like "
        f"those it was judged on. Seen: {row.trial.mean_loss:.4g} over {row.trial.num_prompts}.",
        cards.policy_block(policy),
        cards.pair_table(pair),
        f"## Evidence\n\n{evidence_lines}\n\n{cards.table(COLUMNS, rows)}",
        "## Use\n\n" + cards.use_block(pair, lossless=False),
        f"## Limits\n\n{LIMITS}\n{cards.FIXTURE_LINE}",
    )
    return "\n\n".join(sections) + "\n"


LIMITS = """- The promise is about checkable answers to such prompts, under this shape and this
  decoding. What is drafted decides what can be relaxed: fit again for another shape, pair or load.
- Thresholds on logits do not carry over between models: z2 / z1 moves with the logits' origin.
- Answers that change without an answer key, such as prose, are not judged."""
