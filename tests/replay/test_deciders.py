"""The time of a policy's own decisions: measured live, stored by what decides, charged in one place
and said to be missing where it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.policy import (
    Chain,
    JointThreshold,
    Policy,
    RootOnly,
    ScoredTree,
    StaticTree,
    SurvivalBudget,
)
from specctl.replay.batch_simulation import Load, simulate
from specctl.replay.cost.live import deciding_policies
from specctl.replay.cost.model import DeciderCost, Steps, decider_of, steps_of
from specctl.replay.metrics import LoadClock
from specctl.replay.rounds import replay
from specctl.replay.submissions import submissions_of
from specctl.runtime.load import Pair
from tests.artifacts.examples import FFN, POLICIES
from tests.cli.command import USAGE, refuses
from tests.policy.scorers import copy_table
from tests.replay.costs import table_model
from tests.replay.logs import random_log

THRESHOLD = Policy(shape=JointThreshold(min_prob=0.2, depth=3, top_k=2))
NAME = "threshold"
TIMED = table_model(
    deciders={NAME: DeciderCost(policy=NAME, batch_sizes=(1, 3), level_us=(7.0, 11.0))}
)


def test_what_decides_has_one_name_whatever_its_settings() -> None:
    scored = ScoredTree(scorer=FFN, beta=0.1, depth=4)
    names = {
        decider_of(Policy(shape=shape))
        for shape in (scored, scored.model_copy(update={"beta": 0.3, "depth": 9}))
    }
    assert names == {"c2t: ffn of 3 features, 2 units"}
    other = decider_of(Policy(shape=scored.model_copy(update={"scorer": copy_table()})))
    assert other.startswith("c2t: table of ")
    still = (RootOnly(), Chain(num_draft_tokens=3), StaticTree())
    assert [decider_of(Policy(shape=shape)) for shape in still] == ["", "", ""]
    shared = Policy(shape=StaticTree(), budget=SurvivalBudget(max_tokens=90))
    assert decider_of(shared) == "survival"
    assert (
        decider_of(THRESHOLD.model_copy(update={"budget": shared.budget})) == "threshold+survival"
    )
    assert all(isinstance(decider_of(policy), str) for policy in POLICIES.values())


def test_each_level_pays_for_its_decision() -> None:
    bare = table_model()
    batch, levels = np.array([1, 2, 3]), np.array([4, 0, 3])
    steps = Steps(batch, 4 * batch, 64, levels, 2, 1, decider=NAME)
    more = TIMED.round_us(steps) - bare.round_us(steps)
    assert more == pytest.approx([4 * 7.0, 0.0, 3 * 11.0])
    assert TIMED.draft_us(steps) - bare.draft_us(steps) == pytest.approx(more)
    other = Steps(batch, 4 * batch, 64, levels, 2, 1, decider="hetero")
    assert TIMED.round_us(other) == pytest.approx(bare.round_us(other))


def test_replayed_and_simulated_rounds_are_charged(tmp_path: Path) -> None:
    log = random_log(tmp_path / "log", num_prompts=3, depth=3, top_k=2)
    for policy in (THRESHOLD, Policy(shape=StaticTree(depth=3, top_k=2, num_tokens=6))):
        [run] = replay(log, [policy])
        charge = 7.0 if policy is THRESHOLD else 0.0
        more = LoadClock(TIMED)(run) - LoadClock(table_model())(run)
        assert more == pytest.approx(charge * run.outcomes.levels)
        assert steps_of(run).decider == decider_of(policy)
        [submissions] = submissions_of(log, [policy])
        load = Load(3)
        spent = [
            simulate(submissions, load, clock).timeline.end_us[-1]
            for clock in (TIMED, table_model())
        ]
        assert bool(spent[0] - spent[1] > 100) is (policy is THRESHOLD)
        budget = SurvivalBudget(max_tokens=9)
        wanted = policy.model_copy(update={"budget": SurvivalBudget(max_tokens=12)})
        [submissions] = submissions_of(log, [wanted])
        shared = simulate(submissions, load, TIMED, budget=budget)
        assert shared.steps.decider == decider_of(wanted), "threshold+survival, or survival"


def test_a_budget_that_needs_step_costs_is_timed_with_any(pair: Pair) -> None:
    """The words that a verdict prints are taken by `profile --policy` as they are."""
    words = ("eagle2+survival", "threshold+marginal:tokens_per_s=100")
    found = deciding_policies(words, pair)
    assert [decider_of(one.policy) for one in found] == ["survival", "threshold+marginal"]
    assert tuple(one.spec for one in found) == words


def test_what_decides_nothing_is_refused() -> None:
    pair: Any = SimpleNamespace(fingerprint=None, drafter=object())
    assert deciding_policies((), pair) == []
    assert len(deciding_policies(("svip", "confidence:threshold=0.5"), pair)) == 1, "one rule"
    with pytest.raises(UsageError, match="policy eagle2 decides nothing"):
        deciding_policies(("eagle2",), pair)
    pair.drafter = None
    with pytest.raises(UsageError, match="this is a target alone"):
        deciding_policies(("svip",), pair)
    told = refuses(USAGE, "profile", "--from", "none", "-p", "svip")
    assert "leave --policy out" in told
