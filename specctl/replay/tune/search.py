"""Successive halving, the choice on training prompts, and the verdict on held-out ones.

    training prompts  ── static sweep ──► best static = baseline
                      ── halving ───────► best of each family ──► the best of all = winner
    held-out prompts  ── once ──────────► winner against baseline, paired by prompt

Prompts are put in a seeded order once and rungs take ever longer heads of it, so that a rung
repeats the prompts of the one before. A family keeps its best share at every rung, so each reaches
the last rung, which is all training prompts.

Where batches are simulated, the company that a request meets is luck as well (a percent of the
rate, with twelve prompts in four slots): the best few of each group are compared again over
several runs before one of them is taken, and the held-out prompts are run as often.

The winner was picked for its luck as well as its worth, so nothing of the training prompts is
evidence: the interval is of prompts that no choice has looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.policy import policy_digest
from specctl.replay.tune.candidates import (
    Conditions,
    GrownFamily,
    PolicyCandidate,
    SearchedFamily,
    grow,
    static_families,
)
from specctl.replay.tune.evaluators import Evaluation, Evaluator
from specctl.replay.tune.objective import FIGURES, SUMS, Objective
from specctl.results import (
    MARKED_BELOW,
    FamilySearch,
    HalvingRung,
    HeldOutStanding,
    SideSizes,
    Standing,
    TrainStanding,
    TunedObjective,
    TuneVerdict,
)
from specctl.stats import Floats, Resamples, Split

FACTOR = 3
"""Growth of prompts, and share of settings that goes on, from rung to rung."""
SMALLEST_RUNG = 8
"""Prompts below which a ranking is mostly luck."""
FEWEST_KEPT = 2
SHORTLISTED = 4
"""Settings that are compared again over several runs, where one run has luck of its own."""


@dataclass(frozen=True)
class Trial:
    """A setting that was scored, and its rate there, tokens/s."""

    candidate: PolicyCandidate
    evaluation: Evaluation
    rate: float


@dataclass(frozen=True)
class HalvingResult:
    """The outcome of a halving.

    Attributes:
        last: trials on all prompts, by family in order of entry.
        num_unsupported: settings of which the log turned out to lack over 1%, by family.
        rungs: prompts and settings of each rung.
    """

    last: tuple[Trial, ...]
    num_unsupported: dict[str, int]
    rungs: tuple[tuple[int, int], ...]


def rung_sizes(num_prompts: int, factor: int = FACTOR) -> tuple[int, ...]:
    """Prompts of each rung, growing to all of them."""
    sizes = [num_prompts]
    while ceil(sizes[0] / factor) >= SMALLEST_RUNG:
        sizes.insert(0, ceil(sizes[0] / factor))
    return tuple(sizes)


def num_kept(num_settings: int, factor: int = FACTOR) -> int:
    """Settings of a family that go on."""
    return min(num_settings, max(FEWEST_KEPT, ceil(num_settings / factor)))


def halve(
    candidates: Sequence[PolicyCandidate],
    evaluate: Evaluator,
    prompts: Sequence[str],
    objective: Objective,
    *,
    sizes: Sequence[int],
    factor: int = FACTOR,
    seed: int = 0,
) -> HalvingResult:
    """Halves every family's settings until all prompts are used.

    Args:
        sizes: of the rungs, the last of them all prompts; a single one searches in full.
    """
    order = [prompts[i] for i in np.random.default_rng(seed).permutation(len(prompts))]
    left, rungs, trials = list(candidates), [], []
    unsupported = dict.fromkeys((c.family for c in candidates), 0)
    for place, size in enumerate(sizes):
        found = score(left, evaluate, order[:size], objective)
        rungs.append((size, len(found)))
        trials = [trial for trial in found if trial.evaluation.is_supported]
        for trial in found:
            unsupported[trial.candidate.family] += not trial.evaluation.is_supported
        if place < len(sizes) - 1:
            left = [
                trial.candidate
                for group in by_family(trials).values()
                for trial in _ranked(group)[: num_kept(len(group), factor)]
            ]
    return HalvingResult(tuple(trials), unsupported, tuple(rungs))


def score(
    candidates: Sequence[PolicyCandidate],
    evaluate: Evaluator,
    prompts: Sequence[str],
    objective: Objective,
    num_runs: int = 1,
) -> list[Trial]:
    """Scores settings on the same prompts."""
    found = evaluate([candidate.policy for candidate in candidates], prompts, num_runs)
    return [
        Trial(candidate, evaluation, float(objective.rate(evaluation.sums.sum(0))))
        for candidate, evaluation in zip(candidates, found, strict=True)
    ]


def by_family(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Trials of each family, in order."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.candidate.family, []).append(trial)
    return groups


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """By falling rate; stable, so equals stay in order of entry."""
    return sorted(trials, key=lambda trial: -trial.rate)


# ------------------------------------------------------------------------------- whole searches


@dataclass(frozen=True)
class Finalist:
    """A setting on both sides of the split."""

    train: Trial
    held_out: Trial

    @property
    def candidate(self) -> PolicyCandidate:
        return self.train.candidate


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        finalists: the baseline, the best static setting of the training prompts; then the best
            of each family there, in the order in which they were named.
        families: family by family, the static ones first.
        rungs: prompts and settings of each rung of the halving.
        num_runs: behind each finalist's figures, on either side.
        left_out: families of which the log supports nothing.
    """

    objective: Objective
    split: Split
    finalists: tuple[Finalist, ...]
    families: tuple[FamilySearch, ...]
    rungs: tuple[tuple[int, int], ...]
    num_runs: int
    left_out: tuple[str, ...] = ()

    @property
    def num_settings(self) -> int:
        """Settings that were scored, over all families."""
        return sum(family.num_settings for family in self.families)

    def candidate(self, label: str) -> PolicyCandidate:
        """The setting of a finalist."""
        return next(f.candidate for f in self.finalists if f.candidate.label == label)


@dataclass(frozen=True)
class TuneSearch:
    """A search that is ready to run.

    Attributes:
        families: that were named. conditions: without a rate yet.
        factor, seed: of the halving.
        num_runs: of finalists and those that could be; 1 where evaluation is exact.
        drops_unsupported: a family of which the log supports nothing is left out, not refused.
    """

    families: tuple[SearchedFamily, ...]
    conditions: Conditions
    split: Split
    objective: Objective
    factor: int = FACTOR
    seed: int = 0
    num_runs: int = 1
    drops_unsupported: bool = False

    @cached_property
    def statics(self) -> list[GrownFamily]:
        """Static families, each policy once: the named ones repeat the default ones."""
        named = [family for family in self.families if family.is_static]
        always = static_families(self.conditions.support.top_k)
        seen: set[str] = set()
        kept = []
        for one in (grow(family, self.conditions) for family in (*always, *named)):
            fresh = [c for c in one.candidates if policy_digest(c.policy) not in seen]
            seen |= {policy_digest(candidate.policy) for candidate in fresh}
            kept.append(replace(one, candidates=tuple(fresh)))
        return kept

    def adaptive(self, tokens_per_s: float) -> list[GrownFamily]:
        """The other families, given the best static rate."""
        conditions = replace(self.conditions, tokens_per_s=tokens_per_s)
        wanted = [family for family in self.families if not family.is_static]
        return [grow(f, conditions, may_be_empty=self.drops_unsupported) for f in wanted]

    @cached_property
    def num_scorings(self) -> int:
        """Scorings until the end, at most."""
        rungs = [[len(g.candidates) for g in self.adaptive(tokens_per_s=1.0)]]
        num_families, static = len(rungs[0]), sum(len(g.candidates) for g in self.statics)
        while len(rungs) < len(self._sizes):
            rungs.append([num_kept(number, self.factor) for number in rungs[-1]])
        again = [min(SHORTLISTED, n) for n in (static, *rungs[-1])] if self.num_runs > 1 else []
        searched = static + sum(sum(rung) for rung in rungs)
        return searched + self.num_runs * (sum(again) + 1 + num_families)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return rung_sizes(len(self.split.train), self.factor)

    def run(self, evaluate: Evaluator) -> SearchResult:
        """Searches, then looks at the held-out prompts once."""
        train, objective = self.split.train, self.objective
        static = self._halve(self.statics, evaluate, (len(train),))
        baseline = self._best(static.last, evaluate)
        rate = FIGURES["tokens_per_s"](baseline.evaluation.sums.sum(0))
        adaptive = self.adaptive(float(rate))
        found = self._halve(adaptive, evaluate, self._sizes)
        groups = by_family(found.last)
        left_out = tuple(g.family.name for g in adaptive if g.family.name not in groups)
        if left_out and not self.drops_unsupported:
            raise UsageError(
                f"--family {left_out[0]}",
                expected=f"settings of which the log holds {MARKED_BELOW:.0%} of the expansions",
                found=f"none: {found.num_unsupported[left_out[0]]} fell short",
                fix="collect a deeper or wider log, or give smaller values with --grid",
            )
        chosen = [baseline, *(self._best(trials, evaluate) for trials in groups.values())]
        if max(trial.rate for trial in chosen) <= 0:
            tpot_us = [FIGURES["tpot_us"](trial.evaluation.sums.sum(0)) for trial in chosen]
            raise UsageError(
                "--tpot-limit-ms",
                expected="a limit that some request meets under some setting",
                found=f"{(objective.tpot_limit_us or 0) / 1e3:g}, while the fastest setting's "
                f"mean is {min(tpot_us) / 1e3:.3g}",
                fix="raise it, or offer a smaller load",
            )
        candidates = [trial.candidate for trial in chosen]
        held_out = score(candidates, evaluate, self.split.held_out, objective, self.num_runs)
        return SearchResult(
            objective=objective,
            split=self.split,
            finalists=tuple(Finalist(*trials) for trials in zip(chosen, held_out, strict=True)),
            families=tuple(
                FamilySearch(
                    family=g.family.name,
                    num_settings=len(g.candidates),
                    num_contradictory=g.num_contradictory,
                    num_beyond=g.num_beyond,
                    num_unsupported=part.num_unsupported.get(g.family.name, 0),
                )
                for grown, part in ((self.statics, static), (adaptive, found))
                for g in grown
                if g.candidates
            ),
            rungs=found.rungs,
            num_runs=self.num_runs,
            left_out=left_out,
        )

    def _halve(
        self, grown: Sequence[GrownFamily], evaluate: Evaluator, sizes: Sequence[int]
    ) -> HalvingResult:
        candidates = [candidate for g in grown for candidate in g.candidates]
        return halve(
            candidates,
            evaluate,
            self.split.train,
            self.objective,
            sizes=sizes if candidates else (),
            factor=self.factor,
            seed=self.seed,
        )

    def _best(self, trials: Sequence[Trial], evaluate: Evaluator) -> Trial:
        """The best, the earlier one of equals; where a run has luck of its own, after more runs of
        the best few."""
        if self.num_runs > 1:
            few = [trial.candidate for trial in _ranked(trials)[:SHORTLISTED]]
            trials = score(few, evaluate, self.split.train, self.objective, self.num_runs)
        return max(trials, key=lambda trial: trial.rate)


# ----------------------------------------------------------------------------------- the verdict


def judge(found: SearchResult, *, seed: int = 0) -> TuneVerdict:
    """Figures of all finalists, on the same resamples of the held-out prompts and runs.

    The winner is the best on the training prompts, of equals the baseline. It is chosen if it is
    ahead of the baseline on held-out prompts, where nothing was chosen; else the baseline is.
    """
    resamples = resample(len(found.split.held_out), found.num_runs, seed)
    with np.errstate(divide="ignore", invalid="ignore"):  # a baseline may have no good token
        standings = tuple(_standing(f, found, resamples) for f in found.finalists)
    winner = max(found.finalists, key=lambda finalist: finalist.train.rate)
    best = standings[found.finalists.index(winner)]
    return TuneVerdict(
        objective=TunedObjective(**found.objective.to_json()),
        chosen=best.policy if best.is_ahead else standings[0].policy,
        beats_static=best.is_ahead,
        baseline=standings[0].policy,
        winner_on_train=best.policy,
        num_settings=found.num_settings,
        num_prompts=SideSizes(train=len(found.split.train), held_out=len(found.split.held_out)),
        num_runs=found.num_runs,
        rungs=tuple(HalvingRung(num_prompts=p, num_settings=s) for p, s in found.rungs),
        families=found.families,
        left_out=found.left_out,
        policies=standings,
    )


def resample(num_prompts: int, num_runs: int, seed: int) -> Resamples:
    """Resamples of prompts and, independently, of runs: `[B, U * P]` products of their weights.

    The pigeonhole bootstrap (Owen, Ann. Appl. Stat. 1(2), 2007): prompts differ, and so does the
    luck of a run, whatever the number of prompts. With one run it is that by prompt.
    """
    prompts = Resamples.draw(num_prompts, seed=seed)
    if num_runs == 1:
        return prompts
    runs = Resamples.draw(num_runs, seed=seed + 1).weights
    both = runs[:, :, None] * prompts.weights[:, None, :]
    return Resamples(both.reshape(len(both), -1))


def _standing(finalist: Finalist, found: SearchResult, resamples: Resamples) -> Standing:
    baseline, objective = found.finalists[0], found.objective
    train, held_out = finalist.train, finalist.held_out.evaluation
    ours, theirs = held_out.sums, baseline.held_out.evaluation.sums

    def lead(sums: Floats) -> Any:
        """From sums `[..., 2 S]`, ours before the baseline's, to tokens/s."""
        return objective.rate(sums[..., : len(SUMS)]) - objective.rate(sums[..., len(SUMS) :])

    has_limit = objective.tpot_limit_us is not None
    names = [name for name in FIGURES if has_limit or name != "good_share"]
    ahead = resamples.interval(np.concatenate([ours, theirs], 1), lead)
    static_rate = baseline.train.rate
    return Standing(
        policy=finalist.candidate.label,
        family=finalist.candidate.family,
        record=finalist.candidate.policy.model_dump(mode="json"),
        is_ahead=ahead.low > 0,
        train=TrainStanding(
            rate=train.rate,
            against=train.rate / static_rate if static_rate else float("nan"),
            num_rounds=train.evaluation.num_rounds,
            support=train.evaluation.support,
        ),
        held_out=HeldOutStanding(
            rate=resamples.interval(ours, objective.rate),
            against=resamples.ratio(ours, theirs, objective.rate),
            lead=ahead,
            **{name: resamples.interval(ours, FIGURES[name]) for name in names},
            num_rounds=held_out.num_rounds,
            support=held_out.support,
        ),
    )
