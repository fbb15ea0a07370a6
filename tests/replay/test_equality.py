"""Replay equals live runs, greedy and fp32, for both drafters of the embedded pair."""

from __future__ import annotations

import pytest

from specctl.collect.prompts import Prompt
from specctl.logs.tree_log import DenseLog
from specctl.runtime.load import Pair
from tests.policy.scorers import SCORED_POLICIES
from tests.replay.equality import (
    ADAPTIVE,
    POLICIES,
    check_equal,
    dense_log,
    few_prompts,
    single_turns,
)
from tests.runtime import captured
from tests.runtime.equality import spread

Logged = tuple[Pair, list[Prompt], DenseLog]
PAIRS = {"small": captured.small_pair, "eagle3": captured.pair}


@pytest.fixture(scope="module", params=PAIRS)
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    """As many prompts as a run takes, outside any training."""
    pair, prompts = PAIRS[request.param](), spread(single_turns())
    return pair, prompts, dense_log(pair, prompts, tmp_path_factory.mktemp("dense") / "traces")


@pytest.fixture(scope="module", params=PAIRS)
def few(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    """Prompts of whose trees scorers want no more than the log holds."""
    pair, prompts = PAIRS[request.param](), few_prompts()
    return pair, prompts, dense_log(pair, prompts, tmp_path_factory.mktemp("dense") / "traces")


@pytest.mark.parametrize("name", POLICIES)
def test_every_round_is_the_live_one(name: str, many: Logged) -> None:
    check_equal(POLICIES[name], *many)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_so_is_every_round_of_an_adaptive_policy(name: str, few: Logged) -> None:
    check_equal(ADAPTIVE[name], *few)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", SCORED_POLICIES)
def test_so_is_every_round_of_a_scored_tree(name: str, batch_size: int, few: Logged) -> None:
    pair, prompts, log = few
    some = prompts[batch_size - 1 :: 2]
    check_equal(SCORED_POLICIES[name], pair, some, log, batch_size=batch_size)
