"""When things happen: the times of steps and of the requests in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Floats, Longs
from specctl.replay.batch.rounds import BatchRounds


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


@dataclass(frozen=True)
class Spans:
    """The step in which each request joined, and the one in which it finished, `[M]`."""

    joined: Longs
    finished: Longs


def spans_of(rounds: BatchRounds, num_requests: int) -> Spans:
    """Of M requests that all took part in a round; they joined in order."""
    joined, finished = np.zeros((2, num_requests), np.int64)
    step = rounds.step
    joined[rounds.serial[::-1]] = step[::-1]  # of equal indices the last assignment holds
    finished[rounds.serial] = step
    return Spans(joined, finished)


def closed_timeline(spans: Spans, round_us: Floats, prompt_us: Floats) -> Timeline:
    """Steps follow each other without a gap."""
    end = np.cumsum(_prompts_per_step(spans, round_us, prompt_us) + round_us)
    start = np.concatenate([[0.0], end[:-1]])
    return _timeline(spans, start, end, start[spans.joined], prompt_us)


def open_timeline(
    spans: Spans, round_us: Floats, prompt_us: Floats, start_us: Floats, arrival_us: Floats
) -> Timeline:
    """Steps start when their simulation said so."""
    end = start_us + _prompts_per_step(spans, round_us, prompt_us) + round_us
    return _timeline(spans, start_us, end, arrival_us, prompt_us)


def _timeline(
    spans: Spans, start: Floats, end: Floats, arrival_us: Floats, prompt_us: Floats
) -> Timeline:
    """A first token comes when the prompts of the step are read up to and with its own."""
    total = np.cumsum(prompt_us)
    before = (total - prompt_us)[np.searchsorted(spans.joined, spans.joined)]
    first_token = start[spans.joined] + total - before
    num_joined = np.bincount(spans.joined, minlength=len(start))
    return Timeline(start, end, num_joined, arrival_us, first_token, end[spans.finished])


def _prompts_per_step(spans: Spans, round_us: Floats, prompt_us: Floats) -> Floats:
    return np.bincount(spans.joined, prompt_us, len(round_us)).astype(np.float64)
