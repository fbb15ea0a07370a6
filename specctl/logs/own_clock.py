"""The time of a step from logs of one server at two or more draft lengths, plain decoding among
them.

A request's step takes seconds · running / rounds in vLLM's log, mean length · running / throughput
in SGLang's, and running / throughput in a log without drafts. Over lengths K and running requests B
these are fitted by a + b B + c K + d B K with no negative term. It is rough: B is that of the
moment of a line, and reading prompts counts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.logs.advice import Advice
from specctl.logs.server_log import ServerLog
from specctl.stats import Floats

_LEAST_POINTS = 4
"""Fewest lines of a draft length."""
_LONGEST = 3.0
"""Times the median length of an interval from which on the server had paused in it."""


@dataclass(frozen=True)
class Points:
    """Steps that lines of a log sum up."""

    length: Floats  # `[M]` draft tokens
    running: Floats  # requests together
    us: Floats


def steps_of(logs: Sequence[ServerLog]) -> Points:
    """A point for each line whose figures tell the time of a step."""
    rows: list[tuple[float, float, float]] = []
    for log in logs:
        spans = [one.seconds for one in log.intervals if one.seconds is not None]
        longest = _LONGEST * float(np.median(spans)) if spans else 0.0
        for one in log.intervals:
            running, length = one.num_running, one.num_draft_tokens
            if not running or length is None:
                continue
            if one.num_rounds and one.seconds is not None and one.seconds <= longest:
                rows.append((length, running, 1e6 * one.seconds * running / one.num_rounds))
            elif not one.num_rounds and one.tokens_per_s:
                emitted = sum(one.mean) / 2
                rows.append((length, running, 1e6 * emitted * running / one.tokens_per_s))
        if not log.intervals:
            rows += [(0, load, 1e6 * load / speed) for load, speed in log.plain if load and speed]
    return Points(*np.array(rows, float).reshape(-1, 3).T)


def own_advice(logs: Sequence[ServerLog], batch_sizes: Sequence[int]) -> Advice | None:
    """Advice on the logs' own clock; None where fewer than two lengths have enough lines.

    Loads outside those of the logs are not judged.
    """
    from scipy.optimize import nnls

    points = steps_of(logs)
    lengths = [k for k in np.unique(points.length) if np.sum(points.length == k) >= _LEAST_POINTS]
    if len(lengths) < 2:
        return None
    of_length = [points.running[points.length == k] for k in lengths]
    least, most = max(loads.min() for loads in of_length), min(loads.max() for loads in of_length)
    if least > most:
        return None
    kept = np.isin(points.length, lengths)
    length, running, us = points.length[kept], points.running[kept], points.us[kept]

    def terms(load: Floats, k: Floats) -> Floats:
        varies = float(most > least)  # else one load tells nothing of others
        return np.stack([np.ones_like(k), varies * load, k, varies * load * k], -1)

    weights, _ = nnls(terms(running, length) / us[:, None], np.ones_like(us))
    if not np.all(terms(np.array([least, most]), np.zeros(2)) @ weights > 0):
        return None  # these lines tell nothing of plain decoding
    off = np.median(np.abs(terms(running, length) @ weights / us - 1))

    def clock(batch_size: int, k: int, emitted: float) -> float:
        del emitted
        step = terms(np.array([float(batch_size)]), np.array([float(k)])) @ weights
        return float(step[0]) / batch_size

    loads = [size for size in batch_sizes if least <= size <= most]
    loads = loads or [round(float(np.median(running)))]
    plain = "" if lengths[0] == 0 else ", plain decoding by the line through the lengths"
    span = f"{least:.0f} to {most:.0f} requests"
    source = (
        f"the logs' own steps, as of one server, at {span} (rough: half of the lines are off by "
    )
    source += f"more than {off:.0%}{plain})"
    return Advice(clock, loads, source, [size for size in batch_sizes if size not in loads])
