"""Which part of a run counts as steady: neither the ramp-up nor the drain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.replay.batch.simulate import Simulation


@dataclass(frozen=True)
class Window:
    """A part of a run.

    Attributes:
        steps: whole steps, whose tokens and times are counted.
        requests: whole requests, whose latencies are counted.
    """

    steps: slice
    requests: slice


def whole_window(run: Simulation) -> Window:
    """All of it."""
    return Window(slice(0, len(run.rounds.first)), slice(0, len(run.logged)))


def steady_window(run: Simulation) -> Window | None:
    """A run of B slots without its first and last B requests.

    Steps count from the first that starts when B requests have finished (the first cohort
    started together, and its rounds and its end are in step), to the last that ends before the
    last request arrives (from then on slots run empty). Latencies are those of all requests but
    the first and the last B to arrive: the late ones finish in the drain, where the batch is
    small. None where that leaves no step or no request: submit more.
    """
    num_slots, times = run.load.batch_size, run.timeline
    num_requests = len(run.logged)
    if num_requests <= 2 * num_slots:
        return None
    ramp_end = np.sort(times.finish_us)[num_slots - 1]
    first = int(np.searchsorted(times.start_us, ramp_end))
    last = int(np.searchsorted(times.end_us, times.arrival_us[-1], side="right"))
    if first >= last:
        return None
    return Window(slice(first, last), slice(num_slots, num_requests - num_slots))
