"""ONNX twins decide as the rules do, on every float32 that matters, and are plain graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.features import SUFFIX_TOKENS
from specctl.policy import (
    AcceptanceTable,
    EntropyBins,
    Policy,
    ScoredTree,
    Scorer,
    SparseGates,
    StaticTree,
)
from specctl.policy.echo import log_threshold, stop_levels
from specctl.policy.hetero import entropy_bin, entropy_bins_shape
from specctl.policy.scorers import build_log_odds
from specctl.runtime.twins import SCORER, Port, TwinSession
from tests.artifacts.examples import FFN, HETERO
from tests.policy.scorers import copy_table, random_network

BINS = {
    "paper": HETERO,
    "many": EntropyBins(base=StaticTree(), edges=tuple(0.01 * i for i in range(1, 256))),
    "around zero": EntropyBins(base=StaticTree(), edges=(-0.5, 0.0, 0.1, 1e-3 + 0.1)),
    "capped": EntropyBins(base=StaticTree(), edges=(1.0, 2.0), cap_tokens=True, index_base=1),
}
GATES = [
    SparseGates(gate_levels=(1, 4), thresholds=(0.3, 0.05)),
    SparseGates(gate_levels=(1, 2, 5, 8), thresholds=(0.0, 0.5, 1.0, 0.1)),
]
SCORERS = {"network": FFN, "48 hidden": random_network(3, hidden=48), "table": copy_table()}
TWINS = {
    **{name: Policy(shape=shape) for name, shape in BINS.items()},
    **{str(shape.gate_levels): Policy(shape=shape) for shape in GATES},
    **{name: Policy(shape=ScoredTree(scorer=one, beta=0.1)) for name, one in SCORERS.items()},
}
OPERATORS = {
    *("Unsqueeze", "Less", "Cast", "ReduceSum", "Gather", "ArgMax", "ReduceMax", "Mul"),
    *("Gemm", "Relu", "Reshape", "Sigmoid", "Add"),
}

GATE_PORT = Port("gate_logp", "stopped_at", torch.int64)
CPU = torch.device("cpu")


def asked(shape: Any, port: Port, given: np.ndarray) -> np.ndarray:
    model = twin_bytes(Policy(shape=shape))
    assert model is not None
    found: np.ndarray = TwinSession(model, port, CPU)(torch.from_numpy(given)).numpy()
    return found


def planned(shape: EntropyBins, phi: np.ndarray) -> list[np.ndarray]:
    ports = (Port("phi", name, torch.int64) for name in ("bin", "depth", "num_tokens"))
    return [asked(shape, port, phi) for port in ports]


def around(values: np.ndarray) -> list[np.ndarray]:
    """Each value, the float32 below and the one above."""
    sides = [np.nextafter(values, np.float32(side)) for side in (-np.inf, np.inf)]
    return [values, *sides]


@pytest.mark.parametrize("policy", TWINS.values(), ids=TWINS.keys())
def test_a_twin_is_a_plain_graph_of_fixed_bytes(policy: Policy) -> None:
    data = twin_bytes(policy)
    assert data is not None
    model = onnx.load_from_string(data)
    assert data == twin_bytes(policy)
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.graph.node} <= OPERATORS
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    assert not any(tensor.external_data for tensor in model.graph.initializer)


@pytest.mark.parametrize("shape", BINS.values(), ids=BINS.keys())
def test_bins_equal_the_rule(shape: EntropyBins) -> None:
    """10^5 random Φ, every edge and its two float32 neighbours, and the ends of the line."""
    random = np.random.default_rng(0).gamma(2.0, 2.5, 10**5).astype(np.float32)
    ends = np.float32([0.0, -0.0, 1e-45, -np.inf, np.inf, 3.4e38, -3.4e38])
    phi = np.concatenate([random, *around(np.float32(shape.edges)), ends])
    rule = entropy_bins_shape(shape, CPU)
    bins = entropy_bin(torch.from_numpy(phi), rule.edges)
    wanted = (bins, rule.bin_depths[bins], rule.bin_tokens[bins])
    for got, want in zip(planned(shape, phi), wanted, strict=True):
        np.testing.assert_array_equal(got, want.numpy())
    assert [part.shape for part in planned(shape, np.empty(0, np.float32))] == [(0,)] * 3


@pytest.mark.parametrize("shape", GATES, ids=lambda shape: str(shape.gate_levels))
def test_gates_equal_the_rule(shape: SparseGates) -> None:
    """Thresholds, their neighbours in float32, and random log-probabilities."""
    bars = np.array([log_threshold(p) for p in shape.thresholds], np.float32)
    bars = np.where(np.isfinite(bars), bars, np.float32(-50.0))
    choices = np.stack([*around(bars), np.zeros_like(bars)])
    grid = np.stack(np.meshgrid(*choices.T, indexing="ij"), -1).reshape(-1, len(bars))
    drawn = np.random.default_rng(0).exponential(1.5, (1000, len(bars)))
    given = np.concatenate([grid, -drawn]).astype(np.float32)
    wanted = stop_levels(shape, torch.from_numpy(given)).numpy()
    assert np.array_equal(asked(shape, GATE_PORT, given), wanted)
    closing = {level for level, p in zip(shape.gate_levels, shape.thresholds, strict=True) if p > 0}
    assert closing <= set(wanted.tolist())


def nodes(width: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 3, (4000, width)).astype(np.float32)


def both(scorer: Scorer) -> tuple[np.ndarray, np.ndarray]:
    x = nodes(len(scorer.features))
    if isinstance(scorer, AcceptanceTable):
        on_edges = np.concatenate(around(np.float32(scorer.edges)))
        logp = np.concatenate([x[:, 0], np.tile(on_edges, 9)])
        copied = np.arange(len(logp)) // len(on_edges) % 9 - SUFFIX_TOKENS
        x = np.stack([logp, copied], 1).astype(np.float32)
    found = asked(ScoredTree(scorer=scorer, beta=0.1), SCORER, x)
    return found, build_log_odds(scorer)(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize("name", SCORERS)
def test_scorers_equal_the_rule(name: str) -> None:
    found, wanted = both(SCORERS[name])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert np.ptp(wanted) > 0.5
