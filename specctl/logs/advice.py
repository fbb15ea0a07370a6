"""Advice from figures of acceptance: the best draft length at each load, where to switch drafts
off, or the prices at which draft tokens pay.

Lengths up to the logged one are judged; longer ones were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.formatting import listed

ChainClock = Callable[[int, int, float], float]
"""From requests together, draft tokens of a chain and emitted tokens to a request's share of the
step, us."""


_MAX_LOADS = 512
"""Largest load up to which every one is judged for a schedule."""


@dataclass(frozen=True)
class Advice:
    """A clock, and the loads at which it is asked."""

    clock: ChainClock
    batch_sizes: Sequence[int]
    source: str  # of the clock, in words
    not_reached: Sequence[int] = ()  # loads at which the clock was not measured


def explain(figures: dict[str, Any], advice: Advice | None) -> dict[str, Any]:
    """The figures with `best_lengths` by load, None without a clock, and `meaning` in sentences."""
    sweep = figures["fixed_length_sweep"]
    best = schedule = None
    if sweep is None:
        worth = f"No length can be named: {figures['why_no_sweep']}."
    elif advice is None:
        worth = _break_even_words(figures, sweep)
    else:
        spread = figures.get("marginal_interval")
        best = [best_lengths(sweep, advice.clock, size, spread) for size in advice.batch_sizes]
        stretches = _stretches(sweep, advice)
        if all(len(lengths) == 1 for _, lengths in stretches):
            schedule = [(size, lengths[0]) for size, lengths in stretches]
        worth = _best_words(best, stretches, sweep, advice)
    return {
        **figures,
        "clock": advice.source if advice and best else None,
        "best_lengths": best,
        "schedule": schedule,
        "meaning": [
            _acceptance_words(figures),
            *_movement_words(figures),
            worth,
            f"Not known: {'; '.join(figures['not_known'])}.",
        ],
    }


def best_lengths(
    sweep: dict[str, Any],
    clock: ChainClock,
    batch_size: int,
    spread: Sequence[Sequence[float]] | None = None,
) -> dict[str, Any]:
    """The lengths that may be fastest at a load, 0 for plain decoding; a single one if τ is exact.

    Args:
        spread: 95% intervals of the acceptance of each position, if known.

    Returns:
        `batch_size`; `num_draft_tokens`, a list; by length from 0 on `tokens_per_s_range`, of all
        requests, and `over_plain_range`; `over_plain_interval` of a single best length, at the ends
        of all positions' intervals together, which is wide; the clock's own error is not in it.
    """
    taus = [(1.0, 1.0), *(chain["mean_acceptance_length_range"] for chain in sweep["chains"])]
    rates = [
        sorted(1e6 * tau / clock(batch_size, length, tau) for tau in found)
        for length, found in enumerate(taus)
    ]
    surest = max(low for low, _ in rates)
    lengths = [length for length, (_, high) in enumerate(rates) if high >= surest]
    if sweep["is_exact"]:
        lengths = lengths[:1]  # the shortest of equals
    interval = None
    if spread and lengths != [0] and len(lengths) == 1:
        [best] = lengths
        ends = [1 + sum(position[end] for position in spread[:best]) for end in (0, 1)]
        interval = [1e6 * tau / clock(batch_size, best, tau) / rates[0][0] for tau in ends]
    return {
        "batch_size": batch_size,
        "num_draft_tokens": lengths,
        "tokens_per_s_range": rates,
        "over_plain_range": [[end / rates[0][0] for end in rate] for rate in rates],
        "over_plain_interval": interval,
    }


def _stretches(sweep: dict[str, Any], advice: Advice) -> list[tuple[int, list[int]]]:
    """First load and best lengths of each stretch of loads."""
    least, most = min(advice.batch_sizes), max(advice.batch_sizes)
    found: list[tuple[int, list[int]]] = []
    for size in range(least, most + 1) if most <= _MAX_LOADS else advice.batch_sizes:
        lengths = best_lengths(sweep, advice.clock, size)["num_draft_tokens"]
        if not found or found[-1][1] != lengths:
            found.append((size, lengths))
    return found


# --------------------------------------------------------------------------- in words


def shown_range(found: Sequence[float], digits: str) -> str:
    """`2.10`, or `1.90 to 2.10` if the ends differ in these digits."""
    low, high = (f"{end:{digits}}" for end in found)
    return low if low == high else f"{low} to {high}"


def gain_words(best: dict[str, Any]) -> str:
    """The speed of the best lengths over plain decoding: `2.27`, or `1.91 to 2.23` of several."""
    gains = [best["over_plain_range"][length] for length in best["num_draft_tokens"]]
    return shown_range((min(low for low, _ in gains), max(high for _, high in gains)), ".2f")


def mean_of(figures: dict[str, Any]) -> Sequence[float]:
    """Least and most mean acceptance length."""
    mean: float | None = figures.get("mean_acceptance_length")
    found: list[float] = figures["mean_acceptance_length_range"] if mean is None else [mean, mean]
    return found


def _acceptance_words(figures: dict[str, Any]) -> str:
    mean = shown_range(mean_of(figures), ".2f")
    counted = figures.get("counted")
    when = "" if counted is None else f", counted {counted}"
    emits = f"a round emits {mean} tokens (mean acceptance length, the target's own token counted)"
    marginal = figures.get("marginal_prob")
    if not marginal:
        return f"Acceptance by position is not known; {emits}{when}."
    shares = ", ".join(f"{share:.0%}" for share in marginal)
    places = "position 1" if len(marginal) == 1 else f"positions 1 to {len(marginal)}"
    rounds = figures["num_rounds"]
    sweep = figures["fixed_length_sweep"]
    least = "" if sweep is None or sweep["is_exact"] else "at least "
    return f"Draft {places} accepted in {least}{shares} of {rounds:,} rounds; {emits}{when}."


def _movement_words(figures: dict[str, Any]) -> list[str]:
    """Acceptance over time, and of processes that followed each other."""
    over, lines = figures.get("over_time"), []
    if over is not None:
        first, second, chance = (over[name] for name in ("first_half", "second_half", "chance"))
        halves = f"{first:.2f} in the first half of the log, {second:.2f} in the second"
        parts = [part["mean_acceptance_length"] for part in over["parts"]]
        ends = f"{parts[0]:.2f} in the first of {len(parts)} parts, {parts[-1]:.2f} in the last"
        if chance is None:
            lines.append(f"Over time: {halves} (too few lines to tell from chance).")
        elif chance < 0.05:
            verb = "fell" if second < first else "rose"
            lines.append(
                f"Acceptance {verb} over time: {halves} ({ends}); as large a difference comes by "
                f"chance in {chance:.1%} of orders."
            )
        else:
            lines.append(
                f"Over time: {halves}; chance alone gives as much in {chance:.0%} of orders."
            )
    processes = figures.get("processes") or []
    after = [one for one in processes if one["follows"]]
    if len(processes) > 1:
        how = (
            "one after the other, as after a restart"
            if len(after) == len(processes) - 1
            else ("side by side" if not after else f"{len(after)} of them after another had ended")
        )
        shown = "; ".join(
            f"{one['process'] or 'no name'}: τ {one['mean_acceptance_length']:.2f}, lines "
            f"{one['first_line']} to {one['last_line']}"
            for one in processes[:4]
        )
        more = f"; and {len(processes) - 4} more" if len(processes) > 4 else ""
        lines.append(f"Pooled over {len(processes)} processes, {how} ({shown}{more}).")
    return lines


def _best_words(
    best: Sequence[dict[str, Any]],
    stretches: Sequence[tuple[int, list[int]]],
    sweep: dict[str, Any],
    advice: Advice,
) -> str:
    """The best length by load, where to switch off, and the gains at the ends."""
    depth, parts = len(sweep["chains"]), list[str]()
    for start, lengths in stretches:
        named = "plain decoding (drafts off)" if lengths == [0] else " or ".join(map(str, lengths))
        parts.append(f"{named} from {_requests(start)}")
    line = f"Best draft length on {advice.source}: {listed(parts)}"
    ends = best[:1] if len(best) == 1 else [best[0], best[-1]]
    gains = [f"x {gain_words(one)} at {_requests(one['batch_size'])}" for one in ends]
    line += f"; over plain decoding {listed(gains)}"
    if any(depth in one["num_draft_tokens"] for one in best):
        line += f"; more than {depth} were not measured"
    if any(len(lengths) > 1 for _, lengths in stretches):
        line += "; where several are named, their ranges overlap"
    if advice.not_reached:
        line += f"; this clock was not measured at {listed(map(str, advice.not_reached))} requests"
    return _if(sweep["if_chains"], line + ".")


def _requests(number: int) -> str:
    return f"{number} request{'' if number == 1 else 's'}"


def _if(condition: str, line: str) -> str:
    return f"{condition[0].upper()}{condition[1:]}: {line}" if condition else line


def _break_even_words(figures: dict[str, Any], sweep: dict[str, Any]) -> str:
    depth, tau = len(sweep["chains"]), mean_of(figures)[0]
    if sweep["is_exact"]:
        tau = sweep["chains"][-1]["mean_acceptance_length_range"][0]
    if tau <= 1:
        return "Nothing was accepted, so drafting cannot pay: switch it off."
    tokens = "1 drafted token" if depth == 1 else f"{depth} drafted tokens"
    line = f"A round of {tokens} is worth it over plain decoding if it takes less than {tau:.2f} "
    line += (
        f"plain steps: if a drafted token costs less than {(tau - 1) / depth:.0%} of a step where "
    )
    line += "verifying is free, or a verified token where drafting is free"
    pays = sweep["chains"][-1]["pays_below_step_frac"]
    if pays is not None and depth > 1:
        line += f"; the last of them, over {depth - 1}, if one more costs less than {pays:.0%}"
    return _if(sweep["if_chains"], line + ". --cost-model names the best length at each load.")
