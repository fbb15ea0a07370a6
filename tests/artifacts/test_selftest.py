"""The self-test: what a policy learned must answer stored rows as it did when it was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specctl.artifacts.selftest import FOUND, GIVEN, NUM_ROWS, check_selftest, selftest_tensors
from specctl.errors import ArtifactError, InvariantError
from specctl.policy import EntropyBins, Policy, ScoredTree, SparseGates
from tests.artifacts.conftest import refused
from tests.artifacts.examples import FFN, POLICIES
from tests.policy.scorers import SCORED_POLICIES, copy_table, random_network

LEARNED = EntropyBins | SparseGates | ScoredTree


def varied(name: str, **changes: Any) -> Policy:
    policy = POLICIES[name]
    return policy.model_copy(update={"shape": policy.shape.model_copy(update=changes)})


def scored(scorer: Any) -> Policy:
    return Policy(shape=ScoredTree(scorer=scorer, beta=0.01))


TABLE = copy_table()
OTHERS: dict[str, tuple[Policy, Policy]] = {
    "other edges": (
        POLICIES["hetero"], varied("hetero", edges=(0.1, 1.3, 5.0, 8.0, 9.0, 12.0, 15))
    ),
    "another bar": (POLICIES["echo"], varied("echo", thresholds=(0.3, 0.3))),
    "another gate": (POLICIES["echo"], varied("echo", gate_levels=(1, 5))),
    "another weight": (POLICIES["c2t_ffn"], scored(FFN.model_copy(update={"b2": (-1.3,)}))),
    "another cell": (
        scored(TABLE),
        scored(TABLE.model_copy(update={
            "log_odds": tuple(tuple(one + 1 for one in row) for row in TABLE.log_odds)
        })),
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", [*POLICIES.values(), *SCORED_POLICIES.values()])
def test_answers_are_a_function_of_the_policy_and_pass(policy: Policy) -> None:
    stored, again = selftest_tensors(policy), selftest_tensors(policy)
    assert stored.keys() == ({GIVEN, FOUND} if isinstance(policy.shape, LEARNED) else set())
    assert all(len(stored[name]) == NUM_ROWS for name in stored)
    assert all(np.array_equal(stored[name], again[name]) for name in stored)
    check_selftest(policy, stored)


@pytest.mark.parametrize("name", OTHERS)
def test_a_policy_that_learned_something_else_is_refused(name: str) -> None:
    policy, other = OTHERS[name]
    refused("E_SELFTEST", check_selftest, other, selftest_tensors(policy))


def test_a_learned_family_without_a_self_test_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(POLICIES["ar"].shape), "learned", ("weights",))
    with pytest.raises(InvariantError, match="no self-test for weights"):
        selftest_tensors(POLICIES["ar"])


def test_a_machine_that_compares_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value on an edge goes to the bin below it; a library that puts it above is refused."""
    stored = selftest_tensors(POLICIES["hetero"])
    monkeypatch.setattr(
        "specctl.artifacts.selftest.entropy_bin",
        lambda phi, edges: torch.bucketize(phi, edges, right=True),
    )
    with pytest.raises(ArtifactError, match="E_SELFTEST"):
        check_selftest(POLICIES["hetero"], stored)


def test_rounding_of_another_machine_passes_and_another_weight_does_not() -> None:
    """A network adds in an order of the machine's own: 1e-6 nats are its rounding."""
    for seed in range(8):
        network = random_network(seed)
        stored = selftest_tensors(scored(network))
        for change, is_same in ((1e-6, True), (1e-2, False)):
            near = scored(network.model_copy(update={"b2": (network.b2[0] + change,)}))
            if is_same:
                check_selftest(near, stored)
            else:
                refused("E_SELFTEST", check_selftest, near, stored)
