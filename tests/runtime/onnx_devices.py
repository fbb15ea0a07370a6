"""The devices that onnxruntime decides on, and the shapes that have something to decide."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import UsageError
from specctl.policy import EntropyBins, Policy, Shape, SparseGates, StaticTree
from specctl.runtime import twins
from specctl.runtime.twins import TwinSession
from tests.artifacts.examples import HETERO
from tests.policy.scorers import SCORED

NEEDS_ONNXRUNTIME = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="no onnxruntime")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))
TREE = StaticTree(depth=5, top_k=6, num_tokens=24)
SHAPES: dict[str, Shape] = {
    "hetero": EntropyBins(base=TREE, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)),
    "echo": SparseGates(depth=5, gate_levels=(1, 2), thresholds=(0.5, 0.3), num_tokens=24),
    "network": SCORED["c2t joint"],
    "table": SCORED["c2t conditional"],
}
"""Shapes with a twin, whose trees differ in size between rounds of the embedded pair."""


def open_device(name: str) -> torch.device:
    """A device; a test is skipped where onnxruntime cannot use it."""
    if name == "cpu":
        return torch.device(name)
    found = torch.device("cuda", torch.cuda.current_device())
    try:
        open_bins(found)
    except UsageError as error:
        pytest.skip(f"onnxruntime without CUDA: {error}")
    return found


def open_bins(device: torch.device) -> TwinSession:
    model = twin_bytes(Policy(shape=HETERO))
    assert model is not None
    return TwinSession(model, twins.BINS, device)
