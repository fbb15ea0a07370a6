"""Replay equals live runs for the small drafter, and for adaptive policies; 40 prompts."""

from __future__ import annotations

import pytest

from specctl.collect.prompts import Prompt
from specctl.logs.tree_log import DenseLog
from specctl.runtime.load import Pair, load_pair
from tests.policy.scorers import SCORED_POLICIES
from tests.replay.equality import ADAPTIVE, POLICIES, check_equal, dense_log, few_prompts


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("embedded", "embedded:small", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return few_prompts()


@pytest.fixture(scope="module")
def log(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    return dense_log(pair, prompts, tmp_path_factory.mktemp("dense") / "traces")


@pytest.mark.parametrize("name", POLICIES)
def test_every_round_is_the_live_one(
    name: str, pair: Pair, prompts: list[Prompt], log: DenseLog
) -> None:
    check_equal(POLICIES[name], pair, prompts, log)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_so_is_every_round_of_an_adaptive_policy(
    name: str, pair: Pair, prompts: list[Prompt], log: DenseLog
) -> None:
    check_equal(ADAPTIVE[name], pair, prompts, log)


@pytest.fixture(scope="module")
def head() -> Pair:
    return load_pair("embedded", "embedded", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def head_log(
    head: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> DenseLog:
    return dense_log(head, prompts[::2], tmp_path_factory.mktemp("dense") / "traces")


@pytest.mark.parametrize("name", ADAPTIVE)
def test_and_with_the_eagle3_head(
    name: str, head: Pair, prompts: list[Prompt], head_log: DenseLog
) -> None:
    check_equal(ADAPTIVE[name], head, prompts[::2], head_log)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", SCORED_POLICIES)
def test_so_is_every_round_of_a_scored_tree(
    name: str, batch_size: int, pair: Pair, prompts: list[Prompt], log: DenseLog
) -> None:
    few = prompts[batch_size - 1 :: 4]
    check_equal(SCORED_POLICIES[name], pair, few, log, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", SCORED_POLICIES)
def test_and_of_one_with_the_eagle3_head(
    name: str, batch_size: int, head: Pair, prompts: list[Prompt], head_log: DenseLog
) -> None:
    few = prompts[::2][batch_size - 1 :: 3]
    check_equal(SCORED_POLICIES[name], head, few, head_log, batch_size=batch_size)
