"""The fastest chain by load and context, from a log and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specctl.logs.positions import context_parts
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, RootOnly
from specctl.replay.metrics import LoadClock
from specctl.replay.rounds import Rounds, replay
from specctl.replay.tune.contexts import LOADS, context_table, lengths_by_context
from specctl.stats import split_prompts
from tests.replay.logs import log_fixtures
from tests.replay.tune_cases import linear

traces, log = log_fixtures(num_prompts=24, depth=3, top_k=2)
MODEL = linear(draft_cached_token_us=12.0)
"""Drafting costs 12 us for each token of text, a verification 1000."""


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        ([100, 900, 100, 900], [0, 1, 0, 1]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 2, 2, 3, 3]),
        ([500, 501, 600, 900], None),  # alike
        ([7], None),
    ],
)
def test_parts_by_context(texts: list[int], parts: list[int] | None) -> None:
    found = context_parts(np.array(texts))
    assert (None if found is None else found.tolist()) == parts


def test_lengths_by_context_are_those_by_hand(log: DenseLog) -> None:
    shapes = [RootOnly(), *(Chain(num_draft_tokens=k) for k in (1, 2, 3))]
    runs = replay(log, [Policy(shape=shape) for shape in shapes])
    split = split_prompts(runs[0].positions.prompt_ids, held_out_frac=0.5, seed=3)
    found = lengths_by_context(log, MODEL, split, seed=0)
    assert {one.batch_size for one in found} == {*LOADS}

    def rate(run: Rounds, names: tuple[str, ...], ends: tuple[int, int], load: int) -> float:
        prompts = np.array(run.positions.prompt_ids)[run.positions.prompt][run.request]
        inside = (run.context_tokens >= ends[0]) & (run.context_tokens <= ends[1])
        inside &= np.isin(prompts, names)
        return float(run.emitted[inside].sum() / LoadClock(MODEL, load)(run)[inside].sum())

    for one in found:
        rates = [rate(run, split.train, one.context_tokens, one.batch_size) for run in runs]
        assert one.num_draft_tokens == np.argmax(rates)
        ours, plain = (
            rate(runs[length], split.held_out, one.context_tokens, one.batch_size)
            for length in (one.num_draft_tokens, 0)
        )
        assert one.against_plain.value == pytest.approx(ours / plain)
        assert one.against_plain.low <= ours / plain <= one.against_plain.high
    alone = [one.num_draft_tokens for one in found if one.batch_size == 1]
    assert alone[0] > alone[-1] == 0
    rows = context_table(found).rows
    assert [len(row) for row in rows] == [1 + 2 * len(LOADS)] * 4
    assert rows[0][1].startswith(f"{alone[0]}: × 1.")
    assert rows[-1][1:3] == ["off", "-"]
