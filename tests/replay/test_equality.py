"""Replay equals live runs round for round, greedy and fp32, for both drafters of the embedded pair,
and under sampling with a live run's seeds.

Every policy with the EAGLE-3 head; one of a kind with the small model, `make nightly` the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specctl.collect.prompts import Prompt
from specctl.errors import UsageError
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, FullTree, Policy, Ratio, StaticTree
from specctl.replay.outcomes import check_replayable
from specctl.replay.rounds import replay
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair
from specctl.runtime.requests import Sampling
from tests.policy.scorers import SCORED_POLICIES
from tests.replay.equality import (
    ADAPTIVE,
    POLICIES,
    RoundLog,
    check_equal,
    dense_log,
    few_prompts,
    rounds_of,
    single_turns,
)
from tests.runtime import captured
from tests.runtime.captured import NUM_PROMPTS, spread

Logged = tuple[Pair, list[Prompt], DenseLog]
Logs = Callable[[str, str], Logged]
PAIRS = {"small": captured.small_pair, "eagle3": captured.pair}
WITH_SMALL = {
    "chain 6", "eagle2 8-5-24", "hetero", "adaedl:threshold=0.5:window=7",
    "ddd:depth=8:top_k=6:num_tokens=24:check_levels=3/5:min_beam_logp=-1.0",
    "threshold:depth=8:top_k=8:min_prob=0.03:min_level_prob=0.4",
    "adasd_stop:window=6:top_k=4:num_tokens=20:min_samples=1",
    "c2t joint", "survival",
}  # fmt: skip


def cases(names: Iterable[str]) -> list[Any]:
    """Pairs and policies."""
    rare = pytest.mark.nightly
    with_small = [pytest.param("small", n, marks=() if n in WITH_SMALL else rare) for n in names]
    return [*(("eagle3", name) for name in names), *with_small]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    """A drafter's pair, prompts outside any training and their log, made once each.

    As many prompts as a run takes, or few: of their trees scorers want no more than the log holds.
    """

    @cache
    def made(drafter: str, size: str) -> Logged:
        pair, prompts = PAIRS[drafter](), few_prompts() if size == "few" else spread(single_turns())
        return pair, prompts, dense_log(pair, prompts, tmp_path_factory.mktemp("dense") / "traces")

    return made


@pytest.mark.parametrize(("drafter", "name"), cases(POLICIES))
def test_every_round_is_the_live_one(drafter: str, name: str, logged: Logs) -> None:
    check_equal(POLICIES[name], *logged(drafter, "few" if NUM_PROMPTS <= 16 else "many"))


@pytest.mark.parametrize(("drafter", "name"), cases(ADAPTIVE))
def test_so_is_every_round_of_an_adaptive_policy(drafter: str, name: str, logged: Logs) -> None:
    check_equal(ADAPTIVE[name], *logged(drafter, "few"))


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("drafter", "name"), cases(SCORED_POLICIES))
def test_so_is_every_round_of_a_scored_tree(
    drafter: str, name: str, batch_size: int, logged: Logs
) -> None:
    pair, prompts, log = logged(drafter, "few")
    some = prompts[batch_size - 1 :: 2]
    check_equal(SCORED_POLICIES[name], pair, some, log, batch_size=batch_size)


def test_with_equal_seeds_every_round_is_the_live_one(pair: Pair, tmp_path: Path) -> None:
    sampled = DecodeSettings(16, Sampling(temperature=0.8, top_p=0.95, seed=1))
    policy = Policy(shape=StaticTree(depth=5, top_k=6, num_tokens=24))
    prompts, live = single_turns()[::16], RoundLog()
    list(Decoder(pair, policy, batch_size=8, observer=live).converse(prompts, sampled))
    log = dense_log(pair, prompts, tmp_path / "traces", sampled, FullTree(depth=5, top_k=6))
    found = rounds_of(replay(log, [policy])[0])
    assert len(live.rounds) == len(prompts) >= 12
    differing = [name for name in live.rounds if found.get(name) != live.rounds[name]]
    assert not differing


def test_drawn_drafts_are_not_replayed() -> None:
    """No log holds the distributions that other drafts would be drawn from."""
    with pytest.raises(UsageError, match="its text depends on drafts that are drawn"):
        check_replayable(Policy(shape=Chain(), acceptance=Ratio()))
