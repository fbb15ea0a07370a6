"""The fastest chain by load and context, from a log and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specctl.formatting import NOTHING
from specctl.logs.advice import NOT_BY_CONTEXT
from specctl.logs.positions import Floats, context_parts
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, RootOnly
from specctl.replay.metrics import LoadClock
from specctl.replay.rounds import Rounds, replay
from specctl.replay.tune.contexts import (
    LOADS,
    ContextLength,
    LoadLengths,
    context_table,
    lengths_by_context,
)
from specctl.stats import Interval, split_prompts
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

    names = np.array(runs[0].positions.prompt_ids)[runs[0].positions.prompt]

    def sums(run: Rounds, side: tuple[str, ...], ends: tuple[int, int], load: int) -> Floats:
        inside = (run.context_tokens >= ends[0]) & (run.context_tokens <= ends[1])
        inside &= np.isin(names[run.request], side)
        return np.array([run.emitted[inside].sum(), LoadClock(MODEL, load)(run)[inside].sum()])

    def fastest(ends: tuple[int, int], load: int) -> int:
        totals = [sums(run, split.train, ends, load) for run in runs]
        return int(np.argmax([tokens / us for tokens, us in totals]))

    for one in found:
        load, ranges = one.batch_size, [part.context_tokens for part in one.parts]
        lengths = [part.num_draft_tokens for part in one.parts]
        assert one.num_draft_tokens == fastest((0, 10**9), load)
        assert lengths == [fastest(ends, load) for ends in ranges]

        def rate(each: list[int], of: list[tuple[int, int]], load: int = load) -> float:
            pairs = zip(each, of, strict=True)
            tokens, us = sum(sums(runs[k], split.held_out, ends, load) for k, ends in pairs)
            return float(tokens / us)

        alone = [one.num_draft_tokens] * len(ranges)
        expected = [
            (one.against_plain, rate(alone, ranges) / rate([0] * len(ranges), ranges)),
            (one.against_one, rate(lengths, ranges) / rate(alone, ranges)),
            *(
                (part.against_plain, rate([k], [ends]) / rate([0], [ends]))
                for part, k, ends in zip(one.parts, lengths, ranges, strict=True)
            ),
        ]
        for gain, by_hand in expected:
            assert gain.value == pytest.approx(by_hand)
            assert gain.low <= by_hand <= gain.high
    lengths = [part.num_draft_tokens for part in found[0].parts]
    assert lengths[0] > lengths[-1] == 0
    table = context_table(found)
    assert [row[0] for row in table.rows] == [str(load) for load in LOADS]
    assert table.rows[0][3].endswith(", off")
    assert (NOT_BY_CONTEXT in table.legend) == any(one.against_one.low > 1 for one in found)


@pytest.mark.parametrize(
    ("lengths", "gain", "shown", "advises"),
    [
        ((8, 12), Interval(1.01, 0.97, 1.05), "× 1.01 [0.97, 1.05]", False),  # chance
        ((8, 12), Interval(1.04, 1.01, 1.07), "× 1.04 [1.01, 1.07]", True),
        ((8, 12), Interval(1.04, math.nan, math.nan), "× 1.04 [n/a]", False),  # few prompts
        ((8, 8), Interval(1.0, 1.0, 1.0), NOTHING, False),
    ],
)
def test_routing_is_advised_on_a_gain_over_one_length_alone(
    lengths: tuple[int, int], gain: Interval, shown: str, *, advises: bool
) -> None:
    plain = Interval(1.5, 1.3, 1.7)
    parts = tuple(
        ContextLength(context_tokens=(1 + 100 * at, 100 + 100 * at), num_draft_tokens=k,
                      against_plain=plain)
        for at, k in enumerate(lengths)
    )  # fmt: skip
    one = LoadLengths(
        batch_size=1, num_draft_tokens=8, against_plain=plain, parts=parts, against_one=gain
    )
    table = context_table([one])
    assert list(table.rows[0])[2:] == ["× 1.50 [1.30, 1.70]", "{}, {}".format(*lengths), shown]
    assert (NOT_BY_CONTEXT in table.legend) is advises
    assert "texts of 1 to 100 and 101 to 200 tokens" in table.legend
