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
from specctl.logs.server_log import ServerLog, under_schedule
from specctl.stats import MIN_PROMPTS, Floats, Interval, ratio_of_sums

_LEAST_POINTS = 4
"""Fewest lines of a draft length."""
_OUTER = 0.05
"""Share of a length's lines at either end that do not tell where it ran."""
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

    num_draft_tokens: float  # a mean where a line mixes lengths
    num_running: int
    us: float
    mean: float  # acceptance length
    num_positions: int | None  # draft tokens that the server was started with


def _lines(log: ServerLog) -> list[tuple[Any, ...]]:
    """Draft tokens, running requests, tokens/s of all, acceptance length and a request's text of
    each line, and the draft tokens that its server was started with."""
    is_scheduled = log.engine == "vllm" and under_schedule(log.intervals)
    lines = [
        (
            one.length if is_scheduled else one.num_draft_tokens,
            one.num_running,
            one.tokens_per_s,
            sum(one.mean) / 2,
            one.context_tokens,
            one.num_draft_tokens,
        )
        for one in log.intervals
    ]
    return lines or [(0, running, speed, 1.0, text, 0) for running, speed, text in log.plain]


def _steps(log: ServerLog) -> list[_Step]:
    return [
        _Step(length, running, 1e6 * mean * running / speed, mean, positions)
        for length, running, speed, mean, _, positions in _lines(log)
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
    request, the advice's where the log has none, of lines of one length whose load and length the
    clock knows."""
    lines, kept = _lines(log), list[tuple[float, ...]]()
    for length, running, speed, mean, text, _ in lines[:: len(lines) // _MOST_COMPARED + 1]:
        if length is None or length % 1 or running is None or speed is None:
            continue
        context = advice.context_tokens if text is None else text
        share: float | None = math.inf  # of a step, where nothing ran
        if running:
            try:
                share = advice.clock(running, int(length), mean, context)
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
        if advice := _advice([run for log in together for run in _runs(log)], batch_sizes):
            found |= {log.name: advice for log in together if log.intervals}
    return found


class _Run(NamedTuple):
    """Lines of a log under one start of its server."""

    num_positions: int | None  # draft tokens that it was started with, 0 for plain decoding
    lines: Floats  # `[N, 3]`: draft tokens, running requests, us of a step
    spans: dict[int, tuple[float, float]]  # loads at which each length ran

    def at(self, load: float) -> set[int]:
        """Lengths that ran at a load, or at the next ones on both sides of it."""
        below = [(low, k) for k, (low, _) in self.spans.items() if low <= load]
        above = [(high, k) for k, (_, high) in self.spans.items() if load <= high]
        ran = {k for _, k in below} & {k for _, k in above}
        return ran or ({max(below)[1], min(above)[1]} if below and above else set())


def _runs(log: ServerLog) -> list[_Run]:
    steps: dict[int | None, list[_Step]] = {}
    for step in _steps(log):
        steps.setdefault(step.num_positions, []).append(step)
    return [
        _Run(positions, lines, _spans(lines))
        for positions, own in steps.items()
        if len(lines := np.array([step[:3] for step in own], float)) >= _LEAST_POINTS
    ]


def _spans(lines: Floats) -> dict[int, tuple[float, float]]:
    """Loads at which each length ran that has enough lines; without the outermost lines of each
    where there are several, as the load is that of the line's last moment."""
    lengths = np.rint(lines[:, 0])
    num_outer = _OUTER * (len(np.unique(lengths)) > 1)
    spans = dict[int, tuple[float, float]]()
    for length in np.unique(lengths):
        loads = np.sort(lines[lengths == length, 1])
        if len(loads) >= _LEAST_POINTS:
            outer = int(num_outer * len(loads))
            spans[int(length)] = float(loads[outer]), float(loads[-1 - outer])
    return spans


def _advice(runs: Sequence[_Run], sizes: Sequence[int]) -> Advice | None:
    """Advice on the steps of runs; None where they do not tell two lengths at one load.

    A load outside those of the logs gives way to the nearest one that they reach.
    """
    from scipy.optimize import nnls

    loads_of: dict[int | None, list[float]] = {}
    for run in runs:
        loads_of.setdefault(run.num_positions, []).extend(run.lines[:, 1])
    least = max(map(min, loads_of.values()), default=0.0)
    most = min(map(max, loads_of.values()), default=0.0)

    def ran_at(load: float) -> tuple[set[int], int]:
        """Lengths at a load, and the number of runs with drafts."""
        found = [lengths for run in runs if (lengths := run.at(load))]
        found = found or [set(run.spans) for run in runs]
        return set[int]().union(*found), sum(lengths != {0} for lengths in found)

    ends = {end for run in runs for span in run.spans.values() for end in span}
    if not any(least <= end <= most and len(ran_at(end)[0]) > 1 for end in ends):
        return None
    fits, off = dict[bool, Floats](), list[float]()
    for drafts in {run.num_positions != 0 for run in runs}:
        own = [run.lines for run in runs if (run.num_positions != 0) == drafts]
        length, running, us = np.concatenate(own).T
        terms = _terms(running, length)
        fits[drafts], _ = nnls(terms / us[:, None], np.ones_like(us))
        off += np.abs(terms @ fits[drafts] / us - 1).tolist()

    def clock(batch_size: int, k: int, emitted: float, context_tokens: float) -> float | None:
        del emitted, context_tokens
        ran, num_drafting = ran_at(batch_size)
        # The fit tells lengths between those of two runs; one run under a schedule tells its own.
        is_told = 0 < k <= max(ran) and num_drafting > 1 and len(ran - {0}) > 1
        if not (is_told or k in ran):
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
