"""What replay computes of a log and fits read, as plain arrays: neither imports the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specctl.logs.positions import Floats, Longs


@dataclass(frozen=True)
class ReplayedTotals:
    """What a policy's rounds add up to.

    Attributes:
        utilisation: u, accepted draft tokens over drafted levels, defined per round and averaged.
        time_us: of a cost model; None without one.
    """

    calls: int
    tokens: int
    accepted: int
    verified: int
    levels: int
    utilisation: float
    time_us: float | None


@dataclass(frozen=True)
class TestedTokens:
    """M tokens that strict verification accepted, or rejected first, along chains.

    Attributes:
        prompt_id: `[M]` text. accepted: `[M]` bool. entropy: `[M]` nats, of the distribution that
            the token was drawn from. distance: `[M]` Jensen-Shannon, square root of bits.
    """

    __test__ = False
    prompt_id: Any
    accepted: Any
    entropy: Floats
    distance: Floats


@dataclass(frozen=True)
class PromptCosts:
    """What a policy spends on P prompts, `[P]` float64 each.

    Attributes:
        time: in the unit of the clock. support: share of its rounds that the log tells whole.
    """

    prompt_ids: tuple[str, ...]
    calls: Floats
    tokens: Floats
    levels: Floats
    verified: Floats
    time: Floats
    support: float


@dataclass(frozen=True)
class Openings:
    """Where a relaxed acceptance could first have left Q texts, in M strict rounds, in order.

    A round ends strictly where no child holds the target's token; there, a child that is the
    target's second choice could have been accepted.

    Attributes:
        num_tokens: `[Q]` tokens of each text.
        text: `[M]` the text of each round, ascending. place: `[M]` tokens emitted before the one
            that the round's end was about. closeness: `[M]`, -inf where nothing could be relaxed.
    """

    num_tokens: Longs
    text: Longs
    place: Longs
    closeness: Any
