"""Successive halving: many settings on few prompts, few settings on all.

Prompts are put in a seeded order once and rungs take ever longer heads of it, so that a rung
repeats the prompts of the one before. A family keeps its best share at every rung, so each reaches
the last rung, which is all training prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from specctl.replay.tune.candidates import Candidate
from specctl.replay.tune.evaluation import Evaluation, Evaluator
from specctl.replay.tune.objective import Objective

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

    candidate: Candidate
    evaluation: Evaluation
    rate: float


@dataclass(frozen=True)
class Searched:
    """What a search looked at.

    Attributes:
        last: trials on all prompts, by family in order of entry.
        num_unsupported: settings that the log turned out to lack over 1% of, by family.
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


def num_left(num_settings: Sequence[int], num_rungs: int, factor: int = FACTOR) -> list[list[int]]:
    """Settings of each family at every rung, `[rungs][families]`, if the log supports all."""
    rungs = [list(num_settings)]
    while len(rungs) < num_rungs:
        rungs.append([num_kept(number, factor) for number in rungs[-1]])
    return rungs


def search(
    candidates: Sequence[Candidate],
    evaluate: Evaluator,
    prompts: Sequence[str],
    objective: Objective,
    *,
    sizes: Sequence[int],
    factor: int = FACTOR,
    seed: int = 0,
) -> Searched:
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
            left = _best_of_each(trials, factor)
    return Searched(tuple(trials), unsupported, tuple(rungs))


def score(
    candidates: Sequence[Candidate],
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


def best(trials: Sequence[Trial]) -> Trial:
    """The highest rate, the earlier one of equals."""
    return max(trials, key=lambda trial: trial.rate)


def shortlist(trials: Sequence[Trial]) -> list[Candidate]:
    """The best few, best first; of equals the earlier ones."""
    return [trial.candidate for trial in _ranked(trials)[:SHORTLISTED]]


def by_family(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Trials of each family, in order."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.candidate.family, []).append(trial)
    return groups


def _best_of_each(trials: Sequence[Trial], factor: int) -> list[Candidate]:
    """The best share of every family."""
    kept = []
    for group in by_family(trials).values():
        kept += [trial.candidate for trial in _ranked(group)[: num_kept(len(group), factor)]]
    return kept


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """By falling rate; stable, so equals stay in order of entry."""
    return sorted(trials, key=lambda trial: -trial.rate)
