"""Requests in batches: a discrete-event simulation of serving, from a log.

    [submissions] = submissions_of(log, [policy])          # the shape's drafts, one pass
    runs = simulate_runs(submissions, Load(batch_size=16), cost_model)
    figures_of(policy.name, runs, tpot_limit_us=20_000)

Steps follow the simulated engine, see `Engine`. In a closed loop the batches do not depend on time,
so all steps are timed together at the end; with arrivals, each step is timed before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions, join_rows
from specctl.policy import Budget
from specctl.progress import advance
from specctl.replay.config import Engine
from specctl.replay.cost.model import CostModel, Steps, decider_of
from specctl.replay.outcomes import Outcomes
from specctl.replay.submissions import Submissions, Verify

TURNS = 8
"""Fewest requests per slot by default, enough for a steady state."""
Seed = int | Sequence[int]
Packing = Literal["ragged", "padded"]
"""Verification of trees of different sizes: back to back, as in this runtime and serving engines,
or padded to the largest. A budget that trims requests unequally saves time in the former alone.
(This runtime pads if that adds less than a fifth, which takes the same time:
`runtime.attention.Pass`.)"""


# ----------------------------------------------------------------- load


@dataclass(frozen=True)
class Load:
    """Requests for `batch_size` slots, first come first served.

    With a rate, requests arrive and wait; without, the loop is closed: a finished request is
    replaced at once.
    """

    batch_size: int  # slots
    arrival_rate_per_s: float | None = None  # of a Poisson process
    # requests in all; by default the log once or `TURNS` per slot, whichever is more. A short log
    # repeats in another order
    num_requests: int | None = None
    engine: Engine = "specctl"
    in_order: bool = False  # the log once in its own order, as one real run; else shuffled

    def __post_init__(self) -> None:
        if self.arrival_rate_per_s is not None and not 0 < self.arrival_rate_per_s < np.inf:
            raise UsageError(f"--arrival-rate must be above 0, not {self.arrival_rate_per_s}")

    def draw(self, num_logged: int, seed: Seed) -> tuple[Longs, Floats | None]:
        """M requests in the order of service.

        Returns:
            `[M]` int64, their numbers in a log of `num_logged`; and `[M]` arrival times, us, None
            in a closed loop.
        """
        if self.in_order:
            return np.arange(num_logged), None
        shuffling, arriving = np.random.default_rng(seed).spawn(2)
        number = self.num_requests or max(num_logged, TURNS * self.batch_size)
        passes = [shuffling.permutation(num_logged) for _ in range(-(-number // num_logged))]
        arrival_us: Floats | None = None
        if self.arrival_rate_per_s is not None:
            arrival_us = np.cumsum(arriving.exponential(1e6 / self.arrival_rate_per_s, number))
        return np.concatenate(passes)[:number], arrival_us


# ----------------------------------------------------------------- rounds


@dataclass(frozen=True)
class BatchRounds:
    """L rounds of requests in S steps, step after step."""

    serial: Longs  # `[L]` int64, number of the request in the queue
    row: Longs  # `[L]` int64, its position in the log
    verified: Longs  # `[L]` int64, nodes, root included
    accepted: Longs  # `[L]` int64, draft tokens accepted and emitted
    first: Longs  # `[S]` int64, first round of each step; some steps of vLLM have none
    num_joined: Longs  # `[S]` int64, requests whose prompts are read in the step, in their order
    prompt_tokens: Longs  # `[S]` int64, prompt tokens in the rounds' forward; 0 but for vLLM

    @cached_property
    def batch_sizes(self) -> Longs:
        """`[S]` requests that decode in each step."""
        return np.append(self.first[1:], len(self.row)) - self.first

    @property
    def scheduled(self) -> Longs:
        """`[S]` requests in the forward of each step."""
        return self.batch_sizes + np.where(self.prompt_tokens > 0, self.num_joined, 0)

    @property
    def step(self) -> Longs:
        """`[L]` step of each round."""
        return np.repeat(np.arange(len(self.first)), self.batch_sizes)

    def processed(self, packing: Packing) -> Longs:
        """`[S]` tokens of the target's forward, padding included."""
        if packing == "padded":
            rounds = self.most(self.verified).astype(np.int64) * self.batch_sizes
        else:
            rounds = self.per_step(self.verified)
        return rounds + self.prompt_tokens

    def per_step(self, values: Ints | Longs | Bools) -> Longs:
        """`[S]` sums of values of rounds, `[L]`."""
        total = np.zeros(len(self.first), np.int64)
        np.add.at(total, self.step, values)
        return total

    def most(self, values: Ints | Longs | Floats) -> Floats:
        """`[S]` the largest value of each step's rounds, `[L]`; 0 without rounds."""
        found = np.zeros(len(self.first))
        np.maximum.at(found, self.step, values)
        return found


def prompt_tokens(positions: Positions, requests: Longs) -> Ints:
    """`[M]` tokens of the prompts: the first position follows the prompt and one token."""
    return positions.context_tokens[positions.start[requests]] - 1


def run_batches(
    positions: Positions,
    logged: Longs,
    verify: Verify,
    load: Load,
    arrival_us: Floats | None,
    prompt_us: Floats,
    round_us: Callable[[BatchRounds], Floats],
) -> tuple[BatchRounds, Floats, Floats]:
    """Serves a queue in the order of the load's engine; the log decides the rounds.

    Budgets break ties by row, so slots are ordered as in the decode loop: a request joins behind
    the others, and the last one takes the place of a finished one.

    Args:
        logged: `[M]` int64, the queue: requests of the log.
        arrival_us: `[M]` arrival times; None in a closed loop, whose batches do not depend on time.
        prompt_us: `[M]` times of reading prompts; a request that arrives while prompts are read
            joins at once. round_us: times of steps' rounds.

    Returns:
        The rounds; and `[S]` start of each step and time of its rounds.
    """
    first_row, is_mixed = positions.start[logged], load.engine == "vllm"
    num_requests, num_joined, num_active = len(first_row), 0, 0
    slots = np.zeros((2, load.batch_size), np.int64)  # number in the queue, and row of the log
    now, before, steps, starts, times = 0.0, 0, [], [], []
    while num_active or num_joined < num_requests:
        if arrival_us is not None and not num_active:
            now = max(now, float(arrival_us[num_joined]))
        starts.append(now)
        num_scheduled, joiner = num_active, num_joined
        while num_active < load.batch_size and num_joined < num_requests:
            if arrival_us is not None:
                if arrival_us[num_joined] > now:
                    break
                now += float(prompt_us[num_joined])
            slots[:, num_active] = num_joined, first_row[num_joined]
            num_active, num_joined = num_active + 1, num_joined + 1
        # vLLM's drafts were made a step earlier, for the requests of that step.
        num_rounds, num_drafting = num_active, num_active
        num_read = np.zeros(1, np.int64)
        if is_mixed:
            num_rounds, num_drafting = num_scheduled, before
            joiners = prompt_tokens(positions, logged[joiner:num_joined])
            num_read = joiners.sum(keepdims=True, dtype=np.int64)
        before = num_active
        serial, row = slots[:, :num_rounds].copy()
        verified, accepted = verify(row, num_drafting) if num_rounds else (row, row)
        joined, first = np.array([num_joined - joiner]), np.zeros(1, np.int64)
        steps.append(BatchRounds(serial, row, verified, accepted, first, joined, num_read))
        emitted, left = accepted + 1, positions.remaining[row]
        slots[1, :num_rounds] += emitted
        for slot in np.flatnonzero(emitted >= left)[::-1]:
            num_active -= 1
            slots[:, slot] = slots[:, num_active]
        if arrival_us is not None:
            times.append(float(round_us(steps[-1])[0]))
            now += times[-1]
    sizes = [len(step.row) for step in steps]
    rounds = replace(join_rows(steps), first=np.cumsum([0, *sizes[:-1]]))
    if arrival_us is not None:
        return rounds, np.array(starts), np.array(times)
    # All steps of a closed loop are timed together, and follow each other without a gap.
    joined = np.repeat(np.arange(len(steps)), rounds.num_joined)
    step_us = round_us(rounds)
    spent = np.bincount(joined, prompt_us, len(steps)) + step_us
    return rounds, np.append(0.0, np.cumsum(spent)[:-1]), step_us


# ----------------------------------------------------------------- time


def steps_of_batch(submissions: Submissions, rounds: BatchRounds, packing: Packing) -> Steps:
    """Counts of every step for a cost model; the batch drafts as deep as its deepest row.

    A step is charged for the drafts that it verifies, although vLLM made them a step earlier.
    Prompts in its forward count as tokens without context.
    """
    row, sizes, positions = rounds.row, rounds.scheduled, submissions.positions
    outcomes = submissions.outcomes_of(row, rounds.verified, rounds.accepted)
    width = (outcomes.wanted - 1) / np.maximum(outcomes.levels - 1, 1)
    read = rounds.most(rounds.accepted + 1)
    if packing == "ragged":
        read = rounds.per_step(rounds.accepted + 1) / sizes
    num_ended = rounds.per_step(rounds.accepted + 1 >= positions.remaining[row])
    limit = getattr(submissions.policy.budget, "max_tokens", None) or np.inf
    return Steps(
        batch_size=sizes,
        num_tokens=rounds.processed(packing),
        context_tokens=rounds.per_step(positions.context_tokens[row] - 1) / sizes,  # no root
        levels=rounds.most(outcomes.levels),
        level_width=rounds.most(width),
        num_emitted=read * (num_ended < sizes),
        max_tokens=np.minimum(submissions.max_tokens, limit / sizes),
        prompt_tokens=rounds.prompt_tokens,
        decider=decider_of(submissions.policy),
    )


@dataclass(frozen=True)
class Timeline:
    """Microseconds from the start of a run; S steps, M requests in the order of service."""

    # start_us, end_us: `[S]`; a step starts with reading the prompts of requests that join
    start_us: Floats
    end_us: Floats
    # arrival_us, first_token_us, finish_us: `[M]`; in a closed loop a request arrives when its slot
    # becomes free
    arrival_us: Floats
    first_token_us: Floats
    finish_us: Floats


def _timeline(
    rounds: BatchRounds,
    start_us: Floats,
    step_us: Floats,
    prompt_us: Floats,
    arrival_us: Floats | None,
) -> Timeline:
    """The timeline of a run.

    Args:
        arrival_us: of each request; None in a closed loop.
    """
    joined = np.repeat(np.arange(len(rounds.first)), rounds.num_joined)
    finished = np.zeros(len(prompt_us), np.int64)
    finished[rounds.serial] = rounds.step  # of equal indices the last assignment holds
    end = start_us + (np.bincount(joined, prompt_us, len(step_us)) + step_us)
    # A first token comes when the step has read the prompts up to its own, or with the forward that
    # the prompts share.
    total = np.cumsum(prompt_us)
    before = (total - prompt_us)[np.searchsorted(joined, joined)]
    arrival = start_us[joined] if arrival_us is None else arrival_us
    shared = rounds.prompt_tokens[joined] > 0
    first_token = np.where(shared, end[joined], start_us[joined] + total - before)
    return Timeline(start_us, end, arrival, first_token, end[finished])


# ----------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Simulation:
    """One run: M requests in the order of service, S steps, L rounds."""

    submissions: Submissions
    load: Load
    seed: Seed
    packing: Packing
    logged: Longs  # `[M]` int64, number in the log
    rounds: BatchRounds
    timeline: Timeline

    @cached_property
    def outcomes(self) -> Outcomes:
        """Of each round, `[L]`."""
        rounds = self.rounds
        return self.submissions.outcomes_of(rounds.row, rounds.verified, rounds.accepted)

    @cached_property
    def steps(self) -> Steps:
        """Steps with rounds, for a cost model."""
        steps = steps_of_batch(self.submissions, self.rounds, self.packing)
        decodes = self.rounds.batch_sizes > 0
        sizes = {name: of for name, of in vars(steps).items() if name != "decider"}
        shown = {name: np.broadcast_to(of, decodes.shape)[decodes] for name, of in sizes.items()}
        return Steps(**shown, decider=steps.decider)

    @cached_property
    def emitted(self) -> Longs:
        """`[L]` tokens of each round, bonus included, cut at the end of the text."""
        remaining = self.submissions.positions.remaining[self.rounds.row]
        return np.minimum(self.rounds.accepted + 1, remaining)

    @cached_property
    def num_tokens(self) -> Longs:
        """`[M]` tokens of each text, with the first one, which comes from reading the prompt."""
        return self.submissions.positions.num_tokens[self.logged] + 1


def simulate(
    submissions: Submissions,
    load: Load,
    clock: CostModel | None,
    *,
    budget: Budget | None = None,
    seed: Seed = 0,
    packing: Packing = "ragged",
) -> Simulation:
    """Serves a load from a log; equal arguments give equal results.

    Args:
        clock: None for counts alone, in a closed loop.
        budget: in place of the policy's own.

    Raises:
        UsageError: a budget without a cost model or smaller than the batch, a budget whose trees
            were not kept, or a batch larger than the cost model knows.
    """
    if budget is not None:
        policy = submissions.policy.model_copy(update={"budget": budget})
        submissions = replace(submissions, policy=policy)
    positions = submissions.positions
    logged, arrival_us = load.draw(positions.num_requests, seed)
    verify = submissions.verification(submissions.policy.budget, load.batch_size)
    prompt_us = np.zeros(len(logged))
    if clock is not None and load.engine != "vllm":  # vLLM reads them in the rounds' forward
        prompt_us += clock.prefill_us(prompt_tokens(positions, logged), drafts=submissions.drafts)

    def round_us(rounds: BatchRounds) -> Floats:
        if clock is None:
            return np.zeros(len(rounds.first))
        return clock.round_us(steps_of_batch(submissions, rounds, packing))

    rounds, start_us, step_us = run_batches(
        positions, logged, verify, load, arrival_us, prompt_us, round_us
    )
    timeline = _timeline(rounds, start_us, step_us, prompt_us, arrival_us)
    return Simulation(submissions, load, seed, packing, logged, rounds, timeline)


def simulate_runs(
    submissions: Submissions,
    load: Load,
    clock: CostModel | None,
    *,
    num_runs: int = 8,
    seed: int = 0,
    budget: Budget | None = None,
    packing: Packing = "ragged",
) -> list[Simulation]:
    """Independent runs of `simulate`, for intervals; equal seeds give all policies the same
    requests. `simulated runs` progress."""
    runs = []
    for number in range(num_runs):
        runs.append(
            simulate(submissions, load, clock, budget=budget, seed=(seed, number), packing=packing)
        )
        advance("simulated runs")
    return runs
