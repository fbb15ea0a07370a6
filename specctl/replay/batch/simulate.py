"""The simulation: requests join, share rounds and leave, under a clock.

A step is what `DecodeLoop.step` does: the joiners' prompts are read one after another while
everybody waits, then all active requests decode one round. In a closed loop who meets whom does
not depend on time, so all steps are timed together at the end; with arrivals each step is timed
before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specctl.logs.positions import Longs
from specctl.policy.records import Budget
from specctl.replay.batch.load import Load, Queue, Seed
from specctl.replay.batch.loop import Loop, run_closed, run_open
from specctl.replay.batch.rounds import BatchRounds, emitted_tokens, verification
from specctl.replay.batch.submissions import Submissions
from specctl.replay.batch.timeline import Timeline, closed_timeline, open_timeline, spans_of
from specctl.replay.batch.timing import Packing, StepClock, Timer


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

    def per_request(self, values: Longs) -> Longs:
        """`[M]` sums of values of rounds, `[L]`."""
        return np.bincount(self.rounds.serial, values, len(self.logged)).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        """What was asked, and every request; see `figures_of` for figures."""
        return {
            "policy": self.submissions.policy.model_copy(update={"budget": self.budget}).name,
            "load": vars(self.load).copy(),
            "seed": self.seed,
            "packing": self.packing,
            "num_steps": len(self.rounds.first),
            "requests": self.requests(),
        }

    def requests(self) -> dict[str, Any]:
        """Columns of plain lists, one entry a request, in the order of service."""
        positions, times = self.submissions.positions, self.timeline
        prompt = positions.prompt[self.logged].tolist()
        return {
            "prompt_id": [positions.prompt_ids[code] for code in prompt],
            "arrival_us": times.arrival_us.tolist(),
            "first_token_us": times.first_token_us.tolist(),
            "finish_us": times.finish_us.tolist(),
            "num_tokens": self.num_tokens.tolist(),
            "calls": self.per_request(np.ones_like(self.rounds.row)).tolist(),
            "verified_tokens": self.per_request(self.rounds.verified).tolist(),
            "num_accepted": self.per_request(self.rounds.accepted).tolist(),
        }


def simulate(
    submissions: Submissions,
    load: Load,
    clock: StepClock,
    *,
    budget: Budget | None = None,
    seed: Seed = 0,
    packing: Packing = "ragged",
) -> Simulation:
    """Serves a load from a log; equal arguments give equal results.

    Args:
        clock: a cost model.
        budget: in place of the policy's own.
        packing: of the batch in verification, see `Packing`.

    Raises:
        UsageError: a budget that cannot be decided or is smaller than the batch, trees that it
            needs and that were not kept, or a batch that the cost model does not know.
    """
    budget, positions = budget or submissions.policy.budget, submissions.positions
    queue = load.draw(positions.num_requests, seed)
    verify = verification(submissions, budget, load.batch_size)
    loop = Loop(positions, queue.logged, verify, load.batch_size)
    timer = Timer(submissions, clock, packing)
    timeline = _serve(loop, timer, queue)
    rounds = loop.rounds()
    return Simulation(
        submissions=submissions,
        budget=budget,
        load=load,
        seed=seed,
        packing=packing,
        logged=queue.logged,
        rounds=rounds,
        num_processed=timer.num_processed(rounds),
        timeline=timeline,
    )


def _serve(loop: Loop, timer: Timer, queue: Queue) -> Timeline:
    """Serves the whole queue; when everything happened."""
    prompt_us = timer.prompt_us(queue.logged)
    if queue.arrival_us is None:
        run_closed(loop)
        rounds = loop.rounds()
        spans = spans_of(rounds, len(queue.logged))
        return closed_timeline(spans, timer.round_us(rounds), prompt_us)
    start_us, round_us = run_open(
        loop, queue.arrival_us, prompt_us, lambda rounds: float(timer.round_us(rounds)[0])
    )
    spans = spans_of(loop.rounds(), len(queue.logged))
    return open_timeline(spans, round_us, prompt_us, start_us, queue.arrival_us)


def simulate_runs(
    submissions: Submissions,
    load: Load,
    clock: StepClock,
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
