"""The ONNX twin of ECHO's gates equals the rule, on thresholds and one step beside them too."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from specctl.artifacts.onnx_gates import OPERATORS
from specctl.artifacts.onnx_twin import twin_bytes, twin_stops
from specctl.policy import Policy
from specctl.policy.gates import log_threshold, stop_levels
from specctl.policy.records import SparseGates

SHAPES = [
    SparseGates(gate_levels=(2,), thresholds=(0.25,)),
    SparseGates(gate_levels=(1, 4), thresholds=(0.3, 0.05)),
    SparseGates(gate_levels=(1, 2, 5, 8), thresholds=(0.0, 0.5, 1.0, 0.1)),
]


def hard_cases(shape: SparseGates) -> np.ndarray:
    """Thresholds, their neighbours in float32, and random log-probabilities, `[n, G]`."""
    bars = np.array([log_threshold(p) for p in shape.thresholds], np.float32)
    bars = np.where(np.isfinite(bars), bars, np.float32(-50.0))
    steps = [np.nextafter(bars, np.float32(to), dtype=np.float32) for to in (-np.inf, np.inf)]
    choices = np.stack([bars, *steps, np.zeros_like(bars)])
    grid = np.stack(np.meshgrid(*choices.T, indexing="ij"), -1).reshape(-1, len(bars))
    drawn = np.random.default_rng(0).exponential(1.5, (1000, len(bars)))
    return np.concatenate([grid, -drawn]).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.gate_levels))
def test_twin_equals_the_rule(shape: SparseGates) -> None:
    given = hard_cases(shape)
    wanted = stop_levels(shape, torch.from_numpy(given)).numpy()
    assert np.array_equal(twin_stops(twin_bytes(Policy(shape=shape)), given), wanted)
    closing = {level for level, p in zip(shape.gate_levels, shape.thresholds, strict=True) if p > 0}
    assert closing <= set(wanted.tolist())


def test_twin_is_a_plain_graph() -> None:
    model = onnx.load_from_string(twin_bytes(Policy(shape=SHAPES[1])))
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.graph.node} == set(OPERATORS)
    assert {node.domain for node in model.graph.node} == {""}
