"""Intervals of a log as figures: pooled with their weights, with intervals, and over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from specctl.formatting import count
from specctl.logs.acceptance_figures import (
    TREES,
    UNKNOWN_BATCHES,
    VARIES,
    chain_figures,
    mean_figures,
)
from specctl.logs.llamacpp_log import NO_POSITIONS
from specctl.logs.moments import in_order, moments
from specctl.logs.positions import MAX_CONTEXTS, context_parts
from specctl.logs.server_log import Interval, ServerLog, under_schedule
from specctl.logs.sglang_log import chain_lengths, stated_length
from specctl.stats import MIN_PROMPTS, Floats, ratio_of_sums

_MAX_BLOCKS = 200
"""Most consecutive blocks of intervals that an interval is taken over."""
MAX_PARTS = 12
_LEAST_LINES = 4
"""Fewest lines that drafted a position, where there are more."""
_MIN_ORDERED = 10
"""Fewest parts whose orders, 252, tell a chance of 1 in 100."""


def grouped(log: ServerLog) -> dict[str, list[Interval]]:
    """Intervals that may be pooled, by name, each in order of time: of one draft length, and of one
    process where settings changed within the log, or no draft length fits the means and rates of
    all."""
    has_positions = any(one.at_least for one in log.intervals)
    # Means and rates alone tell the length of these.
    rated = [one for one in log.intervals if one.rate and not (one.num_draft_tokens or one.drafts)]
    apart = any(len(values) > 1 for values in log.settings.values())
    apart = apart or bool(rated and not chain_lengths(rated))
    groups: dict[str, list[Interval]] = {}
    for one in log.intervals:
        if has_positions and not one.at_least:
            log.leave_out(one.spot, "has no acceptance by position, as other requests do")
            continue
        drafts = one.drafts.removeprefix("chain") or "draft length unknown"
        if one.num_draft_tokens:
            drafts = f"{one.num_draft_tokens} draft tokens"
        name = f"{drafts}, {one.process}" if apart and one.process else drafts
        groups.setdefault(name, []).append(one)
    return {name: in_order(own) for name, own in groups.items()}


def pooled(log: ServerLog, intervals: Sequence[Interval]) -> dict[str, Any]:
    """Figures of intervals that drafted alike."""
    running = [one.num_running for one in intervals if one.num_running is not None]
    facts: dict[str, Any] = {
        "num_requests" if log.engine == "llamacpp" else "num_intervals": len(intervals),
        "mean_running_requests": float(np.mean(running)) if running else None,
        "mean_interval": mean_of(intervals)[1],
        "from": intervals[0].time or None,
        "to": intervals[-1].time or None,
        "order": "lines" if moments(one.time for one in intervals) is None else "time",
        "processes": _processes(intervals),
        "over_time": over_time(intervals),
        "by_context": by_context(log, intervals),
    }
    return facts | _figures(log, intervals)


def _figures(log: ServerLog, intervals: Sequence[Interval]) -> dict[str, Any]:
    """Acceptance, by position where each line has it."""
    if all(one.at_least for one in intervals):
        return _by_position(intervals, ends_alike=log.engine == "llamacpp")
    if log.engine == "sglang":
        return {"mean_of_interval_means": mean_of(intervals)[0], **_of_means(intervals)}
    least, most = np.sum([one.rounds for one in intervals if one.rounds], 0).tolist()
    accepted = sum(one.num_accepted for one in intervals)
    return {
        "num_draft_tokens": sum(one.num_drafted for one in intervals),
        "num_accepted_tokens": accepted,
        **mean_figures(
            (1 + accepted / most, 1 + accepted / least), None, NO_POSITIONS[log.form], []
        ),
    }


def by_context(log: ServerLog, intervals: Sequence[Interval]) -> list[dict[str, Any]] | None:
    """Figures of up to four parts by context, of eight lines or more each; None where there are
    fewer lines, or their texts are alike."""
    known = [one for one in intervals if one.context_tokens is not None]
    texts = np.array([one.context_tokens for one in known], float)
    num_parts = min(len(known) // MIN_PROMPTS, MAX_CONTEXTS)
    places = context_parts(texts, num_parts) if num_parts > 1 else None
    if places is None:
        return None
    parts = []
    for part in range(int(places.max()) + 1):
        inside = texts[places == part]
        own = [one for one, place in zip(known, places, strict=True) if place == part]
        ends = {"context_tokens": [inside.min(), inside.max()], "num_lines": len(own)}
        mean = float(inside.mean())
        parts.append({**ends, "mean_context_tokens": mean, **_figures(log, own)})
    return parts


def _processes(intervals: Sequence[Interval]) -> list[dict[str, Any]]:
    """Intervals and spans of each process, and whether it began when another had ended: by time,
    or by line where times are not known."""
    named: dict[str, list[Interval]] = {}
    spans: dict[str, list[float]] = {}
    known = moments(one.time for one in intervals) or [one.spot.number for one in intervals]
    for one, moment in zip(intervals, known, strict=True):
        named.setdefault(one.process, []).append(one)
        spans.setdefault(one.process, []).append(moment)
    first_end = min(span[-1] for span in spans.values())
    return [
        {
            "process": name,
            "num_intervals": len(own),
            "mean_acceptance_length": mean_of(own)[0],
            "first_line": own[0].spot.number,
            "last_line": own[-1].spot.number,
            "from": own[0].time or None,
            "to": own[-1].time or None,
            "follows": first_end < spans[name][0],
        }
        for name, own in named.items()
    ]


def _by_position(intervals: Sequence[Interval], *, ends_alike: bool) -> dict[str, Any]:
    """Acceptance by position, each over the lines that drafted it.

    Under a schedule, lines that mix lengths do not tell which rounds did, and are left out.
    """
    of_all = sum(one.weight for one in intervals)
    even = [one for one in intervals if one.even_length]
    has_schedule = not ends_alike and under_schedule(intervals)
    is_ragged = not has_schedule and any(one.even_length < len(one.at_least) for one in intervals)
    known = even if has_schedule else [*intervals]
    lengths = [one.even_length if has_schedule else len(one.at_least) for one in known]
    depth = sorted(lengths, reverse=True)[:_LEAST_LINES][-1]
    # `[N, J, 3]`: rounds of a line that drafted a position, reached it, and accepted it.
    table = np.zeros((len(known), depth, 3), int)
    for row, one, length in zip(table, known, lengths, strict=True):
        counts = [int(one.weight), *one.at_least[: min(length, depth)]]
        own = row[: len(counts) - 1]
        own[:, 0], own[:, 1], own[:, 2] = counts[0], counts[:-1], counts[1:]
    _, reached, at_least = table.sum(0).T.tolist()
    figures = chain_figures(
        int(of_all),
        at_least,
        sum(one.num_drafted for one in intervals),
        sum(one.num_accepted for one in intervals),
        is_ragged=is_ragged,
        ends_alike=ends_alike,
        reached=reached if has_schedule else (),
        not_known=[
            *(UNKNOWN_BATCHES, "rounds without a draft"),
            *(["the exact number of rounds"] if len(even) < len(intervals) else []),
        ],
    )
    parts = np.array_split(table, min(len(table), _MAX_BLOCKS))
    if len(parts) >= MIN_PROMPTS:
        below, _, above = np.array([part.sum(0) for part in parts], float).T
        ends = [ratio_of_sums(*column) for column in zip(above, below, strict=True)]
        # Around the product of the shares, of which this ratio holds the last.
        off = [own - end.value for own, end in zip(figures["marginal_prob"], ends, strict=True)]
        figures["marginal_interval"] = [
            [max(end.low + by, 0.0), min(end.high + by, 1.0)]
            for end, by in zip(ends, off, strict=True)
        ]
        mixed = len(intervals) - len(known)
        figures["interval_basis"] = f"over {len(known):,} lines of the log"
        if mixed:
            figures["interval_basis"] += f", without {count(mixed, 'line')} that mixed lengths"
    return figures


def _of_means(intervals: Sequence[Interval]) -> dict[str, Any]:
    """SGLang: an interval has the mean of an unknown number of rounds."""
    first = intervals[0]
    depth, why = first.num_draft_tokens, {"tree": TREES, "varying": VARIES}.get(first.drafts, "")
    if depth is None and not why:
        depth, why = stated_length(intervals)
    mean = min(one.mean[0] for one in intervals), max(one.mean[1] for one in intervals)
    unknown = ["how many rounds each interval had"]
    return {
        "num_rounds": None,
        "draft_tokens_if": None if depth else chain_lengths(intervals),
        **mean_figures(mean, depth, why, unknown, is_chain=first.drafts == "chain"),
    }


def _parts(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Up to 12 parts in order."""
    places = np.array_split(np.arange(len(intervals)), min(len(intervals), MAX_PARTS))
    return [[intervals[place] for place in part] for part in places]


def _sums(parts: Sequence[Sequence[Interval]], depth: int | None = None) -> Floats:
    """`[P, 2]`: emitted tokens and weights, whose ratio is the mean acceptance length, of `depth`
    draft tokens if it is given."""

    def emitted(one: Interval) -> float:
        if depth is None:
            return one.weight * sum(one.mean) / 2
        return one.weight + sum(one.at_least[:depth])

    return np.array(
        [(sum(map(emitted, part)), sum(one.weight for one in part)) for part in parts], float
    )


def mean_of(intervals: Sequence[Interval]) -> tuple[float, list[float] | None]:
    """The mean acceptance length, and its 95% interval over parts."""
    found = ratio_of_sums(*_sums(_parts(intervals)).T)
    return float(found.value), None if np.isnan(found.low) else [found.low, found.high]


def over_time(intervals: Sequence[Interval]) -> dict[str, Any] | None:
    """Means of parts in order and of both halves, and the share of orders of the parts whose halves
    differ by as much; None for fewer than four intervals. Where lines of one length each differ in
    it, the means are of the fewest, `num_draft_tokens`."""
    if len(intervals) < 4:
        return None
    lengths = {one.even_length for one in intervals if one.even_length}
    depth = min(lengths) if len(lengths) > 1 and under_schedule(intervals) else None
    parts = _parts(intervals)
    sums = _sums(parts, depth)
    orders = [*combinations(range(len(parts)), len(parts) // 2)]  # the first is that of the log
    first = np.array([sums[list(order)].sum(0) for order in orders])
    halves = [half[:, 0] / half[:, 1] for half in (first, sums.sum(0) - first)]
    off = np.abs(halves[1] - halves[0])
    return {
        "num_draft_tokens": depth,
        "parts": [
            {
                "from": part[0].time or None,
                "first_line": part[0].spot.number,
                "mean_acceptance_length": float(above / below),
            }
            for part, (above, below) in zip(parts, sums, strict=True)
        ],
        "first_half": float(halves[0][0]),
        "second_half": float(halves[1][0]),
        "chance": float(np.mean(off >= off[0] - 1e-12)) if len(parts) >= _MIN_ORDERED else None,
    }
