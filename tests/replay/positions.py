"""Positions by hand, and what a round of them costs."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from specctl.logs.positions import Positions
from specctl.replay.cost.rates import LinearCost
from specctl.replay.metrics import LoadClock


def positions_of(lengths: list[int], prompt: int = 0) -> Positions:
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    remaining = np.concatenate([np.arange(n, 0, -1) for n in lengths]).astype(np.int32)
    codes = np.arange(len(lengths), dtype=np.int32)
    names = tuple(f"p{prompt + code}" for code in codes)
    category = np.zeros(len(lengths), np.int32)
    return Positions(start, codes, names, category, ("a",), remaining, remaining)


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def linear_clock(batch_size: int = 1, **rates: float) -> LoadClock:
    """100 us a verification and 10 a token of it; 20 us a draft and 5 a drafted node; 1 a step."""
    usual = {
        "verify_fixed_us": 100.0,
        "verify_token_us": 10.0,
        "verify_cached_token_us": 0.0,
        "draft_fixed_us": 20.0,
        "draft_token_us": 5.0,
        "step_us": 1.0,
    }
    whole = {"cost_model_version": 1, "source": "a test", **usual, **rates}
    return LoadClock(LinearCost.model_validate(whole), batch_size)


def check_positions(positions: Positions) -> None:
    """The arrays fit together."""
    rows, starts = positions.num_rows, positions.start
    assert starts[0] == 0
    assert starts[-1] == rows
    assert (np.diff(starts) > 0).all()
    assert len(positions.category) == len(positions.prompt) == len(starts) - 1
    assert (positions.remaining >= 1).all()
