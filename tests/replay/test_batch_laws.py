"""Simulated batches against replay, and against themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specctl.logs.tree_log import DenseLog
from specctl.policy import (
    Budget,
    Chain,
    EntropyBins,
    JointThreshold,
    OptTree,
    PerRequest,
    Policy,
    RootOnly,
    SignalStop,
    SurvivalBudget,
)
from specctl.replay.batch_simulation import Load, Simulation, simulate
from specctl.replay.metrics import LoadClock
from specctl.replay.rounds import Rounds, replay
from specctl.replay.submissions import Submissions, submissions_of
from tests.replay.logs import log_fixtures
from tests.replay.serving import TREE, linear

Made = dict[str, Submissions]
Alone = dict[str, Rounds]
NUM_PROMPTS = 5
PROMPT_TOKENS = 32
POLICIES = {
    "ar": Policy(shape=RootOnly()),
    "chain": Policy(shape=Chain(num_draft_tokens=3)),
    "eagle2": Policy(shape=TREE),
    "hetero": Policy(shape=EntropyBins(base=TREE, edges=(1.0, 1.5, 2.0))),
    "opt_tree": Policy(shape=OptTree(depth=4, top_k=3, num_tokens=9, min_gain=0.2)),
    "threshold": Policy(shape=JointThreshold(depth=4, top_k=3, min_prob=0.05, num_tokens=9)),
    "stop": Policy(shape=SignalStop(signal="confidence", threshold=0.5, window=4)),
}
LOADS = {
    "one": Load(1, num_requests=NUM_PROMPTS),
    "closed": Load(3, num_requests=NUM_PROMPTS),
    "open": Load(3, arrival_rate_per_s=60.0, num_requests=NUM_PROMPTS),
}

traces, log = log_fixtures(num_prompts=NUM_PROMPTS, depth=4, top_k=3)


def with_trees(log: DenseLog, *policies: Policy) -> list[Submissions]:
    """Submissions that any budget may share."""
    shared = [p.model_copy(update={"budget": SurvivalBudget(max_tokens=99)}) for p in policies]
    found = submissions_of(log, shared)
    return [replace(made, policy=policy) for made, policy in zip(found, policies, strict=True)]


@pytest.fixture(scope="module")
def prepared(log: DenseLog) -> Made:
    return dict(zip(POLICIES, with_trees(log, *POLICIES.values()), strict=True))


@pytest.fixture(scope="module")
def replayed(log: DenseLog) -> Alone:
    return dict(zip(POLICIES, replay(log, list(POLICIES.values())), strict=True))


def by_request(requests: Any, found: Any) -> list[list[tuple[int, int]]]:
    """(verified, accepted) round by round, of every request of the log."""
    rows = zip(found.verified.tolist(), found.accepted.tolist(), strict=True)
    rounds: list[list[tuple[int, int]]] = [[] for _ in range(NUM_PROMPTS)]
    for request, row in zip(requests.tolist(), rows, strict=True):
        rounds[request].append(row)
    return rounds


def simulated(run: Simulation) -> list[list[tuple[int, int]]]:
    return by_request(run.logged[run.rounds.serial], run.rounds)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", POLICIES)
def test_rounds_do_not_depend_on_the_batch(
    name: str, load: str, prepared: Made, replayed: Alone
) -> None:
    run = simulate(prepared[name], LOADS[load], linear(), seed=4)
    alone = replayed[name]
    assert simulated(run) == by_request(alone.request, alone.outcomes)


@pytest.mark.parametrize("name", POLICIES)
def test_one_slot_takes_the_time_of_replay(name: str, prepared: Made, replayed: Alone) -> None:
    clock = linear(verify_cached_token_us=0.5, draft_fixed_us=30.0, draft_token_us=2.0)
    run = simulate(prepared[name], LOADS["one"], clock)
    wanted = LoadClock(clock)(replayed[name]).sum()
    prompts = NUM_PROMPTS * clock.prefill_us(PROMPT_TOKENS, drafts=name != "ar")
    assert run.timeline.end_us[-1] == pytest.approx(wanted + prompts)


@pytest.mark.parametrize("budget", [PerRequest(), SurvivalBudget(max_tokens=3 * 9)])
@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_of_all_wants_is_none(name: str, budget: Budget, prepared: Made) -> None:
    load, clock = Load(3, num_requests=8), linear()
    counted = simulate(prepared[name], load, clock)
    shared = simulate(prepared[name], load, clock, budget=budget)
    assert simulated(shared) == simulated(counted)
    assert shared.timeline.end_us.tolist() == counted.timeline.end_us.tolist()
