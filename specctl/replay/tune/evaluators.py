"""Scores of settings on some prompts: one request at a time, exactly, or in simulated batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specctl.logs.positions import Floats, Ints, Positions
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy
from specctl.replay.batch_simulation import Load, Packing, Simulation, simulate_runs
from specctl.replay.cost.model import CostModel
from specctl.replay.ladder.static import static_submissions, support_of_rounds, tally_static
from specctl.replay.ladder.tally import LoadClock, column, tally_rounds
from specctl.replay.rounds import replay
from specctl.replay.submissions import Submissions, shares, submissions_of
from specctl.replay.tune.objective import Objective
from specctl.results import MARKED_BELOW
from specctl.stats import sums_by

POLICIES_A_PASS = 32
"""Policies or shapes decided in one pass over the log: their rounds, or 28 bytes a position each,
are in memory together. A shape whose trees a budget looks at takes 24 bytes a node and has a pass
of its own."""


@dataclass(frozen=True)
class Evaluation:
    """One policy on P prompts, U times.

    Attributes:
        sums: `[U * P, S]`, columns `ladder.tally.SUMS`; run after run, prompts in the order in
            which they were given.
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


def by_prompt(positions: Positions, codes: Ints, sums: Floats, prompts: Sequence[str]) -> Floats:
    """`[P, S]` from sums `[M, S]` of requests.

    Args:
        codes: `[M]`, the prompt of each request, into `positions.prompt_ids`.
    """
    place = {prompt: index for index, prompt in enumerate(prompts)}
    rows = np.array([place.get(name, -1) for name in positions.prompt_ids])[codes]
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
        found: dict[int, Evaluation] = {}
        for index, positions, sums, support in self._tallied(policies, self.log.only(prompts)):
            # Alone on the machine, a request waits for its own rounds and nothing else.
            tokens, time_us = column(sums, "tokens"), column(sums, "time_us")
            good = tokens * self.objective.is_good(tokens, time_us)
            whole = np.column_stack([sums, time_us, time_us, good])
            found[index] = Evaluation(
                by_prompt(positions, positions.prompt, whole, prompts), support
            )
            self.on_setting()
        return [found[index] for index in range(len(policies))]

    def _tallied(
        self, policies: Sequence[Policy], log: DenseLog
    ) -> Iterator[tuple[int, Positions, Floats, float]]:
        """Places of policies, with their sums by request and their support."""
        others = dict(enumerate(policies))
        for index, of in static_submissions(log, policies, self.num_threads):
            del others[index]
            yield index, of.positions, tally_static(of, self.clock), support_of_rounds(of)
        left = list(others)
        for group in (left[i : i + POLICIES_A_PASS] for i in range(0, len(left), POLICIES_A_PASS)):
            wanted = [policies[index] for index in group]
            runs = replay(log, wanted, with_bounds=False, num_threads=self.num_threads)
            for index, run in zip(group, runs, strict=True):
                yield index, run.positions, tally_rounds(run, self.clock), run.outcomes.support


# ---------------------------------------------------------------------------- simulated batches


@dataclass(frozen=True)
class BatchEvaluator:
    """`replay.batch_simulation` on some prompts, the whole run from the first request to the last.

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
        found: dict[int, Evaluation] = {}
        for indices, of in self._submitted(policies, self.log.only(prompts)):
            for index in indices:
                found[index] = self._score(of, policies[index], prompts, num_runs)
        return [found[index] for index in range(len(policies))]

    def _submitted(
        self, policies: Sequence[Policy], log: DenseLog
    ) -> Iterator[tuple[list[int], Submissions]]:
        """Places of policies of one shape, with the submissions of that shape."""
        others = dict(enumerate(policies))
        for index, of in static_submissions(log, policies, self.num_threads):
            del others[index]
            yield [index], of
        alone: dict[str, list[int]] = {}
        shared: dict[str, list[int]] = {}
        for index, policy in others.items():
            groups = shared if shares(policy) else alone
            groups.setdefault(policy.shape.model_dump_json(), []).append(index)
        left, size = list(alone.values()), POLICIES_A_PASS
        passes = [left[at : at + size] for at in range(0, len(left), size)]
        for together in (*passes, *([group] for group in shared.values())):
            firsts = [policies[group[0]] for group in together]
            found = submissions_of(log, firsts, num_threads=self.num_threads)
            yield from zip(together, found, strict=True)

    def _score(
        self, submissions: Submissions, policy: Policy, prompts: Sequence[str], num_runs: int
    ) -> Evaluation:
        sums, supports, positions = [], [], submissions.positions
        for run in simulate_runs(
            submissions,
            self.load,
            self.model,
            num_runs=num_runs,
            seed=self.seed,
            budget=policy.budget,
            packing=self.packing,
            on_run=self.on_setting,
        ):
            counted = request_sums(run, self.objective)
            sums.append(by_prompt(positions, positions.prompt[run.logged], counted, prompts))
            supports.append(submissions.outcomes.at(run.rounds.row).support)
        return Evaluation(np.concatenate(sums), min(supports))


def request_sums(run: Simulation, objective: Objective) -> Floats:
    """`[M, S]`, columns `ladder.tally.SUMS`, of the M requests of a run."""
    rounds, times = run.rounds, run.timeline
    share_us = ((times.end_us - times.start_us) / rounds.batch_sizes)[rounds.step]
    levels = run.submissions.outcomes.levels[rounds.row]
    counts = (np.ones(len(rounds.row)), run.emitted, rounds.accepted, rounds.verified, levels)
    sums = sums_by(rounds.serial, len(run.logged), np.column_stack([*counts, share_us]))
    tokens, time_us = column(sums, "tokens"), column(sums, "time_us")
    request_us = times.finish_us - times.first_token_us
    duration_us = float(times.end_us[-1] - times.start_us[0])
    wall_us = time_us if run.load.is_closed else np.full_like(time_us, duration_us / len(time_us))
    good = tokens * objective.is_good(tokens, request_us)
    return np.column_stack([sums, request_us, wall_us, good])
