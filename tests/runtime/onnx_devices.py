"""The devices that onnxruntime decides on, and the shapes that it decides for."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import UsageError
from specctl.policy import Policy, ScoredTree
from specctl.runtime.twins import Port, TwinSession
from tests.artifacts.examples import HETERO
from tests.policy.scorers import SCORED

NEEDS_ONNXRUNTIME = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="no onnxruntime")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))
SHAPES: dict[str, ScoredTree] = {
    "network": SCORED["c2t joint"],
    "table": SCORED["c2t conditional"],
}
"""Shapes with a learned scorer, whose trees differ in size between rounds of the embedded pair."""
BINS = Port("phi", "bin", torch.int64)
"""Of the twin of `HETERO`, by which sessions are tested."""


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
    return TwinSession(model, BINS, device)
