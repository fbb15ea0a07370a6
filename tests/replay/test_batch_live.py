"""Simulated batches equal live ones, round by round, on prompts where no near-tie decides."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from specctl.collect.dense import collect_dense
from specctl.collect.prompts import Prompt, load_prompts
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import (
    Budget,
    Calibration,
    Chain,
    ChainSchedule,
    ElasticBudget,
    EntropyStop,
    FullTree,
    MarginalBudget,
    PerRequest,
    Policy,
    Shape,
    SparseGates,
    StaticTree,
    StepCost,
    SurvivalBudget,
)
from specctl.replay.batch_simulation import Load, Simulation, simulate
from specctl.replay.submissions import submissions_of
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair
from specctl.runtime.requests import RoundRecord
from tests.replay.serving import linear

SETTINGS = DecodeSettings(24)
SHAPE = FullTree(depth=4, top_k=4, nested=True)
COSTS = StepCost(token_counts=(1, 12, 24, 36), step_us=(100.0, 120.0, 180.0, 400.0))
GATED = SparseGates(depth=4, width=2, max_width=4, gate_levels=(1, 3), thresholds=(0.5, 0.2))
BATCH_SIZE = 3
Row = tuple[str, int, int]
"""Prompt, nodes verified, draft tokens accepted and emitted, of one request in one round."""


def prompts() -> list[Prompt]:
    return load_prompts("embedded")[5::33]


@pytest.fixture(scope="module")
def log(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    collect_dense(pair, prompts(), SETTINGS, folder, SHAPE)
    return DenseLog.open(TraceSet.open(folder))


@dataclass
class Watcher:
    """Keeps who verified how much, in the order of slots, and who went on from where."""

    rounds: list[list[Row]] = field(default_factory=list)

    def on_round(self, record: RoundRecord) -> None:
        verified = (record.submitted >= 0).sum(1).tolist()
        accepted = (record.path >= 0).sum(1) - 1
        emitted = record.num_emitted.minimum(accepted).tolist()
        ids = [request.prompt_id for request in record.requests]
        self.rounds.append(list(zip(ids, verified, emitted, strict=True)))


def live_rounds(pair: Pair, policy: Policy, prompt_ids: list[str]) -> list[list[Row]]:
    asked = {prompt.prompt_id: prompt for prompt in prompts()}
    tokenizer, watcher = pair.target.tokenizer, Watcher()
    requests = [
        next_request(tokenizer, Conversation(asked[prompt_id]), SETTINGS)
        for prompt_id in prompt_ids
    ]
    longest = max(len(request.prompt_ids) for request in requests) + SETTINGS.max_new_tokens
    options = {"batch_size": BATCH_SIZE, "max_text_tokens": longest, "eos_ids": pair.target.eos_ids}
    loop = DecodeLoop(pair.target.model, pair.drafter, policy, observer=watcher, **options)
    assert len(list(loop.run(requests))) == len(requests)
    return watcher.rounds


def served(run: Simulation) -> list[str]:
    """Prompts in the order of service."""
    positions = run.submissions.positions
    return [positions.prompt_ids[code] for code in positions.prompt[run.logged].tolist()]


def simulated_rounds(run: Simulation) -> list[list[Row]]:
    names, rounds = served(run), run.rounds
    columns = (rounds.step, rounds.serial, rounds.verified, rounds.accepted)
    found: list[list[Row]] = [[] for _ in rounds.first]
    for step, serial, verified, accepted in zip(*(c.tolist() for c in columns), strict=True):
        found[step].append((names[serial], verified, accepted))
    return found


EAGLE2 = StaticTree(depth=4, top_k=4, num_tokens=12)
CURVES = Calibration(slopes=(0.7, 1.2), intercepts=(0.3, -0.2))
CASES: dict[str, tuple[Shape, Budget]] = {
    "eagle2": (EAGLE2, PerRequest()),
    "eagle2+rate": (EAGLE2, SurvivalBudget(costs=COSTS)),
    "eagle2+calibrated": (EAGLE2, SurvivalBudget(max_tokens=18, calibration=CURVES)),
    "eagle2+marginal": (EAGLE2, MarginalBudget(tokens_per_s=2e4, costs=COSTS)),
    "chain+fixed": (Chain(num_draft_tokens=4), SurvivalBudget(max_tokens=8)),
    "schedule": (ChainSchedule(from_batch=(1, 2, 3), num_draft_tokens=(4, 0, 2)), PerRequest()),
    "adasd": (EntropyStop(window=4, min_samples=1), PerRequest()),
    "echo+high_load": (GATED, ElasticBudget(max_tokens=9, default_width=1)),
    "echo+low_load": (GATED, ElasticBudget(max_tokens=18, default_width=2, max_width=4)),
    "eagle2+echo_budget": (EAGLE2, ElasticBudget(max_tokens=15)),
}


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_life(name: str, pair: Pair, log: DenseLog) -> None:
    shape, budget = CASES[name]
    policy = Policy(shape=shape, budget=budget)
    [made] = submissions_of(log, [policy])
    load = Load(BATCH_SIZE, num_requests=len(prompts()))
    run = simulate(made, load, linear(), packing="padded", seed=1)
    wanted = live_rounds(pair, policy, served(run))
    assert simulated_rounds(run) == wanted
    assert len({len(step) for step in wanted}) == BATCH_SIZE
    assert sum(accepted for step in wanted for _, _, accepted in step) > 20
