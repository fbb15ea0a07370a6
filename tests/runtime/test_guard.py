"""A policy that fails costs a round its shape and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.policy import (
    Chain,
    JointThreshold,
    Policy,
    Ratio,
    RootOnly,
    ScoredTree,
    Shape,
    SignalStop,
    StaticTree,
    SurvivalBudget,
    policy_digest,
)
from specctl.policy.rules import BaseShape
from specctl.runtime import runnable
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.runnable import fallback_policy
from tests.policy.scorers import steps
from tests.runtime.table import ALL_SEEDS, loop_texts, text_of
from tests.runtime.toy import Failing, Kept, loop_of, texts_of, toy_pair, toy_requests

pytestmark = pytest.mark.policy_faults
TREE = StaticTree(depth=4, top_k=3, num_tokens=12)
SHARED = Policy(shape=TREE, budget=SurvivalBudget(max_tokens=40))
FALLBACK = Policy(shape=StaticTree(depth=4, top_k=3, num_tokens=10))
"""Of `SHARED` in four slots: a quarter of the budget each."""


def break_shape(
    patch: pytest.MonkeyPatch, broken_one: Shape, method: str, fails: Callable[[], bool]
) -> None:
    """The rule of that shape fails in that method."""
    build = runnable.build_shape

    def broken(shape: Any, device: Any) -> Any:
        rule = build(shape, device)
        return Failing(rule, method, fails) if shape == broken_one else rule

    patch.setattr(runnable, "build_shape", broken)


def decode_by(policy: Policy, **options: Any) -> tuple[dict[str, Any], DecodeLoop, Kept]:
    kept = Kept()
    loop = loop_of(policy, batch_size=4, observer=kept, **options)
    done = {c.request.request_id: c for c in loop.run(toy_requests(6))}
    return done, loop, kept


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[int, ...]]:
    done, _, _ = decode_by(Policy(shape=RootOnly()))
    return {name: completion.token_ids for name, completion in done.items()}


@pytest.mark.parametrize("method", ["begin", "grow", "select"])
def test_a_shape_that_raises(
    method: str, plain: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(method)
    break_shape(monkeypatch, TREE, method, lambda: random.random() < 0.3)
    done, loop, kept = decode_by(SHARED)
    assert {name: c.token_ids for name, c in done.items()} == plain
    faults = loop.faults
    assert faults.last == "RuntimeError: a bug of the policy's"
    digests = [record.policy_digest for record in kept.records]
    assert digests.count(policy_digest(FALLBACK)) == faults.total > 0
    assert digests.count(policy_digest(SHARED)) == len(digests) - faults.total > 0
    taken = sum(c.metrics.fallback_calls for c in done.values())
    assert taken == sum(
        len(r.requests) for r in kept.records if r.policy_digest == policy_digest(FALLBACK)
    )


def test_the_law_holds_whenever_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """All coin cells, the policy failing in a third of its calls."""
    random, shape = Random(1), JointThreshold(depth=3, top_k=3, min_prob=0.2)
    break_shape(monkeypatch, shape, "grow", lambda: random.random() < 0.3)
    assert loop_texts(Policy(shape=shape)) == {seed: text_of(seed) for seed in ALL_SEEDS}


def test_scores_that_are_not_numbers(plain: dict[str, tuple[int, ...]]) -> None:
    scorer = steps("joint_prob", cuts=(0.2,), probs=(0.1, 0.9))
    shape = ScoredTree(scorer=scorer, beta=0.05, depth=3, first_top_k=3, second_top_k=3)
    loop = loop_of(Policy(shape=shape), batch_size=2)
    score, calls = loop.rules.shape.score, iter(range(10**6))  # type: ignore[attr-defined]

    def some_nan(pool: Any, start: int) -> Tensor:
        found = score(pool, start)
        return found.fill_(torch.nan) if next(calls) % 5 == 0 else found

    loop.rules.shape.score = some_nan  # type: ignore[attr-defined]
    done = texts_of(loop.run(toy_requests(6)))
    assert done == plain
    assert loop.faults.total > 0
    assert "a score is not a number in " in str(loop.faults.last)


def test_a_rule_that_cannot_learn_keeps_what_it_knew(
    plain: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseShape, "memory_size", 1, raising=False)
    break_shape(monkeypatch, TREE, "observe", lambda: True)
    policy = Policy(shape=TREE)
    loop = loop_of(policy, batch_size=4)
    loop.rules.shape.inner.memory_size = 1  # type: ignore[attr-defined]
    done = texts_of(loop.run(toy_requests(6)))
    assert done == plain
    assert loop.faults.total > 0
    assert sum(c.metrics.fallback_calls for c in loop.run([])) == 0


THRESHOLD = Policy(shape=JointThreshold(depth=2, top_k=2))
DRAWN = Policy(
    shape=SignalStop(signal="sqrt_entropy", threshold=1.2, window=9, keep_last=False),
    acceptance=Ratio(),
)


def shared_by(max_tokens: int) -> Policy:
    return Policy(shape=TREE, budget=SurvivalBudget(max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("policy", "batch_size", "wanted"),
    [
        (SHARED, 4, FALLBACK),
        (Policy(shape=Chain(num_draft_tokens=9)), 1, Policy(shape=Chain(num_draft_tokens=6))),
        (THRESHOLD, 1, Policy(shape=StaticTree(depth=2, top_k=2, num_tokens=7))),
        (shared_by(8), 4, Policy(shape=StaticTree(depth=1, top_k=3, num_tokens=2))),
        (shared_by(4), 4, None),
        (DRAWN, 1, Policy(shape=Chain(num_draft_tokens=9))),
    ],
)
def test_what_takes_over_fits_what_was_allocated(
    policy: Policy, batch_size: int, wanted: Policy | None
) -> None:
    rules = runnable.runnable(policy, toy_pair()[1], torch.device("cpu"), batch_size)
    assert fallback_policy(policy, rules, batch_size) == wanted
