"""Replay equals live runs for both drafters of the embedded pair, adaptive policies included."""

from __future__ import annotations

import pytest

from specctl.collect.prompts import Prompt
from specctl.logs.tree_log import DenseLog
from specctl.runtime.load import Pair, load_pair
from tests.policy.scorers import SCORED_POLICIES
from tests.replay.equality import ADAPTIVE, POLICIES, check_equal, dense_log, few_prompts

Logged = tuple[Pair, list[Prompt], DenseLog]
UNSCORED = POLICIES | ADAPTIVE


@pytest.fixture(scope="module", params=["embedded:small", "embedded"])
def logged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    """40 prompts for the small drafter, half of them for the EAGLE-3 head."""
    pair = load_pair("embedded", request.param, device="cpu", dtype="float32")
    prompts = few_prompts()[:: 1 if "small" in request.param else 2]
    return pair, prompts, dense_log(pair, prompts, tmp_path_factory.mktemp("dense") / "traces")


@pytest.mark.parametrize("name", UNSCORED)
def test_every_round_is_the_live_one(name: str, logged: Logged) -> None:
    check_equal(UNSCORED[name], *logged)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", SCORED_POLICIES)
def test_so_is_every_round_of_a_scored_tree(name: str, batch_size: int, logged: Logged) -> None:
    pair, prompts, log = logged
    few = prompts[batch_size - 1 :: 4 if len(prompts) == 40 else 3]
    check_equal(SCORED_POLICIES[name], pair, few, log, batch_size=batch_size)
