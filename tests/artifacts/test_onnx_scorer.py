"""The twins of scorers say what the rule says, on every float32 that matters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from specctl.artifacts.onnx_scorer import OPERATORS
from specctl.artifacts.onnx_twin import (
    ALLOWED_OPERATORS,
    twin_bytes,
    twin_decisions,
    twin_log_odds,
)
from specctl.errors import UsageError
from specctl.policy.records import Policy, ScoredTree, Scorer, TreesScorer
from specctl.policy.scoring import build_log_odds
from tests.artifacts.examples import FFN, POLICIES, TREES, write_artifact
from tests.policy.scorers import FEATURES, random_network, random_trees

SCORERS = {
    "network": FFN,
    "48 hidden": random_network(3, hidden=48),
    "stump and a leaf": TREES,
    "one leaf": random_trees(0, 1, 1),
    "100 trees": random_trees(1, 100, 31),
}


def on_a_grid(scorer: TreesScorer) -> TreesScorer:
    """Leaves that add up without rounding, as `fit gbdt` exports them."""
    values = tuple(round(value * 2**12) / 2**12 for value in scorer.value)
    return scorer.model_copy(update={"value": values})


def twin_of(scorer: Scorer) -> bytes:
    model = twin_bytes(Policy(shape=ScoredTree(scorer=scorer, beta=0.1)))
    assert model is not None
    return model


def probes(width: int) -> np.ndarray:
    """Random nodes; the grid of the random trees' thresholds, and its float32 neighbours."""
    draws = np.random.default_rng(0)
    grid = draws.integers(-5, 6, (4000, width)).astype(np.float32) / 4
    around = [np.nextafter(grid, np.float32(side)) for side in (-np.inf, np.inf)]
    return np.concatenate([draws.normal(0, 3, (4000, width)).astype(np.float32), grid, *around])


@pytest.mark.parametrize("name", SCORERS)
def test_twin_equals_rule(name: str) -> None:
    scorer = SCORERS[name]
    x = probes(len(scorer.features))
    model = twin_of(scorer)
    wanted = build_log_odds(scorer)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(twin_log_odds(model, x), wanted, rtol=1e-5, atol=1e-5)
    assert np.ptp(wanted) > 0.5 or name == "one leaf"


def test_trees_on_a_grid_equal_the_rule_bit_for_bit() -> None:
    scorer = on_a_grid(random_trees(1, 100, 31))
    x = probes(len(FEATURES))
    model = twin_of(scorer)
    wanted = build_log_odds(scorer)(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(twin_log_odds(model, x), wanted)


def test_a_twin_of_other_leaves_is_another_file() -> None:
    scorer = random_trees(1, 3, 5)
    other = scorer.model_copy(update={"value": (*scorer.value[:-1], scorer.value[-1] + 1)})
    assert twin_of(scorer) != twin_of(other)
    assert twin_of(scorer) == twin_of(scorer)


def test_file_and_bytes_say_the_same(tmp_path: Path) -> None:
    file = write_artifact(tmp_path / "a", "c2t_ffn") / "policy.onnx"
    x = probes(3)[:50]
    np.testing.assert_array_equal(twin_log_odds(file, x), twin_log_odds(file.read_bytes(), x))
    assert twin_log_odds(file, x[:0]).shape == (0,)


@pytest.mark.parametrize("name", ["c2t_ffn", "c2t_trees"])
def test_twin_is_a_plain_graph(name: str) -> None:
    found = twin_bytes(POLICIES[name])
    assert found is not None
    model = onnx.load_from_string(found)
    onnx.checker.check_model(model, full_check=True)
    used = {node.op_type for node in model.graph.node}
    assert used <= set(OPERATORS) <= ALLOWED_OPERATORS
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx.ml"}
    assert not model.functions
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    assert [value.name for value in model.graph.output] == ["log_odds", "prob"]


@pytest.mark.parametrize(
    "x",
    [np.full((2, 3), np.nan, np.float32), np.zeros((2, 3)), np.zeros(3, np.float32)],
    ids=["NaN", "float64", "vector"],
)
def test_other_input_is_refused(x: np.ndarray) -> None:
    model = twin_bytes(POLICIES["c2t_ffn"])
    assert model is not None
    with pytest.raises(UsageError, match="float32"):
        twin_log_odds(model, x)


def test_nothing_that_loops_is_allowed() -> None:
    assert set(ALLOWED_OPERATORS).isdisjoint({"If", "Loop", "Scan", "Constant", "SequenceMap"})
    model = twin_bytes(POLICIES["hetero"])
    assert model is not None
    assert len(twin_decisions(model, np.zeros(1, np.float32))) == 3
