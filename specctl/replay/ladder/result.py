"""`ladder.json`: the rungs of one log at one load, and where the rate between them is lost."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specctl.replay.facts import PLAIN, ResultRecord, TraceFacts
from specctl.replay.ladder.estimates import ProbabilityQuality
from specctl.stats import Interval

RungKind = Literal[
    "plain", "chain", "tree", "policy", "features", "oracle", "clairvoyant", "ceiling"
]
RUNNABLE: tuple[RungKind, ...] = ("plain", "chain", "tree", "policy")
"""Rungs that can be run; the others are limits."""


class Rung(ResultRecord):
    """A rung of the ladder; all rungs are measured on the same resamples of prompts."""

    kind: RungKind
    label: str  # unique
    setting: str  # what was tuned, in words
    num_tokens: int
    calls: int
    verified_tokens: int
    num_accepted: int
    drafted_levels: int
    time_us: float  # machine time of all requests, see `replay.ladder.LoadClock`
    # tokens_per_s, mean_acceptance_length: pooled, sums over sums
    tokens_per_s: Interval
    mean_acceptance_length: Interval
    against_static: Interval  # tokens/s over those of the best static rung
    against_plain: Interval  # over those of plain decoding
    # (R - R_static) / (R_prob - R_static); None where the oracle's lead over the static rung is not
    # above 0 at both ends of its interval
    gap_closed: Interval | None
    policy_regret: Interval | None  # R_feat - R, tokens/s; None of a limit
    support: float  # share of the wanted expansions and rounds that the log contains
    is_marked: bool
    is_estimate: bool  # it rests on a fitted model, and is no bound in itself


class LossSplit(ResultRecord):
    """Where the rate between the best static rung and the clairvoyant is lost, tokens/s."""

    irreducible: Interval  # R_clair - R_prob, known from the outcome alone
    drafter: Interval  # R_prob - R_feat, known to the target and not to the drafter's features
    headroom: Interval  # R_prob / R_static - 1, a share: the most that any policy can gain


class SideSizes(ResultRecord):
    """Prompts on each side of a split."""

    train: int
    held_out: int


class Ladder(ResultRecord):
    """All rungs of one log at one load."""

    rungs: tuple[Rung, ...] = Field(min_length=1)  # from plain decoding to the ceiling
    best_static: str  # label of the faster static rung
    split: LossSplit
    calibration: dict[str, ProbabilityQuality]  # by estimate, on held-out prompts
    oracle_features: tuple[str, ...]  # used by the estimate of R_prob
    num_prompts: SideSizes
    batch_size: int
    is_sampled: bool  # texts were sampled, so R_prob uses the target's distribution at depth 1
    config: dict[str, Any]

    def rung(self, label: str) -> Rung:
        """One rung by its label."""
        return next(rung for rung in self.rungs if rung.label == label)


class LadderResult(Ladder, TraceFacts):
    """`ladder.json`."""

    kind: Literal["ladder"]

    @property
    def fastest(self) -> Rung:
        """The fastest rung that can be run, of those that can win."""
        found = [r for r in self.rungs if r.kind in RUNNABLE and self.can_win(r.label)]
        return max(found, key=lambda rung: rung.tokens_per_s.value)

    @property
    def to_run(self) -> Rung:
        """The fastest rung that can be run; the best static one where the lead is within its
        interval; plain decoding where neither beats that beyond chance."""
        best, static = self.fastest, self.rung(self.best_static)
        wanted = (best, static) if best.against_static.low > 1 else (static,)
        return next((rung for rung in wanted if rung.against_plain.low > 1), self.rung(PLAIN))
