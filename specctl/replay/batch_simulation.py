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
from typing import Literal, NamedTuple

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Floats, Ints, Longs, Positions, join_rows
from specctl.policy import Budget
from specctl.replay.cost.model import CostModel, Steps
from specctl.replay.submissions import Submissions, Verify, emitted_tokens, ends_text

TURNS = 8
"""Requests per slot at least, unless a number is given: enough for a steady state in between."""
Seed = int | Sequence[int]
Packing = Literal["ragged", "padded"]
"""How trees of different sizes are verified together: back to back, as this runtime and serving
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
        check_batch_size(self.batch_size)
        rate, times, number = self.arrival_rate_per_s, self.arrivals_us, self.num_requests
        if number is not None and number < 1:
            raise _refused("num_requests", "at least 1", number)
        if rate is not None and not 0 < rate < np.inf:
            raise _refused("arrival_rate_per_s", "above 0, or none for a loop", rate)
        if times is None:
            return
        if rate is not None:
            raise _refused("arrivals", "a rate or times", "both")
        if len(times) == 0:
            raise _refused("arrivals_us", "at least one time", "none")
        gaps = np.diff(np.array(times, np.float64), prepend=0.0)
        wrong = np.flatnonzero(~((gaps >= 0) & (gaps < np.inf)))
        if len(wrong):
            first = wrong[0]
            raise _refused(f"arrivals_us[{first}]", "times from 0 on that never fall", times[first])
        if number not in (None, len(times)):
            raise _refused("num_requests", f"that of the arrival times, {len(times)}", number)

    @property
    def is_closed(self) -> bool:
        """Whether requests arrive as others finish."""
        return self.arrival_rate_per_s is None and self.arrivals_us is None

    def draw(self, num_logged: int, seed: Seed) -> Queue:
        """The requests of one run, of a log that has `num_logged`."""
        shuffling, arriving = np.random.default_rng(seed).spawn(2)
        number = len(self.arrivals_us) if self.arrivals_us else self.num_requests
        number = number or max(num_logged, TURNS * self.batch_size)
        passes = [shuffling.permutation(num_logged) for _ in range(-(-number // num_logged))]
        arrival_us: Floats | None = None
        if self.arrivals_us is not None:
            arrival_us = np.array(self.arrivals_us, np.float64)
        elif self.arrival_rate_per_s is not None:
            arrival_us = np.cumsum(arriving.exponential(1e6 / self.arrival_rate_per_s, number))
        return Queue(np.concatenate(passes)[:number], arrival_us)


class Queue(NamedTuple):
    """M requests in the order in which they are served.

    Attributes:
        logged: `[M]` int64, which request of the log each is.
        arrival_us: `[M]` float64; None in a closed loop.
    """

    logged: Longs
    arrival_us: Floats | None


def check_batch_size(batch_size: int) -> None:
    """Raises `UsageError` for fewer than one slot."""
    if batch_size < 1:
        raise _refused("batch_size", "at least 1", batch_size)


def _refused(what: str, expected: str, found: object) -> UsageError:
    return UsageError(what, expected=expected, found=str(found), fix="correct it")


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

    def per_step(self, values: Ints | Longs) -> Longs:
        """`[S]` sums of values of rounds, `[L]`."""
        total: Longs = np.add.reduceat(values, self.first, dtype=np.int64)
        return total


class BatchLoop:
    """`DecodeLoop` without models: requests join free slots, the log decides their rounds.

    The order of the slots matters where a budget breaks ties by row, so it is that of the decode
    loop: a request joins behind the others, and the last one moves into the place of one that
    finished.

    Args:
        logged: `[M]` int64, the queue, first come first served: requests of the log.

    Attributes:
        num_joined: requests that left the queue; the number of the next one.
        num_active: A, requests being decoded.
    """

    def __init__(
        self, positions: Positions, logged: Longs, verify: Verify, batch_size: int
    ) -> None:
        self.positions, self.verify = positions, verify
        self._first_row = positions.start[logged]
        self._serial, self._row = np.zeros((2, batch_size), np.int64)
        self._steps: list[BatchRounds] = []
        self.num_joined = self.num_active = 0

    @property
    def busy(self) -> bool:
        """Whether a request waits or is being decoded."""
        return self.num_active > 0 or self.num_joined < len(self._first_row)

    @property
    def can_join(self) -> bool:
        """Whether there is a request to come and a free slot."""
        return self.num_active < len(self._row) and self.num_joined < len(self._first_row)

    def join(self) -> None:
        """Puts the next request into a slot."""
        self._serial[self.num_active] = self.num_joined
        self._row[self.num_active] = self._first_row[self.num_joined]
        self.num_active += 1
        self.num_joined += 1

    def step(self) -> BatchRounds:
        """One round of all active requests; the finished ones leave."""
        active = slice(self.num_active)
        row, serial = self._row[active].copy(), self._serial[active].copy()
        verified, accepted = self.verify(row)
        emitted = emitted_tokens(self.positions, row, accepted)
        self._row[active] += emitted
        for slot in np.flatnonzero(emitted == self.positions.remaining[row])[::-1]:
            self.num_active -= 1
            for column in (self._serial, self._row):
                column[slot] = column[self.num_active]
        rounds = BatchRounds(serial, row, verified, accepted, np.zeros(1, np.int64))
        self._steps.append(rounds)
        return rounds

    def rounds(self) -> BatchRounds:
        """All rounds so far."""
        sizes = [len(step.row) for step in self._steps]
        return replace(join_rows(self._steps), first=np.cumsum([0, *sizes[:-1]]))


def run_closed(loop: BatchLoop, *, in_waves: bool = False) -> BatchRounds:
    """Serves the whole queue.

    Args:
        in_waves: slots are filled when all are free; by default before each round.
    """
    while loop.busy:
        if not (in_waves and loop.num_active):
            while loop.can_join:
                loop.join()
        loop.step()
    return loop.rounds()


def _run_open(
    loop: BatchLoop,
    arrival_us: Floats,
    prompt_us: Floats,
    round_us: Callable[[BatchRounds], float],
) -> tuple[Floats, Floats]:
    """Serves requests as they arrive; those that arrive while prompts are read join at once.

    Args:
        arrival_us, prompt_us: `[M]` of the queue. round_us: time of a step's rounds.

    Returns:
        `[S]` start of each step and time of its rounds.
    """
    now, starts, times = 0.0, [], []
    while loop.busy:
        if not loop.num_active:
            now = max(now, float(arrival_us[loop.num_joined]))
        starts.append(now)
        while loop.can_join and arrival_us[loop.num_joined] <= now:
            now += float(prompt_us[loop.num_joined])
            loop.join()
        times.append(round_us(loop.step()))
        now += times[-1]
    return np.array(starts), np.array(times)


# ----------------------------------------------------------------- time


def num_processed(rounds: BatchRounds, packing: Packing) -> Longs:
    """`[S]` tokens of the target's forward, padding included."""
    if packing == "padded":
        return np.maximum.reduceat(rounds.verified, rounds.first) * rounds.batch_sizes
    return rounds.per_step(rounds.verified)


def steps_of_batch(submissions: Submissions, rounds: BatchRounds, packing: Packing) -> Steps:
    """What a cost model needs of every step; the batch drafts as deep as its deepest row."""
    first, row, sizes = rounds.first, rounds.row, rounds.batch_sizes
    positions = submissions.positions
    levels: Ints | Longs = submissions.levels[row]
    wanted: Ints | Longs = submissions.wanted[row]
    if submissions.chain_lengths is not None:
        levels = wanted = rounds.verified - 1
    read = np.maximum.reduceat(rounds.accepted + 1, first).astype(np.float64)
    if packing == "ragged":
        read = rounds.per_step(rounds.accepted + 1) / sizes
    all_end = np.logical_and.reduceat(ends_text(positions, row, rounds.accepted), first)
    limit = getattr(submissions.policy.budget, "max_tokens", None) or np.inf
    return Steps(
        batch_size=sizes,
        num_tokens=num_processed(rounds, packing),
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
        budget: what shared the batch.
        logged: `[M]` int64, which request of the log each was.
        num_processed: `[S]` int64, tokens of the target's forward, padding included.
    """

    submissions: Submissions
    budget: Budget
    load: Load
    seed: Seed
    packing: Packing
    logged: Longs
    rounds: BatchRounds
    num_processed: Longs
    timeline: Timeline

    @cached_property
    def emitted(self) -> Longs:
        """`[L]` tokens of each round, bonus included, cut at the end of the text."""
        return emitted_tokens(self.submissions.positions, self.rounds.row, self.rounds.accepted)

    @cached_property
    def num_tokens(self) -> Longs:
        """`[M]` of each text, with the first one, which reading the prompt gives."""
        positions = self.submissions.positions
        return positions.remaining[positions.start[self.logged]].astype(np.int64) + 1


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
    budget, positions = budget or submissions.policy.budget, submissions.positions
    queue = load.draw(positions.num_requests, seed)
    verify = submissions.verification(budget, load.batch_size)
    loop = BatchLoop(positions, queue.logged, verify, load.batch_size)
    # At the first position the text is the prompt and one token.
    prompt_tokens = positions.context_tokens[positions.start[queue.logged]] - 1
    prompt_us = clock.prefill_us(prompt_tokens, drafts=submissions.drafts)

    def round_us(rounds: BatchRounds) -> Floats:
        return clock.round_us(steps_of_batch(submissions, rounds, packing))

    start_us: Floats | None = None
    if queue.arrival_us is None:
        rounds = run_closed(loop)
        step_us = round_us(rounds)
    else:
        start_us, step_us = _run_open(
            loop, queue.arrival_us, prompt_us, lambda rounds: float(round_us(rounds)[0])
        )
        rounds = loop.rounds()
    return Simulation(
        submissions=submissions,
        budget=budget,
        load=load,
        seed=seed,
        packing=packing,
        logged=queue.logged,
        rounds=rounds,
        num_processed=num_processed(rounds, packing),
        timeline=_timeline(rounds, step_us, prompt_us, start_us, queue.arrival_us),
    )


def simulate_runs(
    submissions: Submissions,
    load: Load,
    clock: CostModel,
    *,
    num_runs: int = 8,
    seed: int = 0,
    budget: Budget | None = None,
    packing: Packing = "ragged",
    on_run: Callable[[], None] | None = None,
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
        if on_run is not None:
            on_run()
    return runs
