"""Our own protobuf against Google's: the same bytes out, the same values in."""

from __future__ import annotations

import onnx
import pytest

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.policy.records import Policy, ScoredTree
from tests.artifacts.examples import POLICIES
from tests.policy.scorers import random_trees

TWINS = ("hetero", "c2t_ffn", "c2t_trees", "echo")
TREES = Policy(shape=ScoredTree(scorer=random_trees(1, 20, 9), beta=0.1))


@pytest.mark.parametrize("policy", [*(POLICIES[name] for name in TWINS), TREES])
def test_bytes_are_those_that_onnx_writes(policy: Policy) -> None:
    data = twin_bytes(policy)
    assert data is not None
    model = onnx.load_from_string(data)
    assert model.SerializeToString(deterministic=True) == data
    onnx.checker.check_model(model, full_check=True)
