"""Scores of settings on some prompts: one request at a time, exactly, or in simulated batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specctl.logs.positions import Floats, Ints
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy
from specctl.replay.batch_simulation import Load, Packing, Simulation, simulate
from specctl.replay.cost.model import CostModel
from specctl.replay.ladder.static import StaticDecision, static_decisions
from specctl.replay.ladder.tally import SUMS as TALLIED
from specctl.replay.ladder.tally import LoadClock, Tally, tally, tally_rounds
from specctl.replay.outcomes import Outcomes
from specctl.replay.rounds import replay
from specctl.replay.submissions import Submissions, shares, submissions_of
from specctl.replay.tune.objective import Objective, column
from specctl.replay.walk import walk
from specctl.results import MARKED_BELOW
from specctl.stats import sums_by

POLICIES_A_PASS = 32
"""Policies replayed in one pass over the log: their rounds are in memory together."""
SHAPES_A_PASS = 32
"""Shapes decided in one pass over the log, 28 bytes a position each; a shape whose trees a budget
looks at takes 24 bytes a node and has a pass of its own."""


@dataclass(frozen=True)
class Evaluation:
    """One policy on P prompts, U times.

    Attributes:
        sums: `[U * P, S]`, columns `objective.SUMS`; run after run, prompts in the order in which
            they were given.
        support: share of the wanted expansions and rounds that the log contains.
    """

    sums: Floats
    support: float

    @property
    def is_supported(self) -> bool:
        """Whether the log holds enough to score it."""
        return self.support >= MARKED_BELOW

    @property
    def num_rounds(self) -> int:
        """Decoding rounds of all prompts and runs."""
        return int(column(self.sums, "calls").sum())


class Evaluator(Protocol):
    """Scores policies on some prompts of a log; it never reads any other."""

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Evaluation]:
        """One evaluation a policy, in order. Equal arguments give equal results.

        Args:
            num_runs: U, in different orders of requests; 1 where the order changes nothing.
        """
        ...


def by_prompt(
    prompt_ids: Sequence[str], codes: Ints, sums: Floats, prompts: Sequence[str]
) -> Floats:
    """`[P, S]` from sums `[M, S]` of requests.

    Args:
        codes: `[M]`, the prompt of each request, into `prompt_ids`.
    """
    place = {prompt: index for index, prompt in enumerate(prompts)}
    rows = np.array([place.get(name, -1) for name in prompt_ids])[codes]
    return sums_by(rows, len(prompts), sums)


# ------------------------------------------------------------------------- one request at a time


@dataclass(frozen=True)
class SequentialEvaluator:
    """Batch size 1, the next request waiting; times are of rounds, as `specctl replay` gives them.

    Attributes:
        clock: of batch size 1.
        on_setting: called as each policy is scored.
    """

    log: DenseLog
    clock: LoadClock
    objective: Objective
    num_threads: int = 1
    on_setting: Callable[[], None] = lambda: None

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Evaluation]:
        assert num_runs == 1, "every run would be the same"
        part = self.log.only(prompts)
        found: dict[int, Evaluation] = {}
        for one in static_decisions(part, policies, self.num_threads):
            positions = one.summary.positions
            visited = walk(positions, one.decided.accepted + 1)
            counted = self._sums(tally(positions, one.decided, self.clock))
            sums = by_prompt(positions.prompt_ids, positions.prompt, counted, prompts)
            found[one.index] = Evaluation(sums, 1 - float(one.missing[visited].mean()))
            self.on_setting()
        others = [i for i in range(len(policies)) if i not in found]
        for first in range(0, len(others), POLICIES_A_PASS):
            group = others[first : first + POLICIES_A_PASS]
            of = [policies[i] for i in group]
            runs = replay(part, of, with_bounds=False, num_threads=self.num_threads)
            for index, run in zip(group, runs, strict=True):
                positions, counted = run.positions, self._sums(tally_rounds(run, self.clock))
                sums = by_prompt(positions.prompt_ids, positions.prompt, counted, prompts)
                found[index] = Evaluation(sums, run.outcomes.support)
                self.on_setting()
        return [found[index] for index in range(len(policies))]

    def _sums(self, tallied: Tally) -> Floats:
        """`[Q, S]`; alone on the machine, a request waits for its own rounds and nothing else."""
        named = dict(zip(TALLIED, tallied.sums.T, strict=True))
        tokens, time_us = named["tokens"], named["time_us"]
        good = tokens * self.objective.is_good(tokens, time_us)
        counts = [named[name] for name in ("calls", "tokens", "accepted", "verified")]
        return np.stack([*counts, time_us, time_us, time_us, good], 1)


# ---------------------------------------------------------------------------- simulated batches


@dataclass(frozen=True)
class BatchEvaluator:
    """`replay.batch` on some prompts, the whole run from the first request to the last.

    All settings meet the same requests in the same order, so sums are paired by prompt and run. A
    step's time, prompts read in it included, is shared equally by the requests in it.

    Attributes:
        packing: how a batch of unequal trees is verified, see `Packing`.
        seed: of the order of requests and of their arrivals.
        on_setting: called as each run of a policy is scored.
    """

    log: DenseLog
    model: CostModel
    load: Load
    objective: Objective
    packing: Packing = "ragged"
    seed: int = 0
    num_threads: int = 1
    on_setting: Callable[[], None] = lambda: None

    def __call__(
        self, policies: Sequence[Policy], prompts: Sequence[str], num_runs: int = 1
    ) -> list[Evaluation]:
        part = self.log.only(prompts)
        found: dict[int, Evaluation] = {}
        for one in static_decisions(part, policies, self.num_threads):
            of = as_submissions(one)
            found[one.index] = self._score(of, one.policy, prompts, num_runs)
        others = [i for i in range(len(policies)) if i not in found]
        for indices, submissions in self._prepared(part, policies, others):
            for index in indices:
                found[index] = self._score(submissions, policies[index], prompts, num_runs)
        return [found[index] for index in range(len(policies))]

    def _prepared(
        self, part: DenseLog, policies: Sequence[Policy], indices: Sequence[int]
    ) -> Iterator[tuple[list[int], Submissions]]:
        """Policies of one shape, with the submissions of that shape."""
        of_shape: dict[tuple[str, bool], list[int]] = {}
        for index in indices:
            key = policies[index].shape.model_dump_json(), shares(policies[index])
            of_shape.setdefault(key, []).append(index)
        alone = [group for (_, is_shared), group in of_shape.items() if not is_shared]
        shared = [[group] for (_, is_shared), group in of_shape.items() if is_shared]
        passes = [alone[at : at + SHAPES_A_PASS] for at in range(0, len(alone), SHAPES_A_PASS)]
        for groups in (*passes, *shared):
            firsts = [policies[group[0]] for group in groups]
            yield from zip(
                groups, submissions_of(part, firsts, num_threads=self.num_threads), strict=True
            )

    def _score(
        self, submissions: Submissions, policy: Policy, prompts: Sequence[str], num_runs: int
    ) -> Evaluation:
        sums, supports = [], []
        for number in range(num_runs):
            run = simulate(
                submissions,
                self.load,
                self.model,
                budget=policy.budget,
                seed=(self.seed, number),
                packing=self.packing,
            )
            self.on_setting()
            positions = submissions.positions
            counted = request_sums(run, self.objective)
            codes = positions.prompt[run.logged]
            sums.append(by_prompt(positions.prompt_ids, codes, counted, prompts))
            supports.append(submissions.outcomes.at(run.rounds.row).support)
        return Evaluation(np.concatenate(sums), min(supports))


def request_sums(run: Simulation, objective: Objective) -> Floats:
    """`[M, S]`, columns `objective.SUMS`, of the M requests of a run."""
    rounds, times = run.rounds, run.timeline
    share_us = ((times.end_us - times.start_us) / rounds.batch_sizes)[rounds.step]
    calls, tokens, accepted, verified, time_us = (
        np.bincount(rounds.serial, values, len(run.logged)).astype(np.float64)
        for values in (None, run.emitted, rounds.accepted, rounds.verified, share_us)
    )
    request_us = times.finish_us - times.first_token_us
    duration_us = float(times.end_us[-1] - times.start_us[0])
    wall_us = time_us if run.load.is_closed else np.full_like(time_us, duration_us / len(time_us))
    good = tokens * objective.is_good(tokens, request_us)
    return np.stack([calls, tokens, accepted, verified, time_us, request_us, wall_us, good], 1)


def as_submissions(one: StaticDecision) -> Submissions:
    """A static setting as the simulation takes it; a round that lacks anything counts as open."""
    decided = one.decided
    levels, width = np.asarray(decided.levels), np.asarray(decided.level_width)
    outcomes = Outcomes.of(
        decided.accepted,
        verified=decided.verified,
        levels=levels,
        wanted=1 + (levels - 1) * width,
        missing=one.missing,
        censored=one.missing,
    )
    max_tokens = int(np.max(decided.verified))
    return Submissions(one.policy, one.summary.positions, outcomes, max_tokens)
