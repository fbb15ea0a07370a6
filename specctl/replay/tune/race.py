"""The race: static settings in full, families by halving, one winner, judged on other prompts.

    training prompts  ── static sweep ──► best static = baseline
                      ── halving ───────► best of each family ──► the best of all = winner
    held-out prompts  ── once ──────────► winner against baseline, paired by prompt

Where batches are simulated, who meets whom is luck as well (a percent of the rate, with twelve
prompts in four slots): the best few of each group are compared again over several runs before one
of them is taken, and the held-out prompts are run as often.

The winner was picked for its luck as well as its worth, so nothing of the training prompts is
evidence: the interval is of prompts that no choice has looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from specctl.errors import UsageError
from specctl.policy.parse import policy_digest
from specctl.replay.tune.candidates import Candidate, Conditions, Grown, grow
from specctl.replay.tune.evaluation import Evaluator
from specctl.replay.tune.families import Family, static_families
from specctl.replay.tune.objective import FIGURES, Objective
from specctl.replay.tune.search import (
    FACTOR,
    SHORTLISTED,
    Searched,
    Trial,
    best,
    by_family,
    num_left,
    rung_sizes,
    score,
    search,
    shortlist,
)
from specctl.results import MARKED_BELOW
from specctl.stats import Split


@dataclass(frozen=True)
class Looked:
    """What became of a family's grid.

    Attributes:
        num_settings: scored. num_contradictory, num_beyond: see `Grown`.
        num_unsupported: scored, and left out because the log lacks over 1% of what they ask.
    """

    family: str
    num_settings: int
    num_contradictory: int
    num_beyond: int
    num_unsupported: int


@dataclass(frozen=True)
class Finalist:
    """A setting on both sides of the split; `num_settings` it was chosen from."""

    train: Trial
    held_out: Trial

    @property
    def candidate(self) -> Candidate:
        return self.train.candidate


@dataclass(frozen=True)
class RaceResult:
    """What a race found.

    Attributes:
        baseline: the best static setting of the training prompts.
        others: the best of each family there, in the order in which they were named.
        looked: family by family, the static ones first.
        rungs: prompts and settings of each rung of the halving.
        num_runs: behind each finalist's figures, on either side.
        left_out: families of which the log supports nothing.
    """

    objective: Objective
    split: Split
    baseline: Finalist
    others: tuple[Finalist, ...]
    looked: tuple[Looked, ...]
    rungs: tuple[tuple[int, int], ...]
    num_runs: int
    left_out: tuple[str, ...] = ()

    @property
    def finalists(self) -> tuple[Finalist, ...]:
        """The baseline and the others."""
        return (self.baseline, *self.others)

    @property
    def winner(self) -> Finalist:
        """The best on the training prompts; of equals the static one."""
        return max(self.finalists, key=lambda finalist: finalist.train.rate)

    @property
    def num_settings(self) -> int:
        """Settings that were scored, over all families."""
        return sum(looked.num_settings for looked in self.looked)


@dataclass(frozen=True)
class Race:
    """A race that is ready to run.

    Attributes:
        families: that were named. conditions: without a rate yet.
        factor, seed: of the halving.
        num_runs: of finalists and those that could be; 1 where evaluation is exact.
        drops_unsupported: a family of which the log supports nothing is left out, not refused.
    """

    families: tuple[Family, ...]
    conditions: Conditions
    split: Split
    objective: Objective
    factor: int = FACTOR
    seed: int = 0
    num_runs: int = 1
    drops_unsupported: bool = False

    @cached_property
    def statics(self) -> list[Grown]:
        """Static families, each policy once: the named ones repeat what is always there."""
        named = [family for family in self.families if family.is_static]
        always = static_families(self.conditions.support.top_k)
        return _each_once([grow(family, self.conditions) for family in (*always, *named)])

    def adaptive(self, tokens_per_s: float) -> list[Grown]:
        """The other families, given the best static rate."""
        conditions = replace(self.conditions, tokens_per_s=tokens_per_s)
        wanted = [family for family in self.families if not family.is_static]
        return [grow(f, conditions, may_be_empty=self.drops_unsupported) for f in wanted]

    @cached_property
    def num_scorings(self) -> int:
        """Scorings until the end, at most.

        Raises:
            UsageError, ArtifactError: see `grow`; all families are grown once, before any work.
        """
        adaptive = [len(g.candidates) for g in self.adaptive(tokens_per_s=1.0)]
        static = sum(len(g.candidates) for g in self.statics)
        rungs = num_left(adaptive, len(self._sizes), self.factor)
        again = [min(SHORTLISTED, n) for n in (static, *rungs[-1])] if self.num_runs > 1 else []
        searched = static + sum(sum(rung) for rung in rungs)
        return searched + self.num_runs * (sum(again) + 1 + len(adaptive))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return rung_sizes(len(self.split.train), self.factor)

    def run(self, evaluate: Evaluator) -> RaceResult:
        """Searches, then looks at the held-out prompts once.

        Raises:
            UsageError: a family of which the log supports nothing, or a limit that none meets.
        """
        static = self._search(self.statics, evaluate, halve=False)
        baseline = self._playoff(static.last, evaluate)
        rate = FIGURES["tokens_per_s"](baseline.evaluation.sums.sum(0))
        adaptive = self.adaptive(float(rate))
        found = self._search(adaptive, evaluate, halve=True)
        left_out = self._left_out(adaptive, found)
        fields = by_family(found.last).values()
        chosen = [self._playoff(trials, evaluate) for trials in fields]
        _check_met(self.objective, [baseline, *chosen])
        finalists = self._finalists([baseline, *chosen], evaluate)
        return RaceResult(
            objective=self.objective,
            split=self.split,
            baseline=finalists[0],
            others=tuple(finalists[1:]),
            looked=(*_looked(self.statics, static), *_looked(adaptive, found)),
            rungs=found.rungs,
            num_runs=self.num_runs,
            left_out=left_out,
        )

    def _search(self, grown: Sequence[Grown], evaluate: Evaluator, *, halve: bool) -> Searched:
        prompts = self.split.train
        sizes = self._sizes if halve else (len(prompts),)
        candidates = [candidate for g in grown for candidate in g.candidates]
        return search(
            candidates,
            evaluate,
            prompts,
            self.objective,
            sizes=sizes if candidates else (),
            factor=self.factor,
            seed=self.seed,
        )

    def _left_out(self, grown: Sequence[Grown], found: Searched) -> tuple[str, ...]:
        """Families of which nothing is left; refused unless that is allowed."""
        groups = by_family(found.last)
        names = tuple(one.family.name for one in grown if one.family.name not in groups)
        if names and not self.drops_unsupported:
            raise _unsupported(names[0], found)
        return names

    def _playoff(self, trials: Sequence[Trial], evaluate: Evaluator) -> Trial:
        """The best; where a run has luck of its own, after more runs of the best few."""
        if self.num_runs == 1:
            return best(trials)
        few, prompts = shortlist(trials), self.split.train
        return best(score(few, evaluate, prompts, self.objective, self.num_runs))

    def _finalists(self, trials: Sequence[Trial], evaluate: Evaluator) -> list[Finalist]:
        candidates = [trial.candidate for trial in trials]
        prompts = self.split.held_out
        held_out = score(candidates, evaluate, prompts, self.objective, self.num_runs)
        return [Finalist(train, held) for train, held in zip(trials, held_out, strict=True)]


def _each_once(grown: Sequence[Grown]) -> list[Grown]:
    """Without policies that an earlier family holds."""
    seen: set[str] = set()
    kept = []
    for one in grown:
        fresh = [c for c in one.candidates if policy_digest(c.policy) not in seen]
        seen |= {policy_digest(candidate.policy) for candidate in fresh}
        kept.append(replace(one, candidates=tuple(fresh)))
    return kept


def _unsupported(family: str, found: Searched) -> UsageError:
    return UsageError(
        f"--family {family}",
        expected=f"settings of which the log holds {MARKED_BELOW:.0%} of the expansions",
        found=f"none: {found.num_unsupported[family]} fell short",
        fix="collect a deeper or wider log, or give smaller values with --grid",
    )


def _check_met(objective: Objective, trials: Sequence[Trial]) -> None:
    """Refuses to choose among settings that all fail."""
    if max(trial.rate for trial in trials) > 0:
        return
    tpot_us = [FIGURES["tpot_us"](trial.evaluation.sums.sum(0)) for trial in trials]
    raise UsageError(
        "--tpot-limit-ms",
        expected="a limit that some request meets under some setting",
        found=f"{(objective.tpot_limit_us or 0) / 1e3:g}, while the fastest setting's mean "
        f"is {min(tpot_us) / 1e3:.3g}",
        fix="raise it, or offer a smaller load",
    )


def _looked(grown: Sequence[Grown], found: Searched) -> list[Looked]:
    return [
        Looked(
            family=g.family.name,
            num_settings=len(g.candidates),
            num_contradictory=g.num_contradictory,
            num_beyond=g.num_beyond,
            num_unsupported=found.num_unsupported.get(g.family.name, 0),
        )
        for g in grown
        if g.candidates
    ]
