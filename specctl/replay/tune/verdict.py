"""What is chosen, and on what evidence: held-out prompts, paired with the best static setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specctl.replay.tune.candidates import Candidate
from specctl.replay.tune.objective import FIGURES, SUMS, Objective
from specctl.replay.tune.race import Finalist, RaceResult
from specctl.stats import Interval, Resamples


@dataclass(frozen=True)
class Standing:
    """A finalist on the held-out prompts; intervals are 95%, by prompt (and run).

    Attributes:
        rate: of the objective, tokens/s. against: over the baseline's, paired.
        lead: rate less the baseline's, tokens/s, paired.
        figures: see `objective.FIGURES`; a share of good tokens needs a limit.
        train_rate, train_against: on the training prompts, where it was picked: no evidence.
    """

    finalist: Finalist
    rate: Interval
    against: Interval
    lead: Interval
    figures: dict[str, Interval]
    train_rate: float
    train_against: float

    @property
    def candidate(self) -> Candidate:
        return self.finalist.candidate

    @property
    def is_ahead(self) -> bool:
        """Faster than the baseline by more than its interval."""
        return self.lead.low > 0

    def to_json(self) -> dict[str, Any]:
        train, held_out = self.finalist.train.evaluation, self.finalist.held_out.evaluation
        return {
            "policy": self.candidate.label,
            "family": self.candidate.family,
            "record": self.candidate.policy.model_dump(mode="json"),
            "is_ahead": self.is_ahead,
            "train": {
                "rate": self.train_rate,
                "against": self.train_against,
                "num_rounds": train.num_rounds,
                "support": train.support,
            },
            "held_out": {
                "rate": self.rate.to_json(),
                "against": self.against.to_json(),
                "lead": self.lead.to_json(),
                **{name: interval.to_json() for name, interval in self.figures.items()},
                "num_rounds": held_out.num_rounds,
                "support": held_out.support,
            },
        }


@dataclass(frozen=True)
class Verdict:
    """The race judged.

    Attributes:
        standings: the baseline first, then the best of each family.
        winner: index of the best on the training prompts, of equals the baseline.
    """

    race: RaceResult
    standings: tuple[Standing, ...]
    winner: int

    @property
    def beats_static(self) -> bool:
        """The winner is not the static setting, and is ahead of it where nothing was chosen."""
        return self.standings[self.winner].is_ahead

    @property
    def chosen(self) -> Standing:
        """What is written: the winner if it is ahead, else the static setting."""
        return self.standings[self.winner if self.beats_static else 0]

    def sentence(self) -> str:
        """The outcome in words."""
        baseline, winner = self.standings[0], self.standings[self.winner]
        name, num_settings = baseline.candidate.label, self.race.num_settings
        if self.winner == 0:
            return f"No family beats the best static setting, {name}, even on training prompts."
        span = f"{winner.against.value:.3f} [{winner.against.low:.3f}, {winner.against.high:.3f}]"
        picked = (
            f"{winner.candidate.label}, the best of {num_settings} settings on training prompts"
        )
        if self.beats_static:
            return f"{picked}, beats the best static setting, {name}, on held-out ones: × {span}."
        return (
            f"{picked}, does not beat the best static setting, {name}, by more than its interval "
            f"on held-out ones: × {span}. The static setting is written."
        )

    def to_json(self) -> dict[str, Any]:
        race = self.race
        return {
            "objective": race.objective.to_json(),
            "chosen": self.chosen.candidate.label,
            "beats_static": self.beats_static,
            "baseline": self.standings[0].candidate.label,
            "winner_on_train": self.standings[self.winner].candidate.label,
            "num_settings": race.num_settings,
            "num_prompts": {
                "train": len(race.split.train),
                "held_out": len(race.split.held_out),
            },
            "num_runs": race.num_runs,
            "rungs": [{"num_prompts": p, "num_settings": s} for p, s in race.rungs],
            "families": [vars(looked).copy() for looked in race.looked],
            "left_out": list(race.left_out),
            "policies": [standing.to_json() for standing in self.standings],
        }


def judge(race: RaceResult, *, seed: int = 0) -> Verdict:
    """Figures of all finalists, on the same resamples of the held-out prompts and runs."""
    resamples = resample(len(race.split.held_out), race.num_runs, seed)
    with np.errstate(divide="ignore", invalid="ignore"):  # a baseline may have no good token
        standings = [_standing(finalist, race, resamples) for finalist in race.finalists]
    return Verdict(race, tuple(standings), race.finalists.index(race.winner))


def resample(num_prompts: int, num_runs: int, seed: int) -> Resamples:
    """Resamples of prompts and, independently, of runs: `[B, U * P]` products of their weights.

    The pigeonhole bootstrap (Owen, Ann. Appl. Stat. 1(2), 2007): prompts differ, and so does the
    luck of who met whom in a run, whatever the number of prompts. With one run it is that by
    prompt.
    """
    prompts = Resamples.draw(num_prompts, seed=seed)
    if num_runs == 1:
        return prompts
    runs = Resamples.draw(num_runs, seed=seed + 1).weights
    both = runs[:, :, None] * prompts.weights[:, None, :]
    return Resamples(both.reshape(len(both), -1))


def _standing(finalist: Finalist, race: RaceResult, resamples: Resamples) -> Standing:
    ours, theirs = finalist.held_out.evaluation.sums, race.baseline.held_out.evaluation.sums
    rate = race.objective.rate
    pair = np.concatenate([ours, theirs], 1)
    return Standing(
        finalist=finalist,
        rate=resamples.interval(ours, rate),
        against=resamples.ratio(ours, theirs, rate),
        lead=resamples.interval(pair, _lead(race.objective)),
        figures={n: resamples.interval(ours, f) for n, f in _told(race.objective)},
        train_rate=finalist.train.rate,
        train_against=_over(finalist.train.rate, race.baseline.train.rate),
    )


def _told(objective: Objective) -> list[tuple[str, Any]]:
    has_limit = objective.tpot_limit_us is not None
    return [(name, f) for name, f in FIGURES.items() if has_limit or name != "good_share"]


def _lead(objective: Objective) -> Any:
    """From sums `[..., 2 S]`, ours before the baseline's, to tokens/s."""
    return lambda sums: (
        objective.rate(sums[..., : len(SUMS)]) - objective.rate(sums[..., len(SUMS) :])
    )


def _over(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("nan")
