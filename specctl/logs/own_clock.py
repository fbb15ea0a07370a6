"""The time of a step from logs of one server at two or more draft lengths, plain decoding among
them.

A request's step takes seconds · running / rounds in vLLM's log, mean length · running / throughput
in SGLang's, and running / throughput in a log without drafts. Over lengths K and running requests B
these are fitted by a + b B + c K + d B K with no negative term. It is rough: B is that of the
moment of a line, and reading prompts counts too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specctl.logs.advice import Advice
from specctl.logs.server_log import ServerLog
from specctl.stats import Floats

_LEAST_POINTS = 4
"""Fewest lines of a draft length."""
_LONGEST = 3.0
"""Times the median length of an interval from which on the server had paused in it."""


def _steps(log: ServerLog) -> list[tuple[float, float, float]]:
    """Draft tokens, running requests and us of the steps that lines of a log sum up."""
    if not log.intervals:
        return [(0, load, 1e6 * load / speed) for load, speed in log.plain if load and speed]
    rows: list[tuple[float, float, float]] = []
    spans = [one.seconds for one in log.intervals if one.seconds is not None]
    longest = _LONGEST * float(np.median(spans)) if spans else 0.0
    for one in log.intervals:
        running, length = one.num_running, one.num_draft_tokens
        if not running or length is None:
            continue
        if one.num_rounds and one.seconds is not None and one.seconds <= longest:
            rows.append((length, running, 1e6 * one.seconds * running / one.num_rounds))
        elif not one.num_rounds and one.tokens_per_s:
            rows.append((length, running, 1e6 * sum(one.mean) / 2 * running / one.tokens_per_s))
    return rows


def own_advice(logs: Sequence[ServerLog], batch_sizes: Sequence[int]) -> Advice | None:
    """Advice on the logs' own clock; None where fewer than two lengths have enough lines.

    Loads outside those of the logs are not judged.
    """
    from scipy.optimize import nnls

    rows = np.array([row for log in logs for row in _steps(log)], float).reshape(-1, 3)
    of_length = {k: rows[rows[:, 0] == k] for k in np.unique(rows[:, 0])}
    of_length = {k: own for k, own in of_length.items() if len(own) >= _LEAST_POINTS}
    if len(of_length) < 2:
        return None
    least = max(own[:, 1].min() for own in of_length.values())
    most = min(own[:, 1].max() for own in of_length.values())
    length, running, us = np.concatenate([*of_length.values()]).T

    def terms(load: Floats, k: Floats) -> Floats:
        varies = float(most > least)  # else one load tells nothing of others
        return np.stack([np.ones_like(k), varies * load, k, varies * load * k], -1)

    weights, _ = nnls(terms(running, length) / us[:, None], np.ones_like(us))
    if least > most or not np.all(terms(np.array([least, most]), np.zeros(2)) @ weights > 0):
        return None  # the lengths ran at other loads, or tell nothing of plain decoding
    off = np.median(np.abs(terms(running, length) @ weights / us - 1))

    def clock(batch_size: int, k: int, emitted: float) -> float:
        del emitted
        step = terms(np.array([float(batch_size)]), np.array([float(k)])) @ weights
        return float(step[0]) / batch_size

    loads = [size for size in batch_sizes if least <= size <= most]
    loads = loads or [round(float(np.median(running)))]
    plain = "" if 0 in of_length else ", plain decoding by the line through the lengths"
    source = (
        f"the logs' own steps, as of one server, at {least:.0f} to {most:.0f} requests (rough: "
        f"half of the lines are off by more than {off:.0%}{plain})"
    )
    return Advice(clock, loads, source, [size for size in batch_sizes if size not in loads])
