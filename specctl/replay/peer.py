"""Speed-ups as SpecDecode-Bench's simulator defines them (`simulator.py`; paper 2601.11580), for
chains over one import, to be compared with its table.

- The rate of a request is its tokens over its time, and the speed-up the mean of the requests'
  rates over that of plain decoding. `replay` otherwise gives Σ tokens / Σ time.
- Reading the prompt is part of the time, and the token that it gives is one of the tokens.
- A batch is one request as often as its size says, whose prompts are read in one forward.
- The oracle pays a draft in every round, also where none of it will be accepted.
- Of more than 300 requests the simulator draws 300 with Python's generator; here it is the same
  ones, as long as the import left none of the file's out.
- The last token of the text counts as cached.

Two things are not theirs: it leaves rounds of an n-gram drafter without a draft at random, here
every round drafts; and its n-gram drafter takes a share of the verification's time, here a drafter
takes the cost model's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter

import numpy as np

from specctl.logs.positions import Floats
from specctl.replay.batch_simulation import prompt_tokens
from specctl.replay.cost.model import CostModel, steps_of
from specctl.replay.ladder.tally import LoadClock
from specctl.replay.results import PeerFigures
from specctl.replay.rounds import Rounds
from specctl.stats import Resamples, figure_of

NUM_DRAWN, DRAW_SEED = 300, 42
"""Requests that a figure of the simulator is of, and the seed of their draw."""
RATE: Callable[[Floats], Floats] = figure_of(("rate",), itemgetter("rate"))


def peer_figures(
    runs: Mapping[str, Rounds], baseline: str, model: CostModel, batch_size: int, seed: int
) -> tuple[PeerFigures, ...]:
    """Rates and speed-ups of policies by label, over `drawn` requests.

    Args:
        runs: of one log.
        batch_size: copies of each request.
        seed: of the resamples of requests.
    """
    chosen = drawn(runs[baseline].positions.num_requests)

    def rates_of(size: int) -> dict[str, Floats]:
        return {label: tokens_per_s(run, model, size)[chosen, None] for label, run in runs.items()}

    rates, alone = rates_of(batch_size), rates_of(1)
    resamples = Resamples.draw(len(rates[baseline]), seed=seed)
    mean = 1 / len(rates[baseline])
    return tuple(
        PeerFigures(
            policy=label,
            tokens_per_s=resamples.interval(rate * mean, RATE),
            speed_up=resamples.ratio(rate, rates[baseline], RATE),
            speed_up_alone=resamples.ratio(alone[label], alone[baseline], RATE),
        )
        for label, rate in rates.items()
    )


def drawn(num_requests: int) -> list[int]:
    """The requests, by their place in the file, that the simulator draws."""
    everyone = range(num_requests)
    if num_requests <= NUM_DRAWN:
        return list(everyone)
    return random.Random(DRAW_SEED).sample(everyone, NUM_DRAWN)


def tokens_per_s(run: Rounds, model: CostModel, batch_size: int) -> Floats:
    """`[Q]` tokens per second of a batch of copies of each request, reading prompts included."""
    positions, drafts = run.positions, bool(run.outcomes.levels.any())
    steps = steps_of(run)
    steps = replace(steps, context_tokens=np.asarray(steps.context_tokens) + 1)
    if drafts:
        steps = replace(steps, levels=np.maximum(steps.levels, 1))
    step_us = LoadClock(model, batch_size).share_us(steps) * batch_size
    prompts = prompt_tokens(positions, np.arange(positions.num_requests))
    rounds_us = np.bincount(run.request, np.broadcast_to(step_us, run.request.shape))
    spent = rounds_us + model.prefill_us(prompts * batch_size, drafts=drafts)
    return np.asarray(1e6 * batch_size * (positions.num_tokens + 1) / spent, np.float64)
