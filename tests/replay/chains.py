"""Texts whose positions say how many draft tokens of a chain are accepted there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from specctl.logs.positions import Positions
from specctl.policy import Chain, ChainSchedule, Policy, RootOnly
from specctl.replay.outcomes import Outcomes
from specctl.replay.submissions import Submissions

ChainShape = RootOnly | Chain | ChainSchedule


@dataclass(frozen=True)
class Text:
    """A request as a naive reader sees it: tokens, and accepted draft tokens at 1, 2, ..."""

    num_tokens: int
    accepted: list[int]


@st.composite
def texts(draw: Any) -> list[Text]:
    found = []
    for size in draw(st.lists(st.integers(2, 12), min_size=1, max_size=6)):
        wanted = draw(st.lists(st.integers(0, 6), min_size=size - 1, max_size=size - 1))
        found.append(Text(size, [min(a, size - p) for p, a in enumerate(wanted, start=1)]))
    return found


BY_HAND = [Text(6, [3, 0, 2, 0, 1]), Text(3, [0, 1])]
"""`a`, six tokens: positions 1..5 accept 3, 0, 2, 0, 1. `b`, three: 0, 1."""


def submitted(found: list[Text], shape: ChainShape) -> Submissions:
    """The outcome of a shape at every position; of a schedule its longest chain's. The prompts
    have 1, 2, ... tokens."""
    accepted = np.concatenate([text.accepted for text in found])
    sizes = np.array([text.num_tokens - 1 for text in found])
    out = np.concatenate([np.arange(1, size + 1) for size in sizes])
    positions = Positions(
        start=np.append(0, np.cumsum(sizes)),
        prompt=np.arange(len(found), dtype=np.int32),
        prompt_ids=tuple(map(str, range(len(found)))),
        category=np.zeros(len(found), np.int32),
        categories=("",),
        remaining=(np.repeat(sizes, sizes) + 1 - out).astype(np.int32),
        context_tokens=(np.repeat(np.arange(1, len(found) + 1), sizes) + out).astype(np.int32),
    )
    lengths = getattr(shape, "num_draft_tokens", 0)
    longest = max(lengths) if isinstance(lengths, tuple) else lengths
    accepted = np.minimum(accepted, longest).astype(np.int32)
    outcomes = Outcomes.of(accepted, verified=longest + 1, levels=longest, wanted=longest)
    return Submissions(Policy(shape=shape), positions, outcomes, longest + 1)
