"""What the artifact of HeteroSpec's bins says: evidence, card, report, and the twin's check."""

from __future__ import annotations

import functools

import numpy as np
import torch

from specctl.artifacts import Evidence, Metric, PairFingerprint, SplitSize, twin_decisions
from specctl.artifacts import card as cards
from specctl.artifacts.manifest import REPORT_JSON, REPORT_PNG
from specctl.features import ENTROPY_TOP_K
from specctl.policy.hetero import entropy_bin, entropy_bins_shape
from specctl.policy.records import EntropyBins, Policy, StaticTree
from specctl.train.cart import CartFit
from specctl.train.figure import report_png
from specctl.train.partition import Phis
from specctl.train.publish import Publication, refuse_other_decisions
from specctl.train.report import (
    LEGEND,
    TABLE_COLUMNS,
    CartReport,
    report_json,
    summary,
    table_rows,
)


def cart_publication(fit: CartFit, fingerprint: PairFingerprint, trace_digest: str) -> Publication:
    """Everything that `save_fit` writes of a fit.

    Args:
        trace_digest: identity of the traces that it was fitted on, `sha256:<hex>`.
    """
    return Publication(
        policy=fit.policy,
        settings={"kind": "cart", **fit.config.model_dump(mode="json")},
        evidence=evidence(fit.report, trace_digest),
        card=write_card(fit, fingerprint, trace_digest),
        reports={REPORT_JSON: report_json(fit.report), REPORT_PNG: report_png(fit.report)},
        check_twin=functools.partial(check_twin_decides_alike, fit.policy, fit.held_out_phi),
    )


def check_twin_decides_alike(policy: Policy, phi: Phis, model: bytes) -> None:
    """Compares the twin with the rule on given Φ and raises `ArtifactError` on any difference."""
    shape = policy.shape
    assert isinstance(shape, EntropyBins)
    rule = entropy_bins_shape(shape, torch.device("cpu"))
    bins = entropy_bin(torch.from_numpy(phi.copy()), rule.edges)
    wanted = [table.numpy() for table in (bins, rule.bin_depths[bins], rule.bin_tokens[bins])]
    found = twin_decisions(model, phi)
    differs = np.any([w != f for w, f in zip(wanted, found, strict=True)], axis=0)
    refuse_other_decisions(differs, phi)


def evidence(report: CartReport, trace_digest: str) -> Evidence:
    """What the manifest says of the data (eligible rounds) and of the held-out figures."""
    splits = {
        side: SplitSize(
            num_prompts=report.prompts[side],
            num_rounds=sum(getattr(row, side).num_rounds for row in report.bins),
        )
        for side in ("train", "held_out")
    }
    return Evidence.of_splits(trace_digest, splits, _metrics(report))


def _metrics(report: CartReport) -> dict[str, Metric | float | None]:
    held_out = report.held_out
    low, high = held_out.mse_interval or (None, None)
    overlaps = {f"jaccard_depth_{s.max_leaf_depth}": s.jaccard for s in report.stability}
    return {
        "held_out_mse": Metric.of(held_out.mse, low, high, num_prompts=report.prompts["held_out"]),
        "held_out_constant_mse": held_out.constant_mse,
        "held_out_r_squared": held_out.r_squared,
        "spearman_phi_tcr": report.spearman_phi_tcr,
        "spearman_phi_accepted": report.spearman_phi_accepted,
        **overlaps,
    }


def write_card(fit: CartFit, pair: PairFingerprint, trace_digest: str) -> str:
    """Markdown; a pure function of its arguments."""
    sections = (
        cards.head("HeteroSpec policy", WHAT, fit.policy, pair),
        "## Evidence\n\n" + cards.bullets(f"traces `{trace_digest}`", *summary(fit.report)),
        f"## Bins\n\n{cards.table(TABLE_COLUMNS, table_rows(fit.report))}\n\n{LEGEND}.",
        f"## Use\n\n{cards.use_block(pair)} {TWIN}",
        "## Limits\n\n" + _limits(fit.config.base),
    )
    return "\n\n".join(sections) + "\n"


WHAT = (
    f"Bins of Φ, the drafter's cumulative top-{ENTROPY_TOP_K} entropy along its best path, choose "
    "how deep each draft tree grows and how many of its nodes the target verifies "
    "(arXiv:2505.13254)."
)
TWIN = (
    "Other runtimes can evaluate `policy.onnx`: `phi` float32 `[n]` to `bin`, `depth`, "
    "`num_tokens`."
)


def _limits(base: StaticTree) -> str:
    return f"""- The thresholds hold for this pair, for K = {ENTROPY_TOP_K} and for a base tree of
  {base.depth} levels. Φ is a sum over levels, so another K, depth or pair needs another fit.
- Figures are of the base tree's rounds, not of the policy's own. Compare it with `specctl run
  --compare` before you trust it.
{cards.FIXTURE_LINE}"""
