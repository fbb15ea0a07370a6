"""What a manifest claims against what its report says (E_EVIDENCE)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.artifacts.manifest import REPORT_JSON, Manifest
from specctl.artifacts.strict_json import parse_strict, shown
from specctl.errors import ArtifactError


def check_evidence(manifest: Manifest, report: bytes | None) -> None:
    """Refuses a figure that its own report does not hold.

    Every defined metric must stand in `report.json` as the same number, wherever fits of its kind
    put it. Nothing is compared where there is no report, or no evidence. A number that somebody
    forged in both places is only as good as the signature.

    Raises:
        ArtifactError: E_EVIDENCE, or E_MANIFEST for a report that is not strict JSON.
    """
    if report is None:
        return
    figures = set(_numbers(parse_strict(report, REPORT_JSON)))
    metrics = manifest.evidence.metrics if manifest.evidence else {}
    for name, metric in metrics.items():
        if metric.value is not None and metric.value not in figures:
            raise ArtifactError(
                "E_EVIDENCE",
                shown(f"metric {name}"),
                expected=f"a figure of {REPORT_JSON}",
                found=f"{metric.value:g}, which it does not hold",
                fix="fit the policy again from its traces",
            )


def _numbers(tree: Any) -> Iterator[float]:
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int | float):
            yield float(value)
