"""Advice from figures of acceptance: the best draft length at each load, where to switch drafts
off, or the prices at which draft tokens pay.

Lengths up to the logged one are judged; longer ones were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log
from typing import Any

from specctl.formatting import count, listed
from specctl.stats import QUANTILE

ChainClock = Callable[[int, int, float, float], float | None]
"""From requests together, draft tokens of a chain, emitted tokens and a request's text to its share
of the step, us; None where it is not known."""
NOT_BY_CONTEXT = (
    "vLLM 0.33, SGLang 0.5.23 and llama.cpp 11549 pick no length by context: send requests of "
    "these lengths to servers of their own."
)
_CHANCE = 0.01  # below which a change is told: 1 in 20 is seen often in many logs
_MAX_LOADS = 512
"""Largest load up to which every one is judged for a schedule."""


@dataclass(frozen=True)
class Advice:
    """A clock, and the loads at which it is asked."""

    clock: ChainClock
    batch_sizes: Sequence[int]
    source: str  # of the clock, in words
    not_reached: Sequence[int] = ()  # loads at which the clock was not measured
    context_tokens: float = 512
    time_error: float | None = None  # relative standard error of a time, see `stats`
    reach: tuple[int, int] | None = None  # loads of the logs that are the clock
    is_forced: bool = False  # the user wants its answer, whosever it is
    log_over_clock: float | None = None  # a step of the log over the clock's; None: not compared
    doubt: str = ""  # on the times, a sentence
    is_refuted: bool = False  # by the logs' own speed: no length is named


def explain(
    figures: dict[str, Any], advice: Advice | None, *, has_prices: bool = True
) -> dict[str, Any]:
    """The figures, with `meaning` in sentences. A clock adds its source, `clock`, and `time_error`,
    `best_lengths` by load, those of each part `by_context`, and a `schedule`, None where lengths
    tie or the clock is too rough; without a clock, or with one that the log's speed refutes, these
    are None, and prices are told. `log_over_clock` is the logged time of a step over the clock's,
    None where they were not compared."""
    sweep, by_context = figures["fixed_length_sweep"], figures.get("by_context")
    told: dict[str, Any] = dict.fromkeys(("clock", "time_error", "best_lengths", "schedule"))
    told["log_over_clock"] = advice and advice.log_over_clock
    if sweep is None:
        worth = [f"No length can be named: {figures['why_no_sweep']}."]
    elif advice is None or advice.is_refuted:
        worth = [_break_even_words(sweep)] * has_prices
        if advice:
            worth.insert(0, advice.doubt)
        elif has_prices:
            worth.append("Step times are not known: add a log without drafts, or --cost-model.")
    else:
        best = [best_lengths(figures, advice, size) for size in advice.batch_sizes]
        schedule = _schedule(figures, advice)
        worth = _limits(best, sweep, advice, has_schedule=schedule is not None)
        if _has_stop(figures) and not advice.reach:
            worth.append(
                "This clock times whole chains, so gains with the stop are at least these and no "
                "setting is named: give a log without drafts in its place."
            )
        if schedule and schedule[-1][1] == 0 and len(schedule) > 1:
            worth.append(f"From {schedule[-1][0]} requests on drafts cost more than they bring.")
        by_context = by_context and [_at_context(part, advice) for part in by_context]
        told |= {
            "clock": advice.source,
            "time_error": advice.time_error,
            "best_lengths": best,
            "schedule": schedule,
        }
    return {
        **figures,
        **told,
        "by_context": by_context,
        "meaning": [
            *_movement_words(figures),
            *_stop_words(figures),
            *worth,
            f"Not known: {'; '.join(figures['not_known'])}.",
        ],
    }


def _at_context(part: dict[str, Any], advice: Advice) -> dict[str, Any]:
    """A part by context with its best lengths, None where its draft length is not known."""
    at, best = replace(advice, context_tokens=part["mean_context_tokens"]), None
    if part["fixed_length_sweep"]:
        best = [best_lengths(part, at, size) for size in at.batch_sizes]
    return {**part, "best_lengths": best}


def best_lengths(figures: dict[str, Any], advice: Advice, batch_size: int) -> dict[str, Any]:
    """The lengths that may be fastest at a load, 0 for plain decoding; the shortest of equals.

    Returns:
        `batch_size`; `num_draft_tokens`, a list; by length from 0 on `tokens_per_s_range`, of all
        requests, and `over_plain_range`, None where the clock does not know a length;
        `over_plain_interval` of a single best length, 95 %: the ends of all positions' intervals
        together, which is wide, and the clock's error, which both times draw independently; None
        where no position has an interval.
    """
    sweep, spread = figures["fixed_length_sweep"], figures.get("marginal_interval")

    taus = [(1.0, 1.0), *(chain["mean_acceptance_length_range"] for chain in sweep["chains"])]
    rates = list[list[float] | None]()
    for length, found in enumerate(taus):
        times = [advice.clock(batch_size, length, tau, advice.context_tokens) for tau in found]
        rates.append(
            sorted(1e6 * tau / us for tau, us in zip(found, times, strict=True) if us) or None
        )
    known, plain = {length: rate for length, rate in enumerate(rates) if rate}, rates[0]
    surest = max(low for low, _ in known.values())
    lengths = [length for length, (_, high) in known.items() if high >= surest]
    if sweep["is_exact"]:
        lengths = lengths[:1]  # the shortest of equals
    interval = None
    if plain and spread and lengths != [0] and len(lengths) == 1:
        [best] = lengths
        gain, clock = known[best][0] / plain[0], QUANTILE * 2**0.5 * (advice.time_error or 0.0)
        ends = [1 + sum(position[end] for position in spread[:best]) for end in (0, 1)]
        off = [hypot(log(tau / taus[best][0]), clock) for tau in ends]
        interval = [gain * exp(-off[0]), gain * exp(off[1])]
    return {
        "batch_size": batch_size,
        "num_draft_tokens": lengths,
        "tokens_per_s_range": rates,
        "over_plain_range": [
            [end / plain[0] for end in rate] if rate and plain else None for rate in rates
        ],
        "over_plain_interval": interval,
    }


def _schedule(figures: dict[str, Any], advice: Advice) -> list[tuple[int, int]] | None:
    """First load and best length of each stretch of loads, the logged length below those that the
    clock reaches; None where lengths tie or the clock is too rough."""
    if advice.doubt if advice.reach else _has_stop(figures):
        return None
    least, most = min(advice.batch_sizes), max(advice.batch_sizes)
    found = [(1, len(figures["fixed_length_sweep"]["chains"]))] * _is_below(advice)
    for size in range(least, most + 1) if most <= _MAX_LOADS else advice.batch_sizes:
        length, *others = best_lengths(figures, advice, size)["num_draft_tokens"]
        if others:
            return None
        if not found or found[-1][1] != length:
            found.append((size, length))
    return found


def _is_below(advice: Advice) -> bool:
    """Whether a load was asked for that is below those of the logs."""
    least = advice.reach[0] if advice.reach else 1
    return any(size < least for size in advice.not_reached)


def _movement_words(figures: dict[str, Any]) -> list[str]:
    """Acceptance over time, and of processes that followed each other."""
    over, lines, is_timed = figures.get("over_time"), [], figures.get("order") == "time"
    unless = "" if is_timed else ", if the lines stand in its order"
    if over is not None:
        first, second, chance = (over[name] for name in ("first_half", "second_half", "chance"))
        of = f" of {count(over['num_draft_tokens'], 'token')}" if over["num_draft_tokens"] else ""
        line = (
            f"Over time{unless}: τ{of} {first:.2f} in the first half of the log, {second:.2f} in "
        )
        line += "the second"
        if chance is None:
            line += ": too few lines to tell from chance."
        elif chance >= _CHANCE:
            line += ": no difference beyond chance."
        else:
            parts = [part["mean_acceptance_length"] for part in over["parts"]]
            line += f" ({parts[0]:.2f} in the first of {len(parts)} parts, {parts[-1]:.2f} in the "
            line += f"last). τ {'fell' if second < first else 'rose'} by "
            line += f"{abs(second / first - 1):.1%}: parts in random order differ as much in "
            line += f"{chance:.1%}."
        lines.append(line)
    processes = figures.get("processes") or []
    if len(processes) > 1:
        after = sum(one["follows"] for one in processes)
        how = "side by side"
        if after:
            how = f"{after} of them after another had ended, as after a restart{unless}"
        ends = ("from", "to") if is_timed else ("first_line", "last_line")
        shown = "; ".join(
            f"{one['process'] or 'no name'}: τ {one['mean_acceptance_length']:.2f}, "
            f"{'' if is_timed else 'lines '}{one[ends[0]]} to {one[ends[1]]}"
            for one in processes[:4]
        )
        more = f"; and {len(processes) - 4} more" if len(processes) > 4 else ""
        lines.append(f"Pooled over {len(processes)} processes, {how} ({shown}{more}).")
    return lines


def change_words(change: Sequence[float] | None) -> str:
    """A verdict on the 95% interval of a difference of τ."""
    if change is None:
        return "too few lines to tell from chance"
    low, high = change
    verdict = (
        "no difference beyond chance" if low <= 0 <= high else "a fall" if low < 0 else "a rise"
    )
    digits = "+.2f" if high - low >= 0.02 else "+.3f"
    middle, *ends = (f"{x:{digits}}" for x in ((low + high) / 2, low, high))
    return f"{verdict}: {middle}, 95% interval {' to '.join(ends)}"


def _limits(
    best: Sequence[dict[str, Any]], sweep: dict[str, Any], advice: Advice, *, has_schedule: bool
) -> list[str]:
    """Limits of the best lengths, in sentences."""
    depth, limits = len(sweep["chains"]), [advice.doubt] * bool(advice.doubt)
    if sweep["if_chains"]:
        limits.append(f"The best lengths hold {sweep['if_chains']}.")
    if any(depth in one["num_draft_tokens"] for one in best):
        limits.append(f"More than {depth} draft tokens were not measured.")
    if any(len(one["num_draft_tokens"]) > 1 for one in best):
        limits.append("Where several lengths are named, their ranges overlap.")
    if best[0]["tokens_per_s_range"][0] is None:
        limits.append("Plain decoding is not judged: add a log without drafts.")
    unknown = [one["batch_size"] for one in best if None in one["tokens_per_s_range"][1:]]
    if unknown:
        known = {k for one in best for k, rate in enumerate(one["tokens_per_s_range"]) if rate}
        what = f"Fewer than {depth} draft tokens"
        if known > {0, depth}:
            what = f"At {listed(map(str, unknown))} requests, lengths that did not run"
        limits.append(f"{what} are not judged: add a log of such a length.")
    if advice.not_reached:
        sizes = listed(map(str, advice.not_reached))
        if advice.reach is None:
            limits.append(f"This clock was not measured at {sizes} requests.")
        else:
            least, most = advice.reach
            loads = f"reach from {least} to {most} requests"
            if least == most:
                loads = f"have {count(least, 'request')} at a time"
            line = f"The logs {loads}: {sizes} not judged"
            if _is_below(advice) and has_schedule:
                line += f", and below {least} Set keeps the log's {depth}"
            limits.append(f"{line}.")
    return limits


def _has_stop(figures: dict[str, Any]) -> bool:
    return "on" in figures.get("settings", {}).get("early stop", ())


def _stop_words(figures: dict[str, Any]) -> list[str]:
    """Drafts that llama.cpp ended before their length."""
    rounds = figures.get("num_rounds")
    if not rounds or not _has_stop(figures):
        return []
    p_min = figures["settings"].get("p_min", ["not stated"])[-1]
    p_min = " whose value the log does not state" if p_min == "not stated" else f" {p_min}"
    drafted = figures["num_draft_tokens"] / rounds
    return [
        f"An early stop was on (--spec-draft-p-min{p_min}): {drafted:.1f} of "
        f"{len(figures['marginal_prob'])} tokens were drafted a round. All figures hold with it."
    ]


def _break_even_words(sweep: dict[str, Any]) -> str:
    """Lengths of a step below which a round, and its last draft token, pay."""
    taus = [1.0, *(chain["mean_acceptance_length_range"][0] for chain in sweep["chains"])]
    *_, before, tau = taus
    if tau <= 1:
        return "Nothing was accepted, so drafting cannot pay: switch it off."
    depth = len(taus) - 1
    condition = f" ({sweep['if_chains']})" if sweep["if_chains"] else ""
    line = f"Drafting {count(depth, 'token')} pays if a step with drafts takes less than "
    line += f"{tau:.2f} plain steps{condition}."
    if sweep["is_exact"] and depth > 1:
        line += f" Token {depth} pays if it makes a step less than {tau / before - 1:.1%} longer."
    return line
