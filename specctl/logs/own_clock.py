"""The time of a step from logs of one drafter's server at two or more draft lengths, plain decoding
among them.

A request's step takes length · running / throughput, its mean acceptance length being 1 without
drafts. Plain steps are fitted by a + b B of the running requests B, steps with K draft tokens by
a + b B + c K + d B K, each with no negative term. It is rough: B is that of the moment of a line,
and reading prompts counts too.

Drafting has a price beside that of its tokens. So plain decoding is judged by a log without drafts
alone, and lengths below the logged one by logs of two lengths with drafts.

A cost model's clock is held against the logs' tokens/s: where they contradict it, it is another
server's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import log as ln
from typing import Any, NamedTuple

import numpy as np

from specctl.errors import UsageError
from specctl.formatting import count
from specctl.logs.advice import Advice
from specctl.logs.server_log import ServerLog
from specctl.stats import MIN_PROMPTS, Floats, Interval, ratio_of_sums

_LEAST_POINTS = 4
"""Fewest lines of a draft length."""
_MOST_COMPARED = 500
"""Most lines of a log that a cost model is held against."""
_NEAR, _FAR = 1.1, 1.5
"""Ratios of the log's time to a clock's beyond chance: from the first on it is said, from the
second on the clock is another server's. Choices; docs/import.md has the reasons."""
_TOO_ROUGH = 0.2
"""Standard error of an own clock above which it names no setting: the interval of a gain reaches
from 0.57 to 1.74 of it. A choice too."""


class _Step(NamedTuple):
    """Steps that a line of a log sums up."""

    num_draft_tokens: int
    num_running: int
    us: float
    mean: float  # acceptance length


def _lines(log: ServerLog) -> list[tuple[Any, ...]]:
    """Draft tokens, running requests, tokens/s of all, acceptance length and a request's text of
    each line."""
    lines = [
        (
            one.num_draft_tokens,
            one.num_running,
            one.tokens_per_s,
            sum(one.mean) / 2,
            one.context_tokens,
        )
        for one in log.intervals
    ]
    return lines or [(0, running, speed, 1.0, text) for running, speed, text in log.plain]


def _steps(log: ServerLog) -> list[_Step]:
    return [
        _Step(length, running, 1e6 * mean * running / speed, mean)
        for length, running, speed, mean, _ in _lines(log)
        if length is not None and running and speed
    ]


def held_against(advice: Advice, logs: Sequence[ServerLog]) -> Advice:
    """A cost model's advice with its error by the logs' tokens/s, at their loads and lengths.

    The running requests of a line are those of one moment, and its tokens/s a mean over seconds:
    single lines say little where requests come and go. Sums over lines are in step, as moments are
    drawn from the same time. So each log is cut into up to four parts in order, and the part counts
    whose 95 % interval is farthest from the clock, by the end that is nearer to it. Logs of fewer
    than eight such lines leave the advice as it is.
    """
    found = list[tuple[float, Interval, Floats]]()
    for log in logs:
        if "on" in log.settings.get("early stop", ()):
            continue  # its steps are shorter than those of whole chains
        lines = _compared(advice, log)
        for part in np.array_split(lines, min(len(lines) // MIN_PROMPTS, 4) or 1):
            _, _, predicted, measured, _ = part.T
            off = ratio_of_sums(predicted, measured)  # tokens/s, so this is of the log's time
            if off.known and not np.isnan(off.low) and off.low > 0:
                nearest = min(max(1.0, off.low), off.high)
                found.append((nearest, off, part.mean(0)))
    if not found:
        return advice
    nearest, off, means = max(found, key=lambda one: (abs(ln(one[0])), abs(ln(one[1].value))))
    length, running, predicted, measured, text = means
    is_other = not 1 / _FAR < nearest < _FAR
    doubt = (
        f"With {count(round(length), 'draft token')} at {count(round(running), 'request')} of "
        f"{text:,.0f} tokens of text this clock predicts {predicted:,.0f} tokens/s, and the log "
        f"has {measured:,.0f}"
    )
    if is_other:
        else_ = ", or this one was idle or read prompts most of the time" if nearest > 1 else ""
        doubt += f", so it is another server's{else_}"
        if not advice.is_forced:
            doubt += (
                ". Add logs at another draft length and without drafts in its place, or give "
                "--force for the answer on that server"
            )
    return replace(
        advice,
        log_over_clock=float(off.value),
        doubt="" if 1 / _NEAR < nearest < _NEAR else f"{doubt}.",
        is_refuted=is_other and not advice.is_forced,
    )


def _compared(advice: Advice, log: ServerLog) -> Floats:
    """`[N, 5]`: draft tokens, running requests, predicted and measured tokens/s, and the text of a
    request, the advice's where the log has none, of lines whose load and length the clock knows.
    """
    lines, kept = _lines(log), list[tuple[float, ...]]()
    for length, running, speed, mean, text in lines[:: len(lines) // _MOST_COMPARED + 1]:
        if length is None or running is None or speed is None:
            continue
        context = advice.context_tokens if text is None else text
        share: float | None = math.inf  # of a step, where nothing ran
        if running:
            try:
                share = advice.clock(running, length, mean, context)
            except UsageError:  # a load or a length that it does not know
                continue
        if share:
            kept.append((length, running, 1e6 * mean / share, speed, context))
    return np.array(kept, float).reshape(-1, 5)


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


def _advice(steps: Sequence[_Step], sizes: Sequence[int]) -> Advice | None:
    """Advice on steps; None where fewer than two lengths have enough of them, or ran at other
    loads.

    A load outside those of the logs gives way to the nearest one that they reach.
    """
    from scipy.optimize import nnls

    rows = np.array(steps, float).reshape(-1, 4)
    of_length = {int(k): rows[rows[:, 0] == k] for k in np.unique(rows[:, 0])}
    of_length = {k: own for k, own in of_length.items() if len(own) >= _LEAST_POINTS}
    least = max((own[:, 1].min() for own in of_length.values()), default=0)
    most = min((own[:, 1].max() for own in of_length.values()), default=0)
    if len(of_length) < 2 or least > most:
        return None
    fits, off, num_drafted = dict[bool, Floats](), list[float](), len(of_length.keys() - {0})
    for drafts in {k > 0 for k in of_length}:
        own = [own for k, own in of_length.items() if (k > 0) == drafts]
        length, running, us, _ = np.concatenate(own).T
        terms = _terms(running, length)
        fits[drafts], _ = nnls(terms / us[:, None], np.ones_like(us))
        off += np.abs(terms @ fits[drafts] / us - 1).tolist()

    def clock(batch_size: int, k: int, emitted: float, context_tokens: float) -> float | None:
        del emitted, context_tokens
        if k not in of_length and (k == 0 or num_drafted < 2):
            return None
        return float(_terms(batch_size, k) @ fits[k > 0]) / batch_size

    reach = round(least), round(most)
    loads = sorted({min(max(size, reach[0]), reach[1]) for size in sizes})
    at = count(reach[0], "request") if least == most else f"{reach[0]} to {reach[1]} requests"
    source = (
        f"the logs' own steps, at {at} (typical error "
        f"{np.median(off):.1%}), if all ran on one kind of GPU"
    )
    # The standard error of a normal with this mean absolute error, as of a table's held-out points.
    error, doubt = float(np.sqrt(np.pi / 2) * np.mean(off)), ""
    if error > _TOO_ROUGH:
        doubt = (
            "No setting is named: these times are too rough, as of a server that was idle or read "
            "long prompts. Add logs of steady load."
        )
    not_reached = [size for size in sizes if size not in loads]
    return Advice(clock, loads, source, not_reached, time_error=error, reach=reach, doubt=doubt)


def _terms(running: Any, length: Any) -> Floats:
    """`[..., 4]`: 1, B, K and B K."""
    return np.stack(np.broadcast_arrays(1.0, running, length, running * length), -1)
