"""Replay under sampling: with a live run's seeds equal round for round, with others in law."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specctl.collect.dense import collect_dense
from specctl.collect.prompts import Prompt
from specctl.errors import UsageError
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, FullTree, Policy, Ratio, StaticTree
from specctl.replay.outcomes import check_replayable
from specctl.replay.rounds import replay
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair
from specctl.runtime.requests import Sampling
from tests.replay.equality import RoundLog, rounds_of, single_turns

Prompts = list[Prompt]
SHAPE, TREE = FullTree(depth=5, top_k=6), StaticTree(depth=5, top_k=6, num_tokens=24)
WEAKER = StaticTree(depth=2, top_k=6, num_tokens=8)
NUM_LENGTHS = TREE.depth + 1
Counts = np.ndarray
"""`[P, L]` rounds of each prompt by accepted length."""


def settings(seed: int) -> DecodeSettings:
    return DecodeSettings(16, Sampling(temperature=0.8, top_p=0.95, seed=seed))


def dense_log(pair: Pair, prompts: Prompts, folder: Path) -> DenseLog:
    collect_dense(pair, prompts, settings(1), folder, SHAPE, batch_size=8)
    return DenseLog.open(TraceSet.open(folder))


def live(pair: Pair, prompts: Prompts, seed: int) -> RoundLog:
    rounds = RoundLog()
    decoder = Decoder(pair, Policy(shape=TREE), batch_size=8, observer=rounds)
    list(decoder.converse(prompts, settings(seed)))
    return rounds


def replayed(log: DenseLog, shape: StaticTree) -> dict[str, list[tuple[int, int, int]]]:
    return rounds_of(replay(log, [Policy(shape=shape)])[0])


def counts(rounds: dict[str, list[tuple[int, int, int]]], prompts: Prompts) -> Counts:
    return np.stack(
        [
            np.bincount([a for a, *_ in rounds.get(p.prompt_id, [])], minlength=NUM_LENGTHS)
            for p in prompts
        ]
    )


def p_value(ours: Counts, theirs: Counts, num: int = 999) -> float:
    """Of equal laws, by swapping sides prompt by prompt; the statistic is the distance of the two
    survival curves, each point weighed by its variance over prompts."""
    at_least = np.tril(np.ones((NUM_LENGTHS, NUM_LENGTHS)))
    differences = (ours - theirs) @ at_least
    scale = np.sqrt((differences**2).sum(0)) + 1e-9
    swaps = np.random.default_rng(0).choice([-1.0, 1.0], (num, len(ours)))
    drawn = (((swaps @ differences) / scale) ** 2).sum(1)
    seen = ((differences.sum(0) / scale) ** 2).sum()
    return float((1 + (drawn >= seen).sum()) / (1 + num))


def test_with_equal_seeds_every_round_is_the_live_one(pair: Pair, tmp_path: Path) -> None:
    prompts = single_turns()[::16]
    found = replayed(dense_log(pair, prompts, tmp_path / "traces"), TREE)
    wanted = live(pair, prompts, seed=1).rounds
    assert len(wanted) == len(prompts) >= 12
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    assert not differing


@pytest.mark.nightly
def test_with_other_seeds_the_law_is_the_live_one(pair: Pair, tmp_path: Path) -> None:
    """False alarm 1 in 1000; a shift of 0.3 tokens is about three standard errors."""
    prompts = single_turns()[::2][:100]
    log = dense_log(pair, prompts, tmp_path / "traces")
    life = counts(live(pair, prompts, seed=2).rounds, prompts)
    assert p_value(counts(replayed(log, TREE), prompts), life) > 0.001
    assert p_value(counts(replayed(log, WEAKER), prompts), life) == 0.001


def test_drawn_drafts_are_not_replayed() -> None:
    """No log holds the distributions that other drafts would be drawn from."""
    with pytest.raises(UsageError, match="drafts that are drawn: its text depends on them"):
        check_replayable(Policy(shape=Chain(), acceptance=Ratio()))
