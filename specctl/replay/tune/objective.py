"""What tuning maximises: one rate, a ratio of sums over prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Floats
from specctl.replay.ladder.tally import column, tokens_per_us

Kind = Literal["latency", "throughput", "goodput"]
RATIOS: dict[Kind, tuple[str, str, str]] = {
    "latency": ("tokens", "request_us", "tokens/s that a request sees, 1 / TPOT"),
    "throughput": ("tokens", "time_us", "tokens/s of the machine while it works"),
    "goodput": ("good_tokens", "wall_us", "tokens/s of requests within the TPOT limit"),
}
"""Numerator, denominator and meaning; tokens per second, so more is better in all three."""


@dataclass(frozen=True)
class Objective:
    """A rate to maximise.

    Attributes:
        tpot_limit_us: time per output token after the first, of a whole request; goodput only.
    """

    kind: Kind = "latency"
    tpot_limit_us: float | None = None

    def rate(self, sums: Floats) -> Floats:
        """Tokens per second `[...]` of sums `[..., S]`."""
        above, below, _ = RATIOS[self.kind]
        return 1e6 * column(sums, above) / column(sums, below)

    def is_good(self, tokens: Floats, request_us: Floats) -> Floats:
        """`[Q]` 1.0 where a request is within the limit; 0.0 for all where there is none."""
        if self.tpot_limit_us is None:
            return np.zeros(len(tokens))
        return (request_us <= self.tpot_limit_us * tokens).astype(np.float64)

    def to_json(self) -> dict[str, Any]:
        """The fields of `results.TunedObjective`."""
        return {**vars(self), "meaning": RATIOS[self.kind][-1]}


def make_objective(kind: str, tpot_limit_ms: float | None) -> Objective:
    """The objective that a user named."""
    if kind not in get_args(Kind):
        raise refused("--objective", " or ".join(get_args(Kind)), repr(kind), "name one")
    if (kind == "goodput") != (tpot_limit_ms is not None):
        found = "none" if tpot_limit_ms is None else f"one with --objective {kind}"
        raise refused("--tpot-limit-ms", "a limit with goodput alone", found, "correct that")
    if tpot_limit_ms is not None and not 0 < tpot_limit_ms < float("inf"):
        raise refused("--tpot-limit-ms", "milliseconds above 0", str(tpot_limit_ms), "raise it")
    return Objective(kind, None if tpot_limit_ms is None else 1e3 * tpot_limit_ms)  # type: ignore[arg-type]


FIGURES: dict[str, Callable[[Floats], Floats]] = {
    "tokens_per_s": lambda s: 1e6 * tokens_per_us(s),
    "tpot_us": lambda s: column(s, "request_us") / column(s, "tokens"),
    "mean_acceptance_length": lambda s: 1 + column(s, "accepted") / column(s, "calls"),
    "verified_per_call": lambda s: column(s, "verified") / column(s, "calls"),
    "good_share": lambda s: column(s, "good_tokens") / column(s, "tokens"),
}
"""Reported besides the rate; all of them ratios of sums."""


def refused(what: str, expected: str, found: str, fix: str) -> UsageError:
    """A refusal of what was typed."""
    return UsageError(what, expected=expected, found=found, fix=fix)
