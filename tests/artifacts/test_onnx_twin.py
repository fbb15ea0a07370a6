"""The ONNX twin decides as the rule does, on every float32 that matters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from specctl.artifacts.onnx_twin import twin_bytes, twin_decisions
from specctl.errors import UsageError
from specctl.policy.hetero import entropy_bin, entropy_bins_shape
from specctl.policy.records import EntropyBins, Policy, StaticTree
from tests.artifacts.examples import HETERO, POLICIES, write_artifact

SHAPES = {
    "paper": HETERO,
    "one edge": EntropyBins(base=StaticTree(depth=3), edges=(1.0,), gammas=(0.5,)),
    "many": EntropyBins(base=StaticTree(), edges=tuple(0.01 * i for i in range(1, 256))),
    "around zero": EntropyBins(base=StaticTree(), edges=(-0.5, 0.0, 0.1, 1e-3 + 0.1)),
    "capped": EntropyBins(base=StaticTree(), edges=(1.0, 2.0), cap_tokens=True, index_base=1),
}


def probes(shape: EntropyBins) -> np.ndarray:
    """10^5 random Φ, every edge and its two float32 neighbours, and the ends of the line."""
    edges = np.float32(shape.edges)
    around = [np.nextafter(edges, np.float32(side)) for side in (-np.inf, np.inf)]
    random = np.random.default_rng(0).gamma(2.0, 2.5, 10**5).astype(np.float32)
    ends = np.float32([0.0, -0.0, 1e-45, -np.inf, np.inf, 3.4e38, -3.4e38])
    return np.concatenate([random, edges, *around, ends])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_twin_equals_rule(shape: EntropyBins) -> None:
    phi, rule = probes(shape), entropy_bins_shape(shape, torch.device("cpu"))
    bins = entropy_bin(torch.from_numpy(phi), rule.edges)
    model = twin_bytes(Policy(shape=shape))
    assert model is not None
    found = twin_decisions(model, phi)
    for got, want in zip(found, (bins, rule.bin_depths[bins], rule.bin_tokens[bins]), strict=True):
        np.testing.assert_array_equal(got, want.numpy())


def test_equal_goes_left_and_the_next_float32_goes_right() -> None:
    edges = np.float32(HETERO.edges)
    model = twin_bytes(POLICIES["hetero"])
    assert model is not None
    assert twin_decisions(model, edges)[0].tolist() == list(range(7))
    above = np.nextafter(edges, np.float32(np.inf))
    assert twin_decisions(model, above)[0].tolist() == list(range(1, 8))


def test_file_and_bytes_decide_alike(tmp_path: Path) -> None:
    folder, phi = write_artifact(tmp_path / "a"), np.float32([0.0, 3.0, 50.0])
    from_file = twin_decisions(folder / "policy.onnx", phi)
    from_bytes = twin_decisions((folder / "policy.onnx").read_bytes(), phi)
    np.testing.assert_array_equal(from_file, from_bytes)


def test_no_rows_give_no_decisions() -> None:
    model = twin_bytes(POLICIES["hetero"])
    assert model is not None
    assert [part.shape for part in twin_decisions(model, np.empty(0, np.float32))] == [(0,)] * 3


@pytest.mark.parametrize(
    "phi",
    [np.float32([1.0, np.nan]), np.array([1.0]), np.zeros((2, 2), np.float32)],
    ids=["NaN", "float64", "matrix"],
)
def test_other_input_is_refused(phi: np.ndarray) -> None:
    model = twin_bytes(POLICIES["hetero"])
    assert model is not None
    with pytest.raises(UsageError, match="float32"):
        twin_decisions(model, phi)


def test_twin_is_a_plain_graph() -> None:
    model = onnx.load_from_string(twin_bytes(POLICIES["hetero"]))
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.graph.node} == {
        "Unsqueeze",
        "Less",
        "Cast",
        "ReduceSum",
        "Gather",
    }
    assert not model.functions
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    assert [value.name for value in model.graph.output] == ["bin", "depth", "num_tokens"]
