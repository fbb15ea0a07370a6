"""Several requests at a time: every setting is simulated under the same load and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Floats
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy
from specctl.replay.batch.load import Load
from specctl.replay.batch.simulate import Simulation, simulate
from specctl.replay.batch.submissions import Submissions, shares, submissions_of
from specctl.replay.batch.timing import Packing
from specctl.replay.cost.model import CostModel
from specctl.replay.tune.evaluation import Evaluation, by_prompt, is_static
from specctl.replay.tune.objective import Objective
from specctl.replay.tune.statics import StaticDecision, static_decisions

SHAPES_A_PASS = 32
"""Shapes decided in one pass over the log, 24 bytes a position each; a shape whose trees a budget
looks at takes 24 bytes a node and has a pass of its own."""


@dataclass(frozen=True)
class BatchEvaluator:
    """`replay.batch` on the prompts asked for, the whole run from the first request to the last.

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
        static = [i for i, policy in enumerate(policies) if is_static(policy)]
        for one in static_decisions(part, [policies[i] for i in static], self.num_threads):
            of = as_submissions(one)
            found[static[one.index]] = self._score(of, one.policy, prompts, num_runs)
        others = [i for i in range(len(policies)) if i not in found]
        for indices, submissions in self._prepared(part, policies, others):
            for index in indices:
                found[index] = self._score(submissions, policies[index], prompts, num_runs)
        return [found[index] for index in range(len(policies))]

    def _prepared(
        self, part: DenseLog, policies: Sequence[Policy], indices: Sequence[int]
    ) -> Iterator[tuple[list[int], Submissions]]:
        """Policies of one shape, with what that shape submits."""
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
        runs = [self._run(submissions, policy, number) for number in range(num_runs)]
        sums = [self._sums(run, prompts) for run in runs]
        return Evaluation(np.concatenate(sums), min(map(_support, runs)))

    def _run(self, submissions: Submissions, policy: Policy, number: int) -> Simulation:
        run = simulate(
            submissions,
            self.load,
            self.model,
            budget=policy.budget,
            seed=(self.seed, number),
            packing=self.packing,
        )
        self.on_setting()
        return run

    def _sums(self, run: Simulation, prompts: Sequence[str]) -> Floats:
        """`[P, S]`"""
        positions = run.submissions.positions
        codes = positions.prompt[run.logged]
        return by_prompt(positions.prompt_ids, codes, request_sums(run, self.objective), prompts)


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


def _support(run: Simulation) -> float:
    """Over the rounds that were run: share of expansions in the log, or of rounds not censored."""
    row, of = run.rounds.row, run.submissions
    told = 1 - float(of.missing[row].sum()) / max(1.0, float(of.asked[row].sum()))
    return min(told, 1 - float(of.open[row].mean()))


def as_submissions(one: StaticDecision) -> Submissions:
    """A static setting as the simulation takes it; a round that lacks anything counts as open."""
    decided, num_rows = one.decided, len(one.missing)
    levels, width = np.asarray(decided.levels), np.asarray(decided.level_width)
    columns = {
        "accepted": decided.accepted,
        "verified": decided.verified,
        "levels": levels,
        "asked": 1 + (levels - 1) * width,
        "missing": one.missing,
        "open": one.missing,
    }
    return Submissions(
        policy=one.policy,
        positions=one.summary.positions,
        drafts=True,
        max_tokens=int(np.max(decided.verified)),
        nodes=None,
        **{n: np.broadcast_to(np.asarray(v, np.int32), num_rows) for n, v in columns.items()},
    )
