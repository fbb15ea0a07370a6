"""The self-test: what a policy decided when it was written, it must decide when loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specctl.artifacts import selftest
from specctl.artifacts.selftest import World, check_selftest, selftest_tensors
from specctl.errors import ArtifactError
from specctl.policy import EntropyBins, Policy, ScoredTree, StaticTree
from tests.artifacts.conftest import refused
from tests.artifacts.examples import FFN, HETERO, POLICIES
from tests.policy.scorers import SCORED_POLICIES, copy_table, random_network

TABLE = copy_table()
UNSURE = tuple(tuple(-odds for odds in row) for row in TABLE.log_odds)
SORT, TOPK = torch.Tensor.sort, torch.Tensor.topk


def varied(name: str, part: str, **changes: Any) -> Policy:
    """An example with one part changed."""
    policy = POLICIES[name]
    return policy.model_copy(update={part: getattr(policy, part).model_copy(update=changes)})


OTHERS: dict[str, tuple[str, Policy]] = {
    "other edges": ("hetero", varied("hetero", "shape", edges=(0.1, 1.3, 5.0, 8.0, 9.0, 12.0, 15))),
    "another plan": ("hetero", varied("hetero", "shape", cap_tokens=True)),
    "another bar": ("echo", varied("echo", "shape", thresholds=(0.3, 0.3))),
    "another gate": ("echo", varied("echo", "shape", gate_levels=(1, 5))),
    "another share": ("echo", varied("echo", "budget", max_tokens=50)),
    "another weight": (
        "c2t_ffn", Policy(shape=ScoredTree(scorer=FFN.model_copy(update={"b2": (-1.3,)}), beta=0.4))
    ),
    "another beta": ("c2t_ffn", varied("c2t_ffn", "shape", beta=0.6)),
    "another cell": (
        "survival",
        varied("survival", "shape", scorer=TABLE.model_copy(update={"log_odds": UNSURE})),
    ),
    "another size": ("eagle2", varied("eagle2", "shape", num_tokens=47)),
    "another chain": ("chain", varied("chain", "shape", num_draft_tokens=4)),
    "another budget": ("stop", varied("stop", "budget", max_tokens=6)),
    "another stop": ("stop", varied("stop", "shape", threshold=2.5)),
    "another rate": ("opt_tree", varied("opt_tree", "shape", min_gain=0.4)),
    "another probability": ("threshold", varied("threshold", "shape", min_prob=0.06)),
    "another theta": ("mars", varied("mars", "acceptance", theta=0.2)),
    "another window": ("adasd", varied("adasd", "shape", window=3)),
    "another clip": ("adasd", varied("adasd", "acceptance", max_threshold=0.0)),
}  # fmt: skip


@pytest.mark.parametrize("policy", [*POLICIES.values(), *SCORED_POLICIES.values()])
def test_decisions_are_a_function_of_the_policy_and_pass(policy: Policy) -> None:
    stored = selftest_tensors(policy)
    again = selftest_tensors(policy)
    assert all(np.array_equal(stored[name], again[name]) for name in stored | again)
    assert sum(array.nbytes for array in stored.values()) < 1 << 18
    check_selftest(policy, stored)


@pytest.mark.parametrize("name", OTHERS)
def test_a_policy_that_decides_otherwise_is_refused(name: str) -> None:
    """Each of these would be another policy under the same evidence."""
    of, other = OTHERS[name]
    refused("E_SELFTEST", check_selftest, other, selftest_tensors(POLICIES[of]))


def test_a_machine_that_compares_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a library that takes the unlikeliest child for the likeliest."""
    stored = selftest_tensors(POLICIES["eagle2"])
    monkeypatch.setattr(torch.Tensor, "sort", lambda values, *a, **k: SORT(-values, *a, **k))
    monkeypatch.setattr(torch.Tensor, "topk", lambda values, *a, **k: TOPK(-values, *a, **k))
    with pytest.raises(ArtifactError, match="E_SELFTEST"):
        check_selftest(POLICIES["eagle2"], stored)


@pytest.mark.parametrize("seed", range(selftest.MAX_SEEDS))
def test_a_world_is_the_same_on_every_machine(seed: int) -> None:
    """Its numbers lie on a grid far coarser than logarithms may differ; no two tokens are equal."""
    world = World.of_seed(seed, 4)
    for table in (world.draft_logits, world.target_logits, world.draft_logp, world.entropy):
        np.testing.assert_array_equal(table * 4096, (table * 4096).round())
    for logits in (world.draft_logits, world.target_logits):
        assert (logits.sort(1).values.diff(dim=1) > 0).all()
    assert (world.draft_ids.sort(1).values == torch.arange(64)).all()
    assert world.draft_logp.max() <= 0
    assert (world.draft_logp.diff(dim=1) <= 0).all()


def test_decisions_stay_where_scores_are_shaken() -> None:
    """A border of a network within float32's rounding would be another machine's choice."""
    for seed in range(8):
        policy = Policy(shape=ScoredTree(scorer=random_network(seed), beta=0.3, num_tokens=20))
        stored = selftest_tensors(policy)
        bias = (random_network(seed).b2[0] + 1e-6,)
        near = random_network(seed).model_copy(update={"b2": bias})
        check_selftest(policy.model_copy(update={"shape": policy.shape.model_copy(
            update={"scorer": near})}), stored)  # fmt: skip


@pytest.mark.parametrize(
    "scorer",
    [
        TABLE.model_copy(update={"log_odds": ((0.2,) * 6,) * 9}),
        FFN.model_copy(update={"w2": (0.0, 0.0)}),
        FFN.model_copy(update={"b1": (1e30, 1e30), "w2": (1e30, -1e30)}),
    ],
    ids=["equal cells", "deaf network", "sums that overflow"],
)
def test_a_scorer_that_says_nothing_is_refused(scorer: Any) -> None:
    policy = Policy(shape=ScoredTree(scorer=scorer, beta=0.01))
    stored = selftest_tensors(POLICIES["c2t_ffn"])
    refused("E_DEGENERATE", selftest_tensors, policy)
    refused("E_DEGENERATE", check_selftest, policy, stored)


def test_bins_with_one_plan_are_meant() -> None:
    """Without extension and at gamma 1 every bin gets the base tree: idle, and no error."""
    shape = EntropyBins(base=StaticTree(), edges=(1.0,), gammas=(1.0,), alpha=0)
    check_selftest(Policy(shape=shape), selftest_tensors(Policy(shape=shape)))
    assert shape != HETERO


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("std::bad_alloc"), "E_COST"), (MemoryError(), "E_COST"),
     (IndexError("out of range"), "E_SELFTEST"), (RuntimeError("shapes"), "E_SELFTEST")],
    ids=repr,
)  # fmt: skip
def test_failing_rules_refuse(error: Exception, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(selftest, "grow_tree", fail)
    refused(code, selftest_tensors, POLICIES["chain"])
