"""Requests in batches: a discrete-event simulation of serving, from a log.

    [submissions] = submissions_of(log, [policy])          # what the shape does, one pass
    runs = simulate_runs(submissions, Load(batch_size=16), cost_model)
    figures_of(policy.name, runs, tpot_limit_us=20_000)

A step is what `DecodeLoop.step` does: the joiners' prompts are read one after another while
everybody waits, then all active requests decode one round. In a closed loop who meets whom does
not depend on time, so all steps are timed together at the end; with arrivals each step is timed
before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Floats, Ints, Longs, Positions, join_rows
from specctl.policy import Budget, ChainSchedule
from specctl.replay.cost.model import CostModel, Steps
from specctl.replay.submissions import Submissions, Verify

TURNS = 8
"""Requests per slot at least, unless a number is given: enough for a steady state in between."""
Seed = int | Sequence[int]
Packing = Literal["ragged", "padded"]
"""Ways to verify trees of different sizes together: back to back, as this runtime and serving
engines do, or padded to the largest. A budget that trims some requests more than others saves time
only in the former. (This runtime pads where that adds less than a fifth, because it takes the same
time there: `runtime.attention.Pass`.)"""


# ----------------------------------------------------------------- load


@dataclass(frozen=True)
class Load:
    """A closed loop, or open arrivals.

    With neither a rate nor times the loop is closed: a finished request is replaced at once. With
    one of them requests wait, first come first served, for one of `batch_size` slots.

    Attributes:
        batch_size: slots, requests decoded together at most.
        arrival_rate_per_s: of a Poisson process.
        arrivals_us: the times themselves, never falling.
        num_requests: submitted in all; by default the whole log once, or `TURNS` per slot where
            that is more, or as many as there are arrival times. The log is gone through again,
            in another order, where it is too short.
    """

    batch_size: int
    arrival_rate_per_s: float | None = None
    arrivals_us: tuple[float, ...] | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        rate, times, number = self.arrival_rate_per_s, self.arrivals_us, self.num_requests
        gaps = np.diff(np.array(times or (), np.float64), prepend=0.0)
        wrong = np.flatnonzero(~((gaps >= 0) & (gaps < np.inf)))
        first, num_times = next(iter(wrong), 0), len(times or ())
        of_times = f"that of the arrival times, {num_times}"
        for what, is_wrong, expected, found in (
            ("batch_size", self.batch_size < 1, "at least 1", self.batch_size),
            ("num_requests", number is not None and number < 1, "at least 1", number),
            (
                "arrival_rate_per_s",
                rate is not None and not 0 < rate < np.inf,
                "above 0, or none for a loop",
                rate,
            ),
            ("arrivals", None not in (rate, times), "a rate or times", "both"),
            ("arrivals_us", times == (), "at least one time", "none"),
            (f"arrivals_us[{first}]", len(wrong), "times from 0 on that never fall", times),
            ("num_requests", times and number not in (None, num_times), of_times, number),
        ):
            if is_wrong:
                raise UsageError(what, expected=expected, found=str(found), fix="correct it")

    @property
    def is_closed(self) -> bool:
        """Whether requests arrive as others finish."""
        return self.arrival_rate_per_s is None and self.arrivals_us is None

    def draw(self, num_logged: int, seed: Seed) -> tuple[Longs, Floats | None]:
        """M requests in the order in which they are served, of a log that has `num_logged`.

        Returns:
            `[M]` int64, which request of the log each is; and `[M]` when they arrive, us, None in
            a closed loop.
        """
        shuffling, arriving = np.random.default_rng(seed).spawn(2)
        number = len(self.arrivals_us) if self.arrivals_us else self.num_requests
        number = number or max(num_logged, TURNS * self.batch_size)
        passes = [shuffling.permutation(num_logged) for _ in range(-(-number // num_logged))]
        arrival_us: Floats | None = None
        if self.arrivals_us is not None:
            arrival_us = np.array(self.arrivals_us, np.float64)
        elif self.arrival_rate_per_s is not None:
            arrival_us = np.cumsum(arriving.exponential(1e6 / self.arrival_rate_per_s, number))
        return np.concatenate(passes)[:number], arrival_us


# ----------------------------------------------------------------- rounds


@dataclass(frozen=True)
class BatchRounds:
    """L rounds of requests in S steps, step after step.

    Attributes:
        serial: `[L]` int64, number of the request in the queue. row: `[L]` int64, its position
            in the log.
        verified: `[L]` int64, nodes, root included. accepted: `[L]` int64, draft tokens accepted
            and emitted.
        first: `[S]` int64, where each step's rounds begin.
    """

    serial: Longs
    row: Longs
    verified: Longs
    accepted: Longs
    first: Longs

    @cached_property
    def batch_sizes(self) -> Longs:
        """`[S]` requests in each step."""
        return np.append(self.first[1:], len(self.row)) - self.first

    @property
    def step(self) -> Longs:
        """`[L]` step of each round."""
        return np.repeat(np.arange(len(self.first)), self.batch_sizes)

    def processed(self, packing: Packing) -> Longs:
        """`[S]` tokens of the target's forward, padding included."""
        if packing == "padded":
            return np.maximum.reduceat(self.verified, self.first) * self.batch_sizes
        return self.per_step(self.verified)

    def per_step(self, values: Ints | Longs) -> Longs:
        """`[S]` sums of values of rounds, `[L]`."""
        total: Longs = np.add.reduceat(values, self.first, dtype=np.int64)
        return total


def run_batches(
    positions: Positions,
    logged: Longs,
    verify: Verify,
    batch_size: int,
    *,
    in_waves: bool = False,
    arrival_us: Floats | None = None,
    prompt_us: Floats | None = None,
    round_us: Callable[[BatchRounds], Floats] | None = None,
) -> tuple[BatchRounds, Floats, Floats]:
    """Serves a queue as `DecodeLoop` does, without models: the log decides the rounds.

    The order of the slots matters where a budget breaks ties by row, so it is that of the decode
    loop: a request joins behind the others, and the last one moves into the place of one that
    finished.

    Args:
        logged: `[M]` int64, the queue, first come first served: requests of the log.
        in_waves: slots are filled when all are free; by default before each round.
        arrival_us, prompt_us: `[M]` when requests arrive, and times of reading them; those that
            arrive while prompts are read join at once. round_us: of a step's rounds. None where
            all are there from the start.

    Returns:
        The rounds; and `[S]` start of each step and time of its rounds, 0 where no time is kept.
    """
    first_row = positions.start[logged]
    num_requests, num_joined, num_active = len(first_row), 0, 0
    slots = np.zeros((2, batch_size), np.int64)  # number in the queue, and row of the log
    now, steps, starts, times = 0.0, [], [], []
    while num_active or num_joined < num_requests:
        if arrival_us is not None and not num_active:
            now = max(now, float(arrival_us[num_joined]))
        starts.append(now)
        is_open = not (in_waves and num_active)
        while is_open and num_active < batch_size and num_joined < num_requests:
            if arrival_us is not None and prompt_us is not None:
                if arrival_us[num_joined] > now:
                    break
                now += float(prompt_us[num_joined])
            slots[:, num_active] = num_joined, first_row[num_joined]
            num_active, num_joined = num_active + 1, num_joined + 1
        serial, row = slots[:, :num_active].copy()
        verified, accepted = verify(row)
        steps.append(BatchRounds(serial, row, verified, accepted, np.zeros(1, np.int64)))
        emitted, left = accepted + 1, positions.remaining[row]
        slots[1, :num_active] += emitted
        for slot in np.flatnonzero(emitted >= left)[::-1]:
            num_active -= 1
            slots[:, slot] = slots[:, num_active]
        times.append(0.0 if round_us is None else float(round_us(steps[-1])[0]))
        now += times[-1]
    sizes = [len(step.row) for step in steps]
    rounds = replace(join_rows(steps), first=np.cumsum([0, *sizes[:-1]]))
    return rounds, np.array(starts), np.array(times)


# ----------------------------------------------------------------- time


def steps_of_batch(submissions: Submissions, rounds: BatchRounds, packing: Packing) -> Steps:
    """The sizes of every step for a cost model; the batch drafts as deep as its deepest row."""
    first, row, sizes = rounds.first, rounds.row, rounds.batch_sizes
    positions = submissions.positions
    levels = submissions.levels(row, rounds.verified)
    wanted: Ints | Longs = submissions.outcomes.wanted[row]
    if isinstance(submissions.policy.shape, ChainSchedule):
        wanted = levels
    read = np.maximum.reduceat(rounds.accepted + 1, first).astype(np.float64)
    if packing == "ragged":
        read = rounds.per_step(rounds.accepted + 1) / sizes
    all_end = np.logical_and.reduceat(rounds.accepted + 1 >= positions.remaining[row], first)
    limit = getattr(submissions.policy.budget, "max_tokens", None) or np.inf
    return Steps(
        batch_size=sizes,
        num_tokens=rounds.processed(packing),
        context_tokens=rounds.per_step(positions.context_tokens[row]) / sizes - 1,  # no root
        levels=np.maximum.reduceat(levels, first),
        level_width=np.maximum.reduceat((wanted - 1) / np.maximum(levels - 1, 1), first),
        num_emitted=read * ~all_end,
        max_tokens=np.minimum(submissions.max_tokens, limit / sizes),
    )


@dataclass(frozen=True)
class Timeline:
    """Microseconds from the start of a run; S steps, M requests in the order of service.

    Attributes:
        start_us, end_us: `[S]`; a step starts with reading the joiners' prompts, and between
            two steps nobody is served. num_joined: `[S]` int64.
        arrival_us, first_token_us, finish_us: `[M]`. In a closed loop a request arrives as its
            slot is freed.
    """

    start_us: Floats
    end_us: Floats
    num_joined: Longs
    arrival_us: Floats
    first_token_us: Floats
    finish_us: Floats


def _timeline(
    rounds: BatchRounds,
    round_us: Floats,
    prompt_us: Floats,
    start_us: Floats | None,
    arrival_us: Floats | None,
) -> Timeline:
    """When things happened.

    Args:
        start_us: of each step; None where steps follow each other without a gap.
        arrival_us: of each request; None in a closed loop.
    """
    joined, finished = np.zeros((2, len(prompt_us)), np.int64)
    joined[rounds.serial[::-1]] = rounds.step[::-1]  # of equal indices the last assignment holds
    finished[rounds.serial] = rounds.step
    spent = np.bincount(joined, prompt_us, len(round_us)).astype(np.float64) + round_us
    if start_us is None:
        end = np.cumsum(spent)
        start_us = np.concatenate([[0.0], end[:-1]])
    else:
        end = start_us + spent
    # A first token comes when the prompts of the step are read up to and with its own.
    total = np.cumsum(prompt_us)
    before = (total - prompt_us)[np.searchsorted(joined, joined)]
    arrival = start_us[joined] if arrival_us is None else arrival_us
    num_joined = np.bincount(joined, minlength=len(start_us))
    first_token = start_us[joined] + total - before
    return Timeline(start_us, end, num_joined, arrival, first_token, end[finished])


# ----------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Simulation:
    """One run: M requests in the order of service, S steps, L rounds.

    Attributes:
        logged: `[M]` int64, which request of the log each was.
    """

    submissions: Submissions
    load: Load
    seed: Seed
    packing: Packing
    logged: Longs
    rounds: BatchRounds
    timeline: Timeline

    @cached_property
    def emitted(self) -> Longs:
        """`[L]` tokens of each round, bonus included, cut at the end of the text."""
        remaining = self.submissions.positions.remaining[self.rounds.row]
        return np.minimum(self.rounds.accepted + 1, remaining)

    @cached_property
    def num_tokens(self) -> Longs:
        """`[M]` of each text, with the first one, which reading the prompt gives."""
        return self.submissions.positions.num_tokens[self.logged] + 1


def simulate(
    submissions: Submissions,
    load: Load,
    clock: CostModel,
    *,
    budget: Budget | None = None,
    seed: Seed = 0,
    packing: Packing = "ragged",
) -> Simulation:
    """Serves a load from a log; equal arguments give equal results.

    Args:
        budget: in place of the policy's own.
        packing: of the batch in verification, see `Packing`.

    Raises:
        UsageError: a budget that cannot be decided or is smaller than the batch, trees that it
            needs and that were not kept, or a batch that the cost model does not know.
    """
    positions = submissions.positions
    logged, arrival_us = load.draw(positions.num_requests, seed)
    verify = submissions.verification(budget or submissions.policy.budget, load.batch_size)
    # At the first position the text is the prompt and one token.
    prompt_tokens = positions.context_tokens[positions.start[logged]] - 1
    prompt_us = clock.prefill_us(prompt_tokens, drafts=submissions.drafts)

    def round_us(rounds: BatchRounds) -> Floats:
        return clock.round_us(steps_of_batch(submissions, rounds, packing))

    start_us: Floats | None
    if arrival_us is None:  # who meets whom does not depend on time: steps are timed together
        rounds, _, _ = run_batches(positions, logged, verify, load.batch_size)
        start_us, step_us = None, round_us(rounds)
    else:
        rounds, start_us, step_us = run_batches(
            positions,
            logged,
            verify,
            load.batch_size,
            arrival_us=arrival_us,
            prompt_us=prompt_us,
            round_us=round_us,
        )
    timeline = _timeline(rounds, step_us, prompt_us, start_us, arrival_us)
    return Simulation(submissions, load, seed, packing, logged, rounds, timeline)


def simulate_runs(
    submissions: Submissions,
    load: Load,
    clock: CostModel,
    *,
    num_runs: int = 8,
    seed: int = 0,
    budget: Budget | None = None,
    packing: Packing = "ragged",
    on_run: Callable[[], None] = lambda: None,
) -> list[Simulation]:
    """Independent runs, for intervals; equal seeds serve any policy the same requests.

    Args:
        on_run: called after each run. Others, and errors, as for `simulate`.
    """
    runs = []
    for number in range(num_runs):
        runs.append(
            simulate(submissions, load, clock, budget=budget, seed=(seed, number), packing=packing)
        )
        on_run()
    return runs
