"""Stopping shapes and shared budgets in the loop: plain decoding's text, and bounds kept."""

from __future__ import annotations

from functools import cache

import pytest

from specctl.errors import UsageError
from specctl.policy import Policy, StepCost
from specctl.runtime.policy_spec import resolve_policy
from specctl.runtime.requests import Completion
from tests.runtime.toy import toy_requests
from tests.runtime.toy_loops import Watcher, decode, loop_of

COSTS = StepCost(token_counts=(1, 8, 16, 24), step_us=(100.0, 104.0, 112.0, 125.0))
TREE = "eagle2:depth=3:top_k=3:num_tokens=10"
# The toy drafter is flat, about 9 % for its best token: thresholds stand inside its range.
SHAPES = {
    "confidence": "confidence:threshold=0.089:window=6",
    "survival stop": "stop:signal=survival:threshold=0.0008:window=6",
    "entropy": "stop:signal=entropy:threshold=4.18:window=6",
    "svip": "svip:threshold=2.043:window=6",
    "adaedl": "adaedl:threshold=0.0867:window=6",
    "ddd": "ddd:depth=4:top_k=3:num_tokens=10:check_levels=1/2/3:min_beam_logp=-1.75",
    "threshold": "threshold:depth=4:top_k=4:min_prob=0.007",
    "opt_tree": "opt_tree:depth=4:top_k=4:num_tokens=8:min_gain=0.03",
}
BUDGETS = {
    "survival, fixed": f"{TREE}+survival:max_tokens=14",
    "survival, by rate": f"{TREE}+survival",
    "marginal": f"{TREE}+marginal:tokens_per_s=40000",
    "both": f"{SHAPES['svip']}+survival:max_tokens=9",
}


def policy_of(spec: str) -> Policy:
    return resolve_policy(spec, step_cost=COSTS).policy


@cache
def decoded(spec: str, batch_size: int) -> tuple[dict[str, Completion], Watcher]:
    """Six requests in batches of that size, decoded once for all who ask."""
    watcher = Watcher()
    return decode(
        policy_of(spec), toy_requests(6), batch_size=batch_size, observer=watcher
    ), watcher


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[int, ...]]:
    done = decode(policy_of("ar"), toy_requests(6))
    return {request_id: completion.token_ids for request_id, completion in done.items()}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("spec", [*SHAPES.values(), *BUDGETS.values()])
def test_text_is_that_of_plain_decoding(
    spec: str, batch_size: int, plain: dict[str, tuple[int, ...]]
) -> None:
    done, watcher = decoded(spec, batch_size)
    assert {request_id: c.token_ids for request_id, c in done.items()} == plain
    assert sum(int(r.num_accepted.sum()) for r in watcher.records) > 0
    sizes = {n for r in watcher.records for n in (r.submitted >= 0).sum(1).tolist()}
    depths = {d for r in watcher.records for d in r.offered_depth.tolist()}
    if spec in SHAPES.values():
        assert len(depths) > 1, "a shape that never adapts proves nothing"
    elif batch_size > 1:
        assert len(sizes) > 1, "a budget that never binds proves nothing"


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_a_request_is_treated_alike_in_any_batch(spec: str) -> None:
    (alone, _), (together, _) = decoded(spec, 1), decoded(spec, 4)
    for request_id, done in alone.items():
        assert together[request_id].metrics.calls == done.metrics.calls
        assert together[request_id].metrics.verified_tokens == done.metrics.verified_tokens


@pytest.mark.parametrize("max_tokens", [4, 5, 14, 30])
def test_a_batch_never_verifies_more_than_its_budget(max_tokens: int) -> None:
    watcher = Watcher()
    policy = policy_of(f"{TREE}+survival:max_tokens={max_tokens}")
    decode(policy, toy_requests(7), batch_size=4, observer=watcher)
    for record in watcher.records:
        verified = int((record.submitted >= 0).sum())
        assert verified == min(max_tokens, 10 * len(record.requests))
        assert bool((record.submitted[:, 0] == 0).all()), "every root is verified"


def test_fewer_tokens_than_requests_are_refused() -> None:
    policy = policy_of("chain+survival:max_tokens=3")
    loop_of(policy, batch_size=3)
    with pytest.raises(UsageError, match="at least the batch size, 4"):
        loop_of(policy, batch_size=4)
