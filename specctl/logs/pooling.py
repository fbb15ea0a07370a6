"""Intervals of a log as figures: pooled with their weights, with intervals, and over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from specctl.logs.acceptance_figures import (
    TREES,
    UNKNOWN_BATCHES,
    VARIES,
    chain_figures,
    mean_figures,
)
from specctl.logs.llamacpp_log import NO_POSITIONS
from specctl.logs.server_log import Interval, ServerLog, processes_of
from specctl.logs.sglang_log import chain_lengths, stated_length
from specctl.stats import MIN_PROMPTS, Floats, ratio_of_sums

_MAX_BLOCKS = 200
"""Most consecutive blocks of intervals that an interval is taken over."""
_MAX_PARTS = 12


def grouped(log: ServerLog) -> dict[str, list[Interval]]:
    """Intervals that may be pooled, by name: of one draft length, and of one run where settings
    changed within the log."""
    changed = any(len(values) > 1 for values in log.settings.values())
    groups: dict[tuple[Any, ...], list[Interval]] = {}
    has_positions = any(one.at_least for one in log.intervals)
    for one in log.intervals:
        if has_positions and not one.at_least:
            log.leave_out(one.spot, "has no acceptance by position, as other requests do")
            continue
        run = one.process if changed else ""
        groups.setdefault((one.drafts, one.num_draft_tokens, run), []).append(one)
    names: dict[str, list[Interval]] = {}
    for (drafts, length, run), own in groups.items():
        is_told = bool(own[0].at_least or length or drafts)
        for part in [own] if is_told else _of_one_length(own):
            found = length if is_told else stated_length(part)[0]
            what = f"{found} draft tokens" if found else drafts.removeprefix("chain")
            name = ", ".join(filter(None, (what, run)))
            if name in names:
                name = f"{name or 'draft length not told'}, {part[0].process}"
            names[name] = part
    if len(names) > 1 and "" in names:
        names["draft length not told"] = names.pop("")
    return names


def _of_one_length(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Processes apart whose means and rates no draft length fits together."""
    runs: dict[str, list[Interval]] = {}
    for one in intervals:
        runs.setdefault(one.process, []).append(one)
    parts: list[list[Interval]] = []
    for own in runs.values():
        is_rated = any(one.rate is not None for one in own)
        for part in parts:
            if not is_rated or chain_lengths([*part, *own]):
                part += own
                break
        else:
            parts.append(own)
    return [sorted(part, key=lambda one: one.spot.number) for part in parts]


def pooled(log: ServerLog, intervals: Sequence[Interval]) -> dict[str, Any]:
    """Figures of intervals that drafted alike."""
    running = [one.num_running for one in intervals if one.num_running is not None]
    counted: str = "num_requests" if log.engine == "llamacpp" else "num_intervals"
    facts: dict[str, Any] = {
        counted: len(intervals),
        "mean_running_requests": float(np.mean(running)) if running else None,
        "from": intervals[0].time or None,
        "to": intervals[-1].time or None,
        "processes": processes_of(intervals),
        "over_time": over_time(intervals),
    }
    if all(one.at_least for one in intervals):
        return facts | _by_position(log, intervals)
    if log.engine == "llamacpp":
        least, most = (
            sum(
                one.num_accepted / (one.mean[end] - 1) if one.num_accepted else 1
                for one in intervals
            )
            for end in (1, 0)
        )
        accepted = sum(one.num_accepted for one in intervals)
        facts["num_draft_tokens"] = sum(one.num_drafted for one in intervals)
        facts["num_accepted_tokens"] = accepted
        mean = 1 + accepted / most, 1 + accepted / least
        return mean_figures(mean, None, NO_POSITIONS, [], facts)
    return _of_means(intervals, facts)


def _by_position(log: ServerLog, intervals: Sequence[Interval]) -> dict[str, Any]:
    counts = np.array([one.at_least for one in intervals])
    rounds = np.array([one.num_rounds for one in intervals])
    is_ragged = not all(one.is_even for one in intervals)
    unknown = [UNKNOWN_BATCHES, "rounds without a draft"]
    unknown += ["the exact number of rounds"] if is_ragged else []
    figures = chain_figures(
        int(rounds.sum()),
        [int(count) for count in counts.sum(0)],
        sum(one.num_drafted for one in intervals),
        sum(one.num_accepted for one in intervals),
        is_ragged=is_ragged,
        not_known=unknown,
    )
    blocks = np.array_split(np.arange(len(rounds)), min(len(rounds), _MAX_BLOCKS))
    if len(blocks) < MIN_PROMPTS:
        return figures
    below = np.array([rounds[block].sum() for block in blocks], float)
    accepted = np.array([one.num_accepted for one in intervals], float)
    mean = ratio_of_sums(np.array([accepted[block].sum() for block in blocks]), below)
    figures["mean_interval"] = [1 + mean.low, 1 + mean.high]
    ends = [
        ratio_of_sums(np.array([counts[block, place].sum() for block in blocks], float), below)
        for place in range(counts.shape[1])
    ]
    figures["marginal_interval"] = [[max(end.low, 0.0), min(end.high, 1.0)] for end in ends]
    what = "requests" if log.engine == "llamacpp" else "intervals"
    figures["interval_basis"] = f"over {len(rounds):,} {what} of the log"
    return figures


def _of_means(intervals: Sequence[Interval], facts: dict[str, Any]) -> dict[str, Any]:
    """SGLang: an interval has the mean of an unknown number of rounds."""
    weights = [one.weight for one in intervals]
    middles = [round(sum(one.mean) / 2, 4) for one in intervals]
    first = intervals[0]
    if first.drafts in ("tree", "varying"):
        depth, why = None, TREES if first.drafts == "tree" else VARIES
    elif first.num_draft_tokens is not None:
        depth, why = first.num_draft_tokens, ""
    else:
        depth, why = stated_length(intervals)
    facts |= {
        "num_rounds": None,
        "mean_of_interval_means": float(np.average(middles, weights=weights)),
        "draft_tokens_if": None if depth else chain_lengths(intervals),
    }
    if len(intervals) >= MIN_PROMPTS:
        weight = np.array(weights)
        spread = ratio_of_sums(weight * np.array(middles), weight)
        facts["mean_interval"] = [spread.low, spread.high]
    mean = min(one.mean[0] for one in intervals), max(one.mean[1] for one in intervals)
    unknown = ["how many rounds each interval had"]
    return mean_figures(mean, depth, why, unknown, facts, is_chain=first.drafts == "chain")


def over_time(intervals: Sequence[Interval]) -> dict[str, Any] | None:
    """Means of up to 12 parts in order, and the share of orders of the parts whose halves differ
    by as much as these; None for fewer than four intervals."""
    if len(intervals) < 4:
        return None
    parts = np.array_split(np.arange(len(intervals)), min(len(intervals), _MAX_PARTS))
    weight = np.array([one.weight for one in intervals], float)
    value = np.array([sum(one.mean) / 2 for one in intervals])
    below = np.array([weight[part].sum() for part in parts])
    above = np.array([(weight * value)[part].sum() for part in parts])
    half = len(parts) // 2

    def halves(first: Sequence[int]) -> Floats:
        rest = np.setdiff1d(np.arange(len(parts)), first)
        return np.array([above[side].sum() / below[side].sum() for side in (list(first), rest)])

    found = halves(range(half))
    off = [abs(np.diff(halves(first))[0]) for first in combinations(range(len(parts)), half)]
    is_enough = len(parts) >= MIN_PROMPTS
    chance = float(np.mean(np.array(off) >= abs(np.diff(found)[0]) - 1e-12)) if is_enough else None
    return {
        "parts": [
            {
                "from": intervals[part[0]].time or None,
                "first_line": intervals[part[0]].spot.number,
                "mean_acceptance_length": float(top / bottom),
            }
            for part, top, bottom in zip(parts, above, below, strict=True)
        ],
        "first_half": float(found[0]),
        "second_half": float(found[1]),
        "chance": chance,
    }
