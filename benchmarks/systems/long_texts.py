"""AdaSD's stop on long texts, beside fixed chains and a fixed bar of confidence.

A log of chains holds what every stop would do, so replay is exact. Costs are target forwards, with
a stated cost of a drafted level. The texts of a small pair loop; how much is part of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specctl.logs.positions import Floats
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, EntropyStop, Policy, SignalStop
from specctl.replay.rounds import Rounds, replay
from specctl.stats import Interval, Resamples, sums_by
from systems.bench import SEED

LEAST = 512
"""Tokens of a text that counts as long."""
PARTS = {"first 128": (0, 128), "from 128 on": (128, 10**9), "all": (0, 10**9)}
"""Tokens of each text that a row is of."""
LEVEL_COST = 0.1
"""Of a drafted level, in target forwards: stated."""
BASELINE = "chain 5"
"""The paper's."""
NGRAM = 8
Row = dict[str, Any]


def long_rows(folder: Path) -> Iterator[Row]:
    """Every stop against the paper's fixed chain of 5, on the same texts.

    Args:
        folder: dense traces of chains.
    """
    traces = TraceSet.open(folder, verify=False)
    log = DenseLog.open(traces)
    policies = stops(log.support.depth)
    runs = dict(zip(policies, replay(log, list(policies.values()), with_bounds=False), strict=True))
    positions = runs[BASELINE].positions
    lengths = np.diff(positions.start) + 1
    is_long = lengths >= LEAST
    resamples = Resamples.draw(int(is_long.sum()), seed=SEED)
    looped = float(np.mean(repeats(folder)))
    for part, ends in PARTS.items():
        sums = {name: part_sums(run, ends)[is_long] for name, run in runs.items()}
        for name, one in sums.items():
            yield {
                "stop": name,
                "part": part,
                "num_texts": int(is_long.sum()),
                "tokens_per_call": resamples.interval(one, lambda s: s[..., 1] / s[..., 0]),
                "drafted_per_call": resamples.interval(one, lambda s: s[..., 2] / s[..., 0]),
                "cost_over_chain_5": _change(resamples, one, sums[BASELINE]),
                "repeated": looped,
            }


def stops(depth: int) -> dict[str, Policy]:
    """The paper's, and the controls."""
    return {
        **{f"chain {n}": Policy(shape=Chain(num_draft_tokens=n)) for n in (3, 5, 8)},
        "confidence 0.5": Policy(
            shape=SignalStop(signal="confidence", threshold=0.5, window=depth)
        ),
        "AdaSD (paper)": Policy(shape=EntropyStop(window=depth, between="rejected", min_samples=1)),
    }


def part_sums(run: Rounds, ends: tuple[int, int]) -> Floats:
    """`[Q, 3]` calls, tokens and drafted levels of the rounds that start within the part."""
    start = np.flatnonzero(run.visited) - run.positions.start[run.request]
    inside = (start >= ends[0]) & (start < ends[1])
    columns = (np.ones(len(start)), run.emitted, run.outcomes.levels)
    table = np.column_stack(columns)[inside]
    return sums_by(run.request[inside], run.positions.num_requests, table)


def cost(sums: Floats) -> Floats:
    """Target forwards a token."""
    return np.asarray((sums[..., 0] + LEVEL_COST * sums[..., 2]) / sums[..., 1])


def _change(resamples: Resamples, ours: Floats, theirs: Floats) -> Interval:
    return resamples.read(cost(resamples.drawn(ours)) / cost(resamples.drawn(theirs)) - 1)


def repeats(folder: Path) -> list[float]:
    """Of every long text, the share of its runs of 8 tokens that it has had before."""
    rounds = TraceSet.open(folder, verify=False).scan("rounds")
    rounds = rounds.select("request_id", "position", "root_token_id").collect()
    found = []
    for _, text in rounds.sort("position").group_by("request_id", maintain_order=True):
        ids = text["root_token_id"].to_list()
        if len(ids) + 1 < LEAST:
            continue
        seen: set[tuple[int, ...]] = set()
        again = 0
        for at in range(len(ids) - NGRAM + 1):
            run = tuple(ids[at : at + NGRAM])
            again += run in seen
            seen.add(run)
        found.append(again / (len(ids) - NGRAM + 1))
    return found
