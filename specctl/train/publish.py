"""From a fit to an artifact folder, one way for all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.artifacts import Artifact, Domain, Origin, PairFingerprint, save_artifact
from specctl.artifacts.card import with_domain
from specctl.artifacts.manifest import REPORT_JSON, REPORT_PNG
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import ArtifactError, InvariantError
from specctl.policy import Policy
from specctl.policy.scorers import Scorer, build_log_odds
from specctl.runtime.twins import SCORER, TwinSession
from specctl.train.report import Data, FitReport

TwinCheck = Callable[[bytes], None]
"""Given the twin's bytes, raises `ArtifactError` where it decides otherwise than the policy."""
TOLERANCE = 1e-5
"""Of log-odds, absolute and relative: two orders of adding up float32 numbers differ by less,
another leaf or another weight by more."""
MOST_CHECKED = 100_000
"""Held-out rows that a scorer's twin is checked on."""


@dataclass(frozen=True)
class Fit(Generic[Data]):
    """A fitted policy and what is known of it.

    Attributes:
        check_twin: on what was held out; needed where the policy has an ONNX twin.
    """

    policy: Policy
    report: FitReport[Data]
    check_twin: TwinCheck | None = None

    @property
    def data(self) -> Data:
        """The figures."""
        return self.report.data


def save_fit(
    fit: Fit[Any],
    folder: Path | str,
    pair: PairFingerprint,
    trace_digest: str,
    *,
    domain: Domain | None = None,
    parent: str | None = None,
    snapshots: Sequence[str] = (),
) -> Artifact:
    """Writes the artifact of a fit, after its twin has decided alike.

    Args:
        trace_digest: identity of the data that it was fitted to, `sha256:<hex>`.
        domain: what the evidence was gathered on; None where nothing of it is known.
        parent: digest of the artifact that it descends from.
        snapshots: of the trace sets that it was fitted to, set by set.

    Raises:
        ArtifactError: E_TWIN if the twin decides otherwise; nothing is written then.
        OutputError: a place that cannot be written, or that holds something else.
    """
    model, report = twin_bytes(fit.policy), fit.report
    if model is not None:
        if fit.check_twin is None:
            raise InvariantError(
                f"fit of {fit.policy.name}",
                expected="a check of its ONNX twin",
                found="none",
                fix="give check_twin",
            )
        fit.check_twin(model)
    origin = Origin(
        pair=pair,
        evidence=report.evidence(trace_digest),
        fit={"kind": report.kind, **report.config},
        domain=domain,
        parent=parent,
    )
    return save_artifact(
        folder,
        fit.policy,
        origin.of_sets(snapshots),
        card=with_domain(report.card(fit.policy, pair, trace_digest), domain),
        reports={REPORT_JSON: report.json_bytes(), REPORT_PNG: report.png()},
    )


def check_scorer_twin(scorer: Scorer, features: NDArray[np.float32], model: bytes) -> None:
    """Compares the twin's log-odds of `[n, F]` held-out nodes with the scorer's."""
    given = torch.from_numpy(features[:MOST_CHECKED])
    wanted = build_log_odds(scorer)(given)
    found = TwinSession(model, SCORER, given.device)(given)
    differs = ~found.isclose(wanted, rtol=TOLERANCE, atol=TOLERANCE)
    refuse_other_decisions(differs.numpy(), features[:MOST_CHECKED])


def refuse_other_decisions(differs: NDArray[Any], given: NDArray[Any]) -> None:
    """Raises `ArtifactError` (E_TWIN) if the twin differs on any row of `given`.

    Args:
        differs: `[n]` bool. given: `[n, ...]`.
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
