"""Acceptance by draft position, and what it says of other chain lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

UNCHANGED_STARTS = (
    "exact in expectation over the rounds that were measured; another length starts its rounds "
    "elsewhere, which counters cannot show"
)
RAGGED = "a lower bound: some rounds drafted fewer tokens than the positions that are counted"


@dataclass(frozen=True)
class PositionRates:
    """Acceptance of the j-th draft token, j = 1..K, over rounds.

    Attributes:
        marginal_prob: P(at least j accepted), of all rounds: vLLM's "per-position acceptance".
        conditional_prob: P(at least j accepted | at least j - 1 accepted); None where no round
            came that far.
    """

    marginal_prob: tuple[float, ...]
    conditional_prob: tuple[float | None, ...]

    @classmethod
    def of_counts(cls, num_rounds: int, at_least: Sequence[int]) -> PositionRates:
        """From rounds with at least 1, 2, ... accepted draft tokens; `num_rounds` above 0."""
        reached = [num_rounds, *at_least[:-1]]
        return cls(
            tuple(count / num_rounds for count in at_least),
            tuple(
                count / before if before else None
                for count, before in zip(at_least, reached, strict=True)
            ),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "marginal_prob": list(self.marginal_prob),
            "conditional_prob": list(self.conditional_prob),
        }


def at_least(histogram: Sequence[int]) -> list[int]:
    """Rounds that accepted at least 1, 2, ... tokens, from rounds by accepted tokens."""
    return list(accumulate(reversed(histogram[1:])))[::-1]


def chain_sweep(rates: PositionRates, *, is_ragged: bool) -> dict[str, Any]:
    """Every chain length up to the one that ran: E[accepted | K] = Σ_{j <= K} P(at least j).

    Args:
        is_ragged: not every round drafted all positions, so the later ones are underestimated.

    Returns:
        `basis`, what the figures rest on, and `chains`, one entry a length: τ with the bonus
        token, verified tokens a call (root counted) and accepted over drafted tokens.
    """
    expected = list(accumulate(rates.marginal_prob))
    return {
        "basis": RAGGED if is_ragged else UNCHANGED_STARTS,
        "is_ragged": is_ragged,
        "chains": [
            {
                "num_draft_tokens": length,
                "mean_acceptance_length": 1 + accepted,
                "verified_tokens_per_call": length + 1,
                "draft_acceptance_rate": accepted / length,
            }
            for length, accepted in enumerate(expected, start=1)
        ],
    }
