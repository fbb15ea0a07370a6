"""Rules that ask the ONNX twin: the callable of a rule that decides is replaced, nothing else.

The graph is the one that `policy.onnx` of the artifact holds, from the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specctl.artifacts.onnx_twin import STOPPED_AT, twin_bytes
from specctl.errors import UsageError
from specctl.policy import (
    EntropyBins,
    Policy,
    RootOnly,
    ScoredTree,
    Shape,
    SparseGates,
    TreesScorer,
)
from specctl.policy.c2t import score_by
from specctl.policy.echo import Closes
from specctl.policy.hetero import BinOf
from specctl.policy.rules import ShapeRule
from specctl.policy.scorers import LogOdds
from specctl.runtime.decisions.session import Port, TwinSession

NEEDED = ("onnxruntime",)
BINS = Port("phi", "bin", torch.int64)
GATES = Port("gate_logp", STOPPED_AT, torch.int64)
SCORER = Port("features", "log_odds", torch.float32)


def by_twin(shape: Shape, rule: ShapeRule, device: torch.device) -> ShapeRule:
    """The rule with what it learned computed by onnxruntime; `ar` has nothing to decide.

    Raises:
        UsageError: see `decisions.decided_by`.
    """
    if isinstance(shape, RootOnly):
        return rule
    ask = _ASKING.get(type(shape))
    if ask is None:
        raise UsageError(
            f"decisions onnx, shape {shape.kind}",
            expected="a shape with an ONNX twin: hetero, c2t (gbdt too) or echo",
            found=f"{shape.kind}, which learned nothing that a twin could hold",
            fix="decide it by torch (--decisions torch)",
        )
    _check_installed()
    model = twin_bytes(Policy(shape=shape))
    assert model is not None
    return ask(shape, rule, model, device)


def _ask_bins(shape: EntropyBins, rule: Any, model: bytes, device: torch.device) -> ShapeRule:
    return replace(rule, bin_of=bins_by(TwinSession(model, BINS, device), len(shape.edges)))


def _ask_gates(shape: SparseGates, rule: Any, model: bytes, device: torch.device) -> ShapeRule:
    return replace(rule, closes=closes_by(TwinSession(model, GATES, device), shape.gate_levels))


def _ask_scorer(shape: ScoredTree, rule: Any, model: bytes, device: torch.device) -> ShapeRule:
    session = TwinSession(model, SCORER, device)
    log_odds = session if isinstance(shape.scorer, TreesScorer) else network_by(session)
    return replace(rule, score=score_by(shape.scorer.features, log_odds))


_ASKING: dict[type[Any], Callable[[Any, ShapeRule, bytes, torch.device], ShapeRule]] = {
    EntropyBins: _ask_bins,
    SparseGates: _ask_gates,
    ScoredTree: _ask_scorer,
}


def bins_by(session: TwinSession, num_edges: int) -> BinOf:
    """Bins by a twin. NaN, of which the twin says the first one, goes where the rule puts it."""

    def bin_of(value: Tensor) -> Tensor:
        return session(value).masked_fill_(value.isnan(), num_edges)

    return bin_of


def closes_by(session: TwinSession, levels: tuple[int, ...]) -> Closes:
    """Gates by a twin: asked at one gate with the others at log-probability 0, which none closes
    at, it names that gate's level or none."""

    def closes(confidence: Tensor, level: int) -> Tensor:
        given = confidence.new_zeros(len(confidence), len(levels))
        given[:, levels.index(level)] = confidence
        return session(given) == level

    return closes


def network_by(session: TwinSession) -> LogOdds:
    """Log-odds by the twin of a network.

    NaN stays NaN, which the round's guard must see. Whether a ReLU lets it through is up to the
    provider.
    """

    def log_odds(features: Tensor) -> Tensor:
        return session(features).masked_fill_(features.isnan().any(1), math.nan)

    return log_odds


def _check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(
            "decisions onnx",
            expected=" and ".join(NEEDED),
            found=f"{' and '.join(missing)} not installed",
            fix="install them, or decide by torch (--decisions torch)",
        )
