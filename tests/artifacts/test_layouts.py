"""The bounds of tensors are those of the records: what is lawful passes, no more is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from specctl.artifacts import limits, tensors
from specctl.artifacts.layouts import LAYOUTS, check_layouts
from specctl.artifacts.limits import MAX_FEATURES
from specctl.artifacts.tensors import join_policy, policy_tensors, policy_tree
from specctl.errors import ArtifactError
from specctl.policy.base import MAX_DEPTH
from specctl.policy.records import (
    Calibration,
    EntropyBins,
    FfnScorer,
    Policy,
    Record,
    ScoredTree,
    SparseGates,
    StaticTree,
    TreesScorer,
)
from specctl.policy.scorers import MAX_HIDDEN, MAX_TREE_NODES
from specctl.policy.shapes import MAX_EDGES
from tests.artifacts.attacks import checked
from tests.artifacts.hostile.policies import stumps
from tests.policy.scorers import SCORED_POLICIES, random_network

LARGEST = {
    "edges": Policy(shape=EntropyBins(base=StaticTree(), edges=tuple(range(MAX_EDGES)))),
    "gates": Policy(
        shape=SparseGates(
            depth=MAX_DEPTH,
            gate_levels=tuple(range(1, MAX_DEPTH + 1)),
            thresholds=(0.5,) * MAX_DEPTH,
        )
    ),
    "trees": Policy(shape=ScoredTree(scorer=stumps(MAX_TREE_NODES // 3), beta=0.1)),
    **SCORED_POLICIES,
}


def kinds(record: type[Record] = Record) -> Iterator[type[Record]]:
    for kind in record.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_fitted_field_has_a_layout_and_nothing_else_has() -> None:
    holders = {
        EntropyBins: "shape.",
        SparseGates: "shape.",
        FfnScorer: "shape.scorer.",
        TreesScorer: "shape.scorer.",
        Calibration: "budget.calibration.",
    }
    assert {kind for kind in kinds() if kind.learned} == holders.keys()
    paths = {prefix + name for kind, prefix in holders.items() for name in kind.learned}
    assert paths == LAYOUTS.keys()


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_lawful_records_pass(name: str) -> None:
    policy = LARGEST[name]
    found = policy_tensors(policy)
    check_layouts(found)
    assert join_policy(policy_tree(policy), found) == policy


def test_no_record_may_hold_more() -> None:
    """A network wider than its layout is a record, but costs too much: `check_cost`."""
    with pytest.raises(ValidationError):
        EntropyBins(base=StaticTree(), edges=tuple(range(MAX_EDGES + 1)))
    with pytest.raises(ValidationError):
        random_network(0, hidden=MAX_HIDDEN + 1)
    with pytest.raises(ValidationError):
        stumps(MAX_TREE_NODES // 3 + 1)
    with pytest.raises(ValidationError):
        Calibration(slopes=(1.0,) * (MAX_DEPTH + 1), intercepts=(0.0,) * (MAX_DEPTH + 1))
    assert max(layout.most for layout in LAYOUTS.values()) == MAX_TREE_NODES
    assert LAYOUTS["shape.scorer.mean"].most == MAX_FEATURES == limits.MAX_FEATURES


@pytest.mark.parametrize("path", LAYOUTS)
def test_one_element_more_is_refused_before_it_is_read(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS[path]
    monkeypatch.setattr(tensors, "canonical_json", lambda _: pytest.fail("became JSON"))
    sizes = [1] * (layout.ndim - 1)
    for size, code in ((layout.most + 1, "E_COST"), (1, "E_WEIGHTS")):
        axes = [*sizes, size] if code == "E_COST" else [*sizes, 1, size]
        with pytest.raises(ArtifactError) as caught:
            join_policy({}, {path: np.zeros(axes, layout.dtype)})
        assert path in str(checked(caught.value, code))
        assert ("axes" in caught.value.expected) == (code == "E_WEIGHTS")


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
@pytest.mark.parametrize("path", LAYOUTS)
def test_another_dtype_or_name_is_refused(path: str, dtype: type[Any]) -> None:
    named = {f"{path}2": np.zeros(1, dtype)}
    if LAYOUTS[path].dtype is not dtype:
        named = {path: np.zeros([1] * LAYOUTS[path].ndim, dtype)}
    with pytest.raises(ArtifactError) as caught:
        check_layouts(named)
    checked(caught.value, "E_WEIGHTS")
