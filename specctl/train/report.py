"""A fit and its report, as JSON, card and terminal table; its artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import JsonValue
from torch import Tensor

from specctl.artifacts import (
    Artifact,
    Domain,
    Evidence,
    Metric,
    Origin,
    PairFingerprint,
    SplitSize,
    save_artifact,
)
from specctl.artifacts import card as cards
from specctl.artifacts.manifest import prompt_marks
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import ArtifactError, InvariantError
from specctl.formatting import Table
from specctl.policy import Policy
from specctl.records import Record, canonical_json
from specctl.runtime.twins import Port, TwinSession
from specctl.stats import Interval

Data = TypeVar("Data", bound=Record)
Figures = Mapping[str, Metric | Interval | float | None]
"""Figures for a manifest; a `Metric` has its own number of prompts."""


@dataclass(frozen=True)
class FitReport(Generic[Data]):
    """The figures and texts of a fit."""

    kind: str  # of the fit, such as `cart`
    title: str  # of the card
    what: str  # the policy in a sentence or two, Markdown
    config: Mapping[str, JsonValue]  # settings of the fit, for the manifest
    data: Data  # the figures; `report.json` is this record
    splits: Mapping[str, tuple[int, int]]  # prompts, and rounds or positions, of each side
    metrics: Figures  # for the manifest; intervals are over the last side
    verdict: str  # in one line, for the first line of a terminal
    summary: Sequence[str]  # lines below the tables
    tables: Sequence[Table]
    limits: Sequence[str]  # of the figures and the policy
    promise: str = ""  # of a certified lossy policy
    twin: str = ""  # inputs and outputs of the ONNX twin
    use: Sequence[str] = ()  # further commands

    def json_bytes(self) -> bytes:
        """`report.json`: canonical JSON."""
        return canonical_json(self.data.model_dump(mode="json")).encode()

    def evidence(self, trace_digest: str, fitted_on: Sequence[str]) -> Evidence:
        """The evidence of the manifest; see `Fit` for `fitted_on`."""
        splits = {
            side: SplitSize(num_prompts=prompts, num_rounds=rounds)
            for side, (prompts, rounds) in self.splits.items()
        }
        metrics = {}
        for name, found in self.metrics.items():
            if isinstance(found, Interval):
                over = [*splits.values()][-1].num_prompts
                metrics[name] = Metric.of(found.value, found.low, found.high, num_prompts=over)
            elif isinstance(found, Metric):
                metrics[name] = found
            else:
                metrics[name] = Metric.of(found, None, None)
        return Evidence.of_splits(trace_digest, splits, metrics, prompt_marks(fitted_on))

    def card(self, policy: Policy, pair: PairFingerprint, trace_digest: str) -> str:
        """`README.md` of the artifact."""
        lines = map(cards.cell, (self.verdict, *self.summary))
        use = cards.use_block(pair, *self.use, lossless=policy.lossless)
        limits = "\n".join(f"- {line}" for line in self.limits)
        sections = (
            cards.head(self.title, self.what, policy, pair),
            *([self.promise] if self.promise else []),
            "## Evidence\n\n" + cards.bullets(f"traces `{trace_digest}`", *lines),
            *(_markdown(table) for table in self.tables),
            f"## Use\n\n{use} {self.twin}".rstrip(),
            f"## Limits\n\n{limits}\n{cards.FIXTURE_LINE}",
        )
        return "\n\n".join(sections) + "\n"

    def parts(self) -> list[Any]:
        """The verdict, the tables, then the summary, for a terminal."""
        return [self.verdict, *self.tables, *self.summary]


def _markdown(table: Table) -> str:
    rows = [[cards.cell(text) for text in row] for row in table.rows]
    legend = f"\n\n{table.legend}." if table.legend else ""
    return f"## {table.title}\n\n{cards.table(table.columns, rows)}{legend}"


# --------------------------------------------------------------------------- the artifact


@dataclass(frozen=True)
class Fit(Generic[Data]):
    """A fitted policy and its report."""

    policy: Policy
    report: FitReport[Data]
    fitted_on: Sequence[str]  # ids of the prompts that it was fitted to or chosen on
    check_twin: Callable[[bytes], None] | None = None
    """Raises `ArtifactError` if an ONNX twin, given as bytes, differs from the policy on held-out
    rows; required for a policy with a twin."""
    notes: Sequence[str] = ()  # lines about the data, for the terminal only

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
    snapshots: Sequence[str] = (),
) -> Artifact:
    """Writes the artifact of a fit, after checking its twin.

    Args:
        trace_digest: `sha256:<hex>` of the data that it was fitted to.
        domain: the conditions of the evidence; None if unknown.
        snapshots: of each trace set that it was fitted to.

    Raises:
        ArtifactError: E_TWIN if the twin decides differently; nothing is written.
        OutputError: the place cannot be written, or holds something else.
    """
    model, report = twin_bytes(fit.policy), fit.report
    if model is not None:
        if fit.check_twin is None:
            raise InvariantError(
                f"a fit of {fit.policy.name} needs a check of its ONNX twin",
                hint="give check_twin",
            )
        fit.check_twin(model)
    origin = Origin(
        pair=pair,
        evidence=report.evidence(trace_digest, fit.fitted_on),
        fit={"kind": report.kind, **report.config},
        domain=domain,
    )
    return save_artifact(
        folder,
        fit.policy,
        origin.of_sets(snapshots),
        card=cards.with_domain(report.card(fit.policy, pair, trace_digest), domain),
        report=report.json_bytes(),
    )


def check_twin(
    model: bytes, rows: Tensor, wanted: Mapping[Port, Tensor], tolerance: float = 0.0
) -> None:
    """Compares the decisions of an ONNX twin with the policy's, on held-out rows.

    Args:
        rows: float32 `[n]` or `[n, F]`.
        wanted: `[n]` for each output of the twin.
        tolerance: absolute and relative.
    """
    for port, decided in wanted.items():
        found = TwinSession(model, port, rows.device)(rows)
        differs = ~found.isclose(decided, rtol=tolerance, atol=tolerance)
        if differs.any():
            raise ArtifactError(
                "E_TWIN",
                "ONNX twin",
                f"it decides differently from the rule on {int(differs.sum())} of {len(rows)} "
                f"held-out rows, first on {rows[differs][0].numpy()!r}",
                hint="report this policy and the onnxruntime version; nothing was written",
            )
