"""Successive halving, the choice on training prompts, and the verdict on held-out ones.

    training prompts  ── static sweep ──► best static = baseline
                      ── halving ───────► best of each family ──► the best of all = winner
    held-out prompts  ── once ──────────► winner against baseline, paired by prompt

Prompts are put in a seeded order once. Each rung takes a longer head of it than the one before, the
last rung all training prompts. A family keeps its best share at every rung, so each family reaches
the last.

In simulated batches, the order of requests adds noise (a percent of the rate, with twelve prompts
in four slots): the best few of each group are compared again over several runs, and the held-out
prompts are run as often.

A winner on training prompts owes a part of its rate to chance, so the verdict rests on held-out
prompts alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from specctl.errors import UsageError
from specctl.policy import Policy, RootOnly, policy_digest
from specctl.replay.facts import MARKED_BELOW, PLAIN
from specctl.replay.ladder.result import SideSizes
from specctl.replay.metrics import Measure, Sums, ratio
from specctl.replay.tune.candidates import (
    Conditions,
    Grown,
    PolicyCandidate,
    SearchedFamily,
    grow,
    static_families,
)
from specctl.replay.tune.evaluators import FIGURES, Evaluator, Objective
from specctl.replay.tune.verdict import (
    HalvingRung,
    HeldOutStanding,
    Standing,
    TrainStanding,
    TuneVerdict,
)
from specctl.stats import Split, resample

FACTOR = 3
"""Growth of prompts, and shrinkage of settings, from rung to rung."""
SMALLEST_RUNG = 8
"""Fewest prompts for a ranking."""
FEWEST_KEPT = 2
SHORTLISTED = 4
"""Settings that are compared again over several runs of simulated batches."""


@dataclass(frozen=True)
class Trial:
    """A scored setting: its sums and its rate, tokens/s."""

    candidate: PolicyCandidate
    sums: Sums
    rate: float

    @property
    def family(self) -> str:
        return self.candidate.family


def rung_sizes(num_prompts: int, factor: int = FACTOR) -> tuple[int, ...]:
    """Prompts of each rung, growing to all of them."""
    sizes = [num_prompts]
    while ceil(sizes[0] / factor) >= SMALLEST_RUNG:
        sizes.insert(0, ceil(sizes[0] / factor))
    return tuple(sizes)


def num_kept(num_settings: int, factor: int = FACTOR) -> int:
    """Settings of a family that reach the next rung."""
    return min(num_settings, max(FEWEST_KEPT, ceil(num_settings / factor)))


def by_family(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Trials of each family, in order."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.family, []).append(trial)
    return groups


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Trials by falling rate; equals stay in order."""
    return sorted(trials, key=lambda trial: -trial.rate)


# ------------------------------------------------------------------------------- whole searches


@dataclass(frozen=True)
class TuneSearch:
    """A search that is ready to run."""

    families: tuple[SearchedFamily, ...]  # as named
    conditions: Conditions  # without a rate
    split: Split
    objective: Objective
    factor: int = FACTOR  # of the halving
    seed: int = 0  # of its order of prompts, and of the intervals
    num_runs: int = 1  # of the best few and of finalists; 1 for exact evaluation
    drops_unsupported: bool = False  # leaves out a family without a supported setting
    barred: frozenset[str] = frozenset()  # families that are scored and cannot win
    # whether the clock has the time of a policy's decisions; others cannot win
    is_timed: Callable[[Policy], bool] = lambda _: True
    time_error: float | None = None  # of the clock, see `stats.with_time_error`

    @property
    def fitted(self) -> set[str]:
        """Names of the families that are artifacts."""
        return {family.name for family in self.families if family.artifact is not None}

    @cached_property
    def statics(self) -> list[Grown]:
        """Static families, named and default ones, each policy once."""
        named = [family for family in self.families if family.is_static]
        always = static_families(self.conditions.support.top_k)
        is_engine = self.conditions.runs is not None  # an engine may run no trees
        grown = [grow(family, self.conditions, may_be_empty=is_engine) for family in always]
        digests: set[str] = set()
        kept = []
        for one in (*grown, *(grow(family, self.conditions) for family in named)):
            fresh = [c for c in one.candidates if policy_digest(c.policy) not in digests]
            digests |= {policy_digest(candidate.policy) for candidate in fresh}
            if fresh or one.searched.num_not_run:
                searched = one.searched.model_copy(update={"num_settings": len(fresh)})
                kept.append(Grown(fresh, searched))
        return kept

    def adaptive(self, tokens_per_s: float) -> list[Grown]:
        """The other families, at the best static rate."""
        conditions = replace(self.conditions, tokens_per_s=tokens_per_s)
        wanted = [family for family in self.families if not family.is_static]
        return [grow(f, conditions, may_be_empty=self.drops_unsupported) for f in wanted]

    @cached_property
    def num_scorings(self) -> int:
        """Upper bound on the number of scorings."""
        rungs = [[len(one.candidates) for one in self.adaptive(tokens_per_s=1.0)]]
        num_families, static = len(rungs[0]), sum(len(one.candidates) for one in self.statics)
        while len(rungs) < len(rung_sizes(len(self.split.train), self.factor)):
            rungs.append([num_kept(number, self.factor) for number in rungs[-1]])
        again = [min(SHORTLISTED, n) for n in (static, *rungs[-1])] if self.num_runs > 1 else []
        searched = static + sum(sum(rung) for rung in rungs)
        return searched + self.num_runs * (sum(again) + 3 + num_families)

    def run(self, evaluate: Evaluator) -> tuple[TuneVerdict, PolicyCandidate]:
        """Searches, then scores the finalists on the held-out prompts once.

        The winner is the fastest eligible finalist on training prompts, the baseline among equals.
        It is chosen if it is ahead of the baseline on held-out prompts; else the baseline is, and
        plain decoding if neither is faster beyond chance.

        Returns:
            The verdict, and the chosen setting.
        """
        num_train = len(self.split.train)
        found, _, lacking = self.halve(self.statics, evaluate, (num_train,))
        baseline = self._best(found, evaluate)
        grown = self.adaptive(float(ratio("tokens_per_s", baseline.sums.totals)))
        found, rungs, lacked = self.halve(grown, evaluate, rung_sizes(num_train, self.factor))
        groups = by_family(found)
        left_out = tuple(name for one in grown if (name := one.searched.family) not in groups)
        if left_out and not self.drops_unsupported:
            raise UsageError(
                f"--family {left_out[0]}: the log holds less than {MARKED_BELOW:.0%} of the "
                f"expansions of all its {lacked[left_out[0]]} settings",
                hint="collect a deeper or wider log, or give smaller values with --grid",
            )
        finalists = [baseline, *(self._best(trials, evaluate) for trials in groups.values())]
        self._check_limit(finalists)
        shown = finalists
        if baseline.candidate.label != PLAIN:  # the search of an engine has no such setting
            plain = PolicyCandidate(PLAIN, PLAIN, Policy(shape=RootOnly()))
            shown = [*finalists, *self._score([plain], evaluate, self.split.train, self.num_runs)]
        candidates = [trial.candidate for trial in shown]
        held_out = self._score(candidates, evaluate, self.split.held_out, self.num_runs)
        policies = self._standings(shown, held_out)
        # Both parts of the search have their own counts: a static family may be in both.
        families = [
            one.searched.model_copy(update={"num_unsupported": counts[one.searched.family]})
            for part, counts in ((self.statics, lacking), (grown, lacked))
            for one in part
            if one.candidates or one.searched.num_not_run
        ]
        may_win = [
            index
            for index, one in enumerate(finalists)
            if one.family not in self.barred and self.is_timed(one.candidate.policy)
        ]
        winner = max(may_win, key=lambda index: finalists[index].rate)
        [plain_decoding] = [i for i, one in enumerate(policies) if one.policy == PLAIN]
        wanted = (winner, 0) if policies[winner].is_ahead else (0,)
        chosen = next((i for i in wanted if policies[i].held_out.pays), plain_decoding)
        verdict = TuneVerdict(
            objective=self.objective,
            chosen=policies[chosen].policy,
            beats_static=policies[winner].is_ahead,
            baseline=policies[0].policy,
            winner_on_train=policies[winner].policy,
            num_settings=sum(family.num_settings for family in families),
            num_prompts=SideSizes(train=num_train, held_out=len(self.split.held_out)),
            num_runs=self.num_runs,
            rungs=rungs,
            families=tuple(families),
            left_out=left_out,
            time_error=self.time_error,
            policies=policies,
        )
        return verdict, candidates[chosen]

    def halve(
        self, grown: Sequence[Grown], evaluate: Evaluator, sizes: Sequence[int]
    ) -> tuple[list[Trial], tuple[HalvingRung, ...], Counter[str]]:
        """Halves every family's settings until all training prompts are used.

        Args:
            sizes: prompts of the rungs, all of them in the last; a single rung searches in full.

        Returns:
            Trials on all prompts, in order of entry; the rungs; and by family, the number of
            settings of which the log lacks over 1%.
        """
        prompts = self.split.train
        order = [prompts[i] for i in np.random.default_rng(self.seed).permutation(len(prompts))]
        left = [candidate for one in grown for candidate in one.candidates]
        rungs, unsupported = [], Counter[str]()
        trials: list[Trial] = []
        for size in sizes if left else ():
            found = self._score(left, evaluate, order[:size])
            rungs.append(HalvingRung(num_prompts=size, num_settings=len(found)))
            unsupported.update(t.family for t in found if not t.sums.is_supported)
            trials = [trial for trial in found if trial.sums.is_supported]
            left = [
                trial.candidate
                for group in by_family(trials).values()
                for trial in _ranked(group)[: num_kept(len(group), self.factor)]
            ]
        return trials, tuple(rungs), unsupported

    def _score(
        self,
        candidates: Sequence[PolicyCandidate],
        evaluate: Evaluator,
        prompts: Sequence[str],
        num_runs: int = 1,
    ) -> list[Trial]:
        """Scores settings on the same prompts."""
        found = evaluate([one.policy for one in candidates], prompts, num_runs)
        return [
            Trial(candidate, sums, float(self.objective.rate(sums.totals)))
            for candidate, sums in zip(candidates, found, strict=True)
        ]

    def _best(self, trials: Sequence[Trial], evaluate: Evaluator) -> Trial:
        """The fastest trial, the earlier one of equals; in simulated batches, over more runs of
        the best few."""
        if self.num_runs > 1:
            few = [trial.candidate for trial in _ranked(trials)[:SHORTLISTED]]
            trials = self._score(few, evaluate, self.split.train, self.num_runs)
        return max(trials, key=lambda trial: trial.rate)

    def _check_limit(self, finalists: Sequence[Trial]) -> None:
        """Refuses a limit that no setting meets."""
        if max(trial.rate for trial in finalists) > 0:
            return
        tpot_us = [float(ratio("tpot_us", trial.sums.totals)) for trial in finalists]
        raise UsageError(
            "no request under any setting is within --tpot-limit-ms "
            f"{(self.objective.tpot_limit_us or 0) / 1000.0:g}; the fastest setting's mean is "
            f"{min(tpot_us) / 1000.0:.3g}",
            hint="raise it, or offer a smaller load",
        )

    def _standings(self, train: Sequence[Trial], held_out: Sequence[Trial]) -> tuple[Standing, ...]:
        """Figures of all finalists, on the same resamples of the held-out prompts and runs."""
        resamples = resample(len(self.split.held_out), self.num_runs, self.seed)
        measure = Measure(resamples, self.time_error, self.seed)
        names = [
            n for n in FIGURES if n != "good_share" or self.objective.tpot_limit_us is not None
        ]
        drawn = [measure.drawn(one.sums, policy_digest(one.candidate.policy)) for one in held_out]
        rates, static_rate = [self.objective.rate(totals) for totals in drawn], train[0].rate
        [plain] = [i for i, one in enumerate(held_out) if one.candidate.label == PLAIN]
        standings = []
        for trial, scored, totals, rate in zip(train, held_out, drawn, rates, strict=True):
            lead = resamples.read(rate - rates[0])
            standings.append(
                Standing(
                    policy=trial.candidate.label,
                    family=trial.family,
                    record=trial.candidate.policy.model_dump(mode="json"),
                    is_ahead=lead.low > 0,
                    train=TrainStanding(
                        rate=trial.rate,
                        against=trial.rate / static_rate if static_rate else float("nan"),
                        num_rounds=int(trial.sums.totals["calls"]),
                        support=trial.sums.support,
                    ),
                    held_out=HeldOutStanding(
                        rate=resamples.read(rate),
                        against=measure.against(rate, rates[0]),
                        against_plain=measure.against(rate, rates[plain]),
                        lead=lead,
                        **measure.figures(names, totals),
                        num_rounds=int(scored.sums.totals["calls"]),
                        support=scored.sums.support,
                    ),
                )
            )
        return tuple(standings)
