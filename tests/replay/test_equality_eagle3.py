"""Replay equals live runs with the EAGLE-3 head: greedy, fp32, prompts outside any training."""

from __future__ import annotations

import pytest

from specctl.collect.prompts import Prompt
from specctl.logs.tree_log import DenseLog
from specctl.runtime.load import Pair
from tests.replay.equality import POLICIES, check_equal, dense_log, single_turns
from tests.runtime.equality import spread


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return spread(single_turns())


@pytest.fixture(scope="module")
def log(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    return dense_log(pair, prompts, tmp_path_factory.mktemp("dense") / "traces")


@pytest.mark.parametrize("name", POLICIES)
def test_every_round_is_the_live_one(
    name: str, pair: Pair, prompts: list[Prompt], log: DenseLog
) -> None:
    check_equal(POLICIES[name], pair, prompts, log)
