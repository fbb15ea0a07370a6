"""From a fit to an artifact folder, for every family: policy, ONNX twin, card, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import JsonValue

from specctl.artifacts import (
    Artifact,
    Domain,
    Evidence,
    Metric,
    Origin,
    PairFingerprint,
    save_artifact,
)
from specctl.artifacts.card import with_domain
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import ArtifactError, InvariantError
from specctl.policy.records import Policy
from specctl.stats import CONFIDENCE, Interval


def metric_of(found: Interval, num_prompts: int) -> Metric:
    """A figure of the manifest; `num_prompts`: that its interval was taken over."""
    numbers = (None if math.isnan(x) else x for x in (found.value, found.low, found.high))
    return Metric.of(*numbers, level=CONFIDENCE, num_prompts=num_prompts)


TwinCheck = Callable[[bytes], None]
"""Given the twin's bytes, raises `ArtifactError` where it decides otherwise than the policy."""


@dataclass(frozen=True)
class Publication:
    """A fitted policy and all that its artifact says of it.

    Attributes:
        settings: configuration of the fit, its `kind` among it; the manifest's `fit`.
        evidence: data and held-out figures; the manifest's.
        card: the text of `README.md`.
        reports: bytes of `report.json` and `report.png`, by name.
        check_twin: needed where the policy has an ONNX twin.
    """

    policy: Policy
    settings: dict[str, JsonValue]
    evidence: Evidence
    card: str
    reports: Mapping[str, bytes] = field(default_factory=dict)
    check_twin: TwinCheck | None = None


def save_fit(
    publication: Publication,
    folder: Path | str,
    fingerprint: PairFingerprint,
    *,
    domain: Domain | None = None,
    parent: str | None = None,
    snapshots: Sequence[str] = (),
) -> Artifact:
    """Writes the artifact of a fit, after its twin has decided alike.

    Args:
        domain: what the evidence was gathered on; None where nothing of it is known.
        parent: digest of the artifact that it descends from.
        snapshots: of the trace sets that it was fitted on, set by set.

    Raises:
        ArtifactError: E_TWIN if the twin decides otherwise; nothing is written then.
        OutputError: a place that cannot be written, or that holds something else.
    """
    _check_twin(publication)
    origin = Origin(
        pair=fingerprint,
        evidence=publication.evidence,
        fit=publication.settings,
        domain=domain,
        parent=parent,
    )
    return save_artifact(
        folder,
        publication.policy,
        origin.of_sets(snapshots),
        card=with_domain(publication.card, domain),
        reports=publication.reports,
    )


def _check_twin(publication: Publication) -> None:
    model = twin_bytes(publication.policy)
    if model is None:
        return
    if publication.check_twin is None:
        raise InvariantError(
            f"publication of {publication.policy.name}",
            expected="a check of its ONNX twin",
            found="none",
            fix="give check_twin",
        )
    publication.check_twin(model)


def refuse_other_decisions(differs: NDArray[Any], given: NDArray[Any]) -> None:
    """Raises `ArtifactError` if the twin differs anywhere.

    Args:
        differs: `[n]` bool. given: `[n, ...]`, what both were asked about.
    """
    if differs.any():
        raise ArtifactError(
            "E_TWIN",
            "ONNX twin",
            expected="the rule's decision on everything held out",
            found=f"another on {int(differs.sum())} of {len(differs)}, first for "
            f"{given[differs][0]!r}",
            fix="report this policy and the onnxruntime version; nothing was written",
        )
