"""Simulated batches against replay, against a telling in plain Python, and against themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.logs.logged_draft import logged_draft
from specctl.logs.tree_log import DenseLog
from specctl.policy import (
    Budget,
    Calibration,
    Chain,
    EntropyBins,
    JointThreshold,
    MarginalBudget,
    OptTree,
    PerRequest,
    Policy,
    RootOnly,
    SignalStop,
    StepCost,
    SurvivalBudget,
    build_budget,
    build_shape,
)
from specctl.replay.batch_simulation import Load, Packing, Simulation, simulate
from specctl.replay.rounds import Rounds, replay
from specctl.replay.submissions import Submissions, submissions_of
from tests.replay.logs import PlainTree, log_fixtures, plain_trees, random_traces, static_tree
from tests.replay.serving import TREE, likeliest, linear, per_request, requests_of, serve_plainly
from tests.trees import check_tree, joint_logp

Made = dict[str, Submissions]
Alone = dict[str, Rounds]
Told = tuple[Submissions, list[tuple[list[PlainTree], int]]]
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
COSTS = StepCost(token_counts=(1, 8, 16, 24), step_us=(100.0, 120.0, 180.0, 300.0))
BUDGETS: dict[str, Budget] = {
    "fixed": SurvivalBudget(max_tokens=12),
    "rate": SurvivalBudget(costs=COSTS),
    "calibrated": SurvivalBudget(
        max_tokens=12, calibration=Calibration(slopes=(0.7, 1.2), intercepts=(0.3, -0.2))
    ),
    "marginal": MarginalBudget(tokens_per_s=2e4, costs=COSTS),
}
LOADS = {
    "one": Load(1, num_requests=NUM_PROMPTS),
    "closed": Load(3, num_requests=NUM_PROMPTS),
    "open": Load(3, arrival_rate_per_s=60.0, num_requests=NUM_PROMPTS),
}


traces, log = log_fixtures(num_prompts=NUM_PROMPTS, depth=4, top_k=3)


@pytest.fixture(scope="module")
def prepared(log: DenseLog) -> Made:
    found = submissions_of(log, list(POLICIES.values()), keep_nodes=True)
    return dict(zip(POLICIES, found, strict=True))


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
    calls = np.bincount(replayed[name].request)[run.logged]
    assert requests_of(run)["calls"] == calls.tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_one_slot_takes_the_time_of_replay(name: str, prepared: Made, replayed: Alone) -> None:
    clock = linear(verify_cached_token_us=0.5, draft_fixed_us=30.0, draft_token_us=2.0)
    run = simulate(prepared[name], LOADS["one"], clock)
    wanted = clock.replayed_us(replayed[name]).sum()
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


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets_share_submitted_trees_as_whole_pools(
    budget: str, log: DenseLog, prepared: Made
) -> None:
    rule = build_budget(BUDGETS[budget], batch_size=6, max_tokens=8)
    [chunk] = log.chunks()
    nodes = prepared["eagle2"].nodes
    assert nodes is not None
    for start in range(0, 128, 6):
        rows = slice(start, start + 6)
        draft = logged_draft(build_shape(TREE), chunk, rows)
        whole = rule.share(draft.plan, draft.pool, draft.submitted)
        batch = nodes.batch(np.arange(chunk.positions.num_rows)[rows])
        part = rule.share(batch.plan, batch.pool, batch.submitted)
        sizes = (batch.submitted >= 0).sum(1)
        assert sizes.tolist() == (draft.submitted >= 0).sum(1).tolist()
        kept = draft.submitted.gather(1, part.clamp(min=0)).masked_fill(part < 0, -1)
        assert kept.tolist() == whole.tolist()
        assert (part >= 0).sum() < sizes.sum() or budget == "marginal"


def test_a_batch_holds_the_submitted_trees_as_they_were(log: DenseLog, prepared: Made) -> None:
    """Trees of different sizes, padded to the largest as the runtime pads them."""
    [chunk] = log.chunks()
    nodes, rows = prepared["stop"].nodes, np.arange(5, 640, 80)
    assert nodes is not None
    batch = nodes.batch(rows)
    check_tree(batch.pool.tree)
    assert torch.equal(batch.pool.joint_logp, joint_logp(batch.pool.tree))
    assert torch.equal(batch.submitted >= 0, batch.pool.tree.valid)
    assert len(set(batch.pool.tree.num_nodes.tolist())) > 2
    for place, row in enumerate(rows.tolist()):
        rule = build_shape(POLICIES["stop"].shape)
        draft = logged_draft(rule, chunk, slice(row, row + 1))
        picked = draft.submitted[0][draft.submitted[0] >= 0]
        for name in ("joint_logp", "entropy", "topk_entropy", "sibling_rank", "expanded"):
            found = getattr(batch.pool, name)[place, : len(picked)]
            assert torch.equal(found, getattr(draft.pool, name)[0, picked]), name
        on_path = draft.on_path[0][draft.submitted[0] >= 0]
        assert batch.on_path[place].sum() == on_path.sum()
        assert torch.equal(batch.on_path[place, : len(picked)], on_path)


def test_equal_seeds_give_equal_runs_and_others_do_not(prepared: Made) -> None:
    def run(seed: int, load: Load) -> tuple[list[int], list[float]]:
        found = simulate(prepared["eagle2"], load, linear(), seed=seed)
        return found.logged.tolist(), found.timeline.finish_us.tolist()

    for load in (Load(3), Load(3, arrival_rate_per_s=60.0)):
        assert run(1, load) == run(1, load)
        assert len({str(run(seed, load)) for seed in range(6)}) == 6


def test_threads_and_separate_passes_change_nothing(log: DenseLog, prepared: Made) -> None:
    load = Load(4, num_requests=9)
    for name, policy in POLICIES.items():
        [alone] = submissions_of(log, [policy], keep_nodes=True, num_threads=2)
        runs = [
            simulate(made, load, linear(), budget=BUDGETS["fixed"])
            for made in (alone, prepared[name])
        ]
        assert requests_of(runs[0]) == requests_of(runs[1])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A log of uneven texts, ready for simulation and as plain trees with the prompt's length."""
    folder = tmp_path_factory.mktemp("plain") / "traces"
    traces = random_traces(folder, num_prompts=3, depth=4, top_k=3, seed=5)
    [made] = submissions_of(DenseLog.open(traces), [POLICIES["eagle2"]], keep_nodes=True)
    late = np.array([0, 71, 118])  # texts that start later are shorter, their prompts longer
    start = np.append(made.positions.start[:-1] + late, made.positions.num_rows)
    made = replace(made, positions=replace(made.positions, start=start))
    trees = zip(plain_trees(traces), late.tolist(), strict=True)
    return made, [(text[skipped:], PROMPT_TOKENS + skipped) for text, skipped in trees]


@settings(max_examples=25, deadline=None)
@given(
    batch_size=st.integers(1, 4),
    rate=st.none() | st.floats(5.0, 300.0),
    num_requests=st.integers(1, 7),
    spare=st.none() | st.integers(0, 24),
    packing=st.sampled_from(["ragged", "padded"]),
    seed=st.integers(0, 99),
)
def test_serving_equals_the_plain_telling(
    told: Told,
    batch_size: int,
    rate: float | None,
    num_requests: int,
    spare: int | None,
    packing: Packing,
    seed: int,
) -> None:
    made, requests = told
    load = Load(batch_size, arrival_rate_per_s=rate, num_requests=num_requests)
    max_tokens = 8 * batch_size if spare is None else batch_size + spare

    def step_us(sizes: list[int]) -> float:
        return 100 + 10 * (max(sizes) * len(sizes) if packing == "padded" else sum(sizes))

    wanted = serve_plainly(
        requests, load, seed, submitted, likeliest(max_tokens), step_us, lambda n: 100 + 10 * n
    )
    run = simulate(
        made,
        load,
        linear(),
        budget=None if spare is None else SurvivalBudget(max_tokens=max_tokens),
        packing=packing,
        seed=seed,
    )
    assert (per_request(run, run.emitted) == run.num_tokens - 1).all()
    found = requests_of(run)
    for number, request in enumerate(wanted):
        mine = run.rounds.serial == number
        pairs = zip(run.rounds.verified[mine], run.rounds.accepted[mine], strict=True)
        assert list(pairs) == request.rounds
        assert found["arrival_us"][number] == pytest.approx(request.arrival_us)
        assert found["first_token_us"][number] == pytest.approx(request.first_token_us)
        assert found["finish_us"][number] == pytest.approx(request.finish_us)


def submitted(tree: PlainTree) -> list[int]:
    return static_tree(tree, TREE.depth, TREE.top_k, TREE.num_tokens)
