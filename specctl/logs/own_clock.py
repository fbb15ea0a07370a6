"""The time of a step from logs of one drafter's server at two or more draft lengths, plain decoding
among them.

A request's step takes seconds · running / rounds in vLLM's log, mean length · running / throughput
in SGLang's, and running / throughput in a log without drafts. Plain steps are fitted by a + b B of
the running requests B, steps with K draft tokens by a + b B + c K + d B K, each with no negative
term. It is rough: B is that of the moment of a line, and reading prompts counts too.

Drafting has a price beside that of its tokens. So plain decoding is judged by a log without drafts
alone, and lengths below the logged one by logs of two lengths with drafts.
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


def own_advices(logs: Sequence[ServerLog], batch_sizes: Sequence[int]) -> dict[str, Advice]:
    """Advice by name of a log with drafts: one for all logs of a drafter, as their start names it.

    Logs without drafts count for every drafter.
    """
    found: dict[str, Advice] = {}
    drafters: dict[tuple[str, ...], list[ServerLog]] = {}
    for log in logs:
        if log.intervals:
            methods = log.settings.get("method") or log.settings.get("method argument") or []
            drafters.setdefault(tuple(methods), []).append(log)
    for own in drafters.values():
        rows = [_steps(log) for log in logs if log in own or not log.intervals]
        if advice := _advice([row for of_log in rows for row in of_log], batch_sizes):
            found |= dict.fromkeys([log.name for log in own], advice)
    return found


def _advice(steps: Sequence[tuple[float, float, float]], sizes: Sequence[int]) -> Advice | None:
    """Advice on steps of draft tokens, running requests and us; None where fewer than two lengths
    have enough of them.

    Loads outside those of the logs are not judged.
    """
    from scipy.optimize import nnls

    rows = np.array(steps, float).reshape(-1, 3)
    of_length = {int(k): rows[rows[:, 0] == k] for k in np.unique(rows[:, 0])}
    of_length = {k: own for k, own in of_length.items() if len(own) >= _LEAST_POINTS}
    if len(of_length) < 2:
        return None
    least = max(own[:, 1].min() for own in of_length.values())
    most = min(own[:, 1].max() for own in of_length.values())
    lengths = [k for k in of_length if k]
    parts = [[0], lengths] if 0 in of_length else [lengths]

    def terms(load: Floats, k: Floats, of: Sequence[int]) -> Floats:
        by_load, by_length = float(most > least), float(len(of) > 1)  # else they tell nothing
        columns = (np.ones_like(k), by_load * load, by_length * k, by_load * by_length * load * k)
        return np.stack(columns, -1)

    weights, off = dict[int, Floats](), list[Floats]()
    for of in parts:
        length, running, us = np.concatenate([of_length[k] for k in of]).T
        table = terms(running, length, of)
        fitted, _ = nnls(table / us[:, None], np.ones_like(us))
        off.append(np.abs(table @ fitted / us - 1))
        weights |= dict.fromkeys(of, fitted)
    if least > most:
        return None  # the lengths ran at other loads

    def clock(batch_size: int, k: int, emitted: float) -> float | None:
        del emitted
        of = lengths if k and len(lengths) > 1 else [k]
        if of[0] not in weights:
            return None
        at = terms(np.array([float(batch_size)]), np.array([float(k)]), of)[0]
        return float(at @ weights[of[0]]) / batch_size

    loads = [size for size in sizes if least <= size <= most]
    loads = loads or [round(float(np.median(rows[:, 1])))]
    source = (
        f"the logs' own steps, as of one server, at {least:.0f} to {most:.0f} requests (rough: "
        f"half of the lines are off by more than {np.median(np.concatenate(off)):.0%})"
    )
    return Advice(clock, loads, source, [size for size in sizes if size not in loads])
