"""What the artifact of AdaSD says: evidence, card, report."""

from __future__ import annotations

from specctl.artifacts import Evidence, Metric, PairFingerprint, SplitSize
from specctl.artifacts import card as cards
from specctl.artifacts.manifest import REPORT_JSON, REPORT_PNG
from specctl.policy.records import Policy
from specctl.train.adasd import StopFit
from specctl.train.adasd_clip import ClipReport
from specctl.train.adasd_report import (
    CLIP_COLUMNS,
    STOP_COLUMNS,
    AdasdReport,
    clip_cells,
    report_json,
    report_png,
    stop_cells,
    summary,
)
from specctl.train.publish import Publication, metric_of


def adasd_publication(
    policy: Policy, report: AdasdReport, pair: PairFingerprint, trace_digest: str
) -> Publication:
    """Everything that `save_fit` writes.

    Args:
        policy: the fitted stop, with the certified acceptance where one was certified.
    """
    settings = {"kind": "adasd", **report.stop.config.model_dump(mode="json")}
    if report.clip is not None:
        settings["clip"] = report.clip.config.model_dump(mode="json")
    return Publication(
        policy=policy,
        settings=settings,
        evidence=_evidence(report, trace_digest),
        card=write_card(policy, report, pair, trace_digest),
        reports={REPORT_JSON: report_json(report), REPORT_PNG: report_png(report)},
    )


def _evidence(report: AdasdReport, trace_digest: str) -> Evidence:
    """Rounds are the tokens that verification tested; the digest is that of the traces."""
    stop = report.stop
    splits = {
        side: SplitSize(num_prompts=stop.num_prompts[side], num_rounds=stop.num_tokens[side])
        for side in ("train", "held_out")
    }
    metrics = {**_stop_metrics(stop), **_clip_metrics(report.clip)}
    return Evidence.of_splits(trace_digest, splits, metrics)


def _stop_metrics(stop: StopFit) -> dict[str, Metric | float | None]:
    chosen, num_prompts = stop.rows[-1], stop.num_prompts["held_out"]
    return {
        "entropy_auc": stop.entropy.auc,
        "distance_auc": stop.distance.auc,
        "held_out_cost": metric_of(chosen.held_out_cost, num_prompts),
        "against_best_chain": metric_of(chosen.against, num_prompts),
        "tokens_per_call": chosen.tokens_per_call,
        "support": chosen.support,
    }


def _clip_metrics(clip: ClipReport | None) -> dict[str, Metric | float | None]:
    if clip is None or clip.chosen is None:
        return {}
    row = clip.rows[clip.chosen]
    return {
        "max_threshold": row.clip,
        "num_checked": float(clip.num_checked),
        "accuracy": row.comparison.accuracy,
        "strict_accuracy": clip.strict_accuracy,
        "speedup": metric_of(row.comparison.speedup, row.trial.num_prompts),
        "mean_loss": row.trial.mean_loss,
        "p_value": row.trial.p_value,
        "max_certifiable": row.trial.max_certifiable,
    }


def write_card(
    policy: Policy, report: AdasdReport, pair: PairFingerprint, trace_digest: str
) -> str:
    """Markdown of `README.md`; a pure function of its arguments."""
    lines = map(cards.cell, summary(report))
    sections = [
        f"# AdaSD for {cards.cell(pair.target)} with {cards.cell(pair.drafter)}",
        "Drafts until a token is more uncertain than a threshold that each request learns from "
        "what was accepted and rejected in its earlier rounds (arXiv:2512.11280).",
        cards.law_line(policy),
        _promise(report.clip),
        cards.policy_block(policy),
        cards.pair_table(pair),
        "## Evidence\n\n" + cards.bullets(f"traces `{trace_digest}`", *lines),
        cards.table(STOP_COLUMNS, stop_cells(report)),
    ]
    if report.clip is not None:
        sections.append(cards.table(CLIP_COLUMNS, clip_cells(report.clip)))
    sections += [
        "## Use\n\n" + cards.use_block(pair, lossless=policy.lossless),
        f"## Limits\n\n{LIMITS}\n{cards.FIXTURE_LINE}",
    ]
    return "\n\n".join(sections) + "\n"


def _promise(clip: ClipReport | None) -> str:
    if clip is None:
        return "Gen-only: it was fitted without paired runs, so verification stays strict."
    assert clip.chosen is not None, "a refused contract has nothing to publish"
    contract, row = clip.config.contract, clip.rows[clip.chosen]
    return (
        f"Certified: with its threshold clipped at {row.clip:g} it loses, at confidence "
        f"{contract.confidence:g}, at most {contract.max_loss:g} right answers per prompt "
        f"({contract.kind} loss) on prompts like those it was judged on. Seen: "
        f"{row.trial.mean_loss:.4g} over {row.trial.num_prompts}."
    )


LIMITS = """- The warm start is of these prompts and this pair; a request that differs unlearns it
  at the pace of its own tokens. Entropies do not carry over between draft vocabularies.
- The acceptance looks at distributions, never at right or wrong; only the clip is certified, for
  checkable answers to such prompts under this decoding."""
