"""The time of a step from logs of one drafter's server at two or more draft lengths, plain decoding
among them.

A request's step takes length · running / throughput, its mean acceptance length being 1 without
drafts. Plain steps are fitted by a + b B of the running requests B, steps with K draft tokens by
a + b B + c K + d B K, each with no negative term. It is rough: B is that of the moment of a line,
and reading prompts counts too.

Drafting has a price beside that of its tokens. So plain decoding is judged by a log without drafts
alone, and lengths below the logged one by logs of two lengths with drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specctl.logs.advice import Advice
from specctl.logs.server_log import ServerLog
from specctl.stats import Floats

_LEAST_POINTS = 4
"""Fewest lines of a draft length."""


def _steps(log: ServerLog) -> list[tuple[float, float, float]]:
    """Draft tokens, running requests and us of the steps that lines of a log sum up."""
    lines: list[tuple[Any, ...]] = [
        (one.num_draft_tokens, one.num_running, one.tokens_per_s, sum(one.mean) / 2)
        for one in log.intervals
    ]
    lines = lines or [(0, running, speed, 1.0) for running, speed in log.plain]
    return [
        (length, running, 1e6 * mean * running / speed)
        for length, running, speed, mean in lines
        if length is not None and running and speed
    ]


def own_advices(
    servers: Sequence[Sequence[ServerLog]], batch_sizes: Sequence[int]
) -> dict[str, Advice]:
    """Advice by name of a log with drafts: one for all logs of a server and drafter."""
    found: dict[str, Advice] = {}
    for together in servers:
        steps = [step for log in together for step in _steps(log)]
        if advice := _advice(steps, batch_sizes):
            found |= {log.name: advice for log in together if log.intervals}
    return found


def _advice(steps: Sequence[tuple[float, float, float]], sizes: Sequence[int]) -> Advice | None:
    """Advice on steps of draft tokens, running requests and us; None where fewer than two lengths
    have enough of them, or ran at other loads.

    Loads outside those of the logs are not judged.
    """
    from scipy.optimize import nnls

    rows = np.array(steps, float).reshape(-1, 3)
    of_length = {int(k): rows[rows[:, 0] == k] for k in np.unique(rows[:, 0])}
    of_length = {k: own for k, own in of_length.items() if len(own) >= _LEAST_POINTS}
    least = max((own[:, 1].min() for own in of_length.values()), default=0)
    most = min((own[:, 1].max() for own in of_length.values()), default=0)
    if len(of_length) < 2 or least > most:
        return None
    fits, off, num_drafted = dict[bool, Floats](), list[float](), len(of_length.keys() - {0})
    for drafts in {k > 0 for k in of_length}:
        own = [own for k, own in of_length.items() if (k > 0) == drafts]
        length, running, us = np.concatenate(own).T
        terms = _terms(running, length)
        fits[drafts], _ = nnls(terms / us[:, None], np.ones_like(us))
        off += np.abs(terms @ fits[drafts] / us - 1).tolist()

    def clock(batch_size: int, k: int, emitted: float, context_tokens: float) -> float | None:
        del emitted, context_tokens
        if k not in of_length and (k == 0 or num_drafted < 2):
            return None
        return float(_terms(batch_size, k) @ fits[k > 0]) / batch_size

    loads = [size for size in sizes if least <= size <= most]
    loads = loads or [round(float(np.median(rows[:, 1])))]
    source = (
        f"the logs' own steps, as of one server, at {least:.0f} to {most:.0f} requests (rough: "
        f"half of the lines are off by more than {np.median(off):.1%})"
    )
    not_reached = [size for size in sizes if size not in loads]
    # The standard error of a normal with this mean absolute error, as of a table's held-out points.
    error = float(np.sqrt(np.pi / 2) * np.mean(off))
    return Advice(clock, loads, source, not_reached, time_error=error)


def _terms(running: Any, length: Any) -> Floats:
    """`[..., 4]`: 1, B, K and B K."""
    return np.stack(np.broadcast_arrays(1.0, running, length, running * length), -1)
