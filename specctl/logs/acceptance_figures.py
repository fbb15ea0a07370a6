"""Acceptance counted by servers: by draft position, for chains of any shorter length, in words.

Counts of rounds by accepted tokens give the expectation for every chain up to the measured length:
E[accepted | K] = Σ_{j <= K} P(at least j). τ by length is a range if some rounds drafted fewer
tokens, or if only the mean is known. Longer chains remain unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

NOT_REPLAYED = {
    "replayable": False,
    "why_not_replayed": "these are the rounds that one policy ran; positions where it started no "
    "round are not there, so no other policy can be replayed from them",
}
Range = tuple[float, float]
"""Least and most of a figure; equal if it is known."""
ChainClock = Callable[[int, float], float]
"""From draft tokens of a chain and emitted tokens to the time of a request's step, us."""
UNKNOWN_BATCHES = "which requests were decoded together"


# ----------------------------------------------------------------- counts


def chain_figures(
    num_rounds: int,
    at_least: Sequence[int],
    num_drafted: int,
    num_accepted: int,
    *,
    is_ragged: bool,
    not_known: Sequence[str] = (),
) -> dict[str, Any]:
    """Figures of rounds with chains, and of every shorter chain.

    Args:
        num_rounds: above 0. at_least: rounds with at least 1, 2, ... accepted draft tokens.
        is_ragged: some rounds drafted fewer positions; each drafted at least one.
        not_known: further facts that the source lacks.

    Returns:
        Sums and ratios; `marginal_prob`, P(at least j accepted), over all rounds;
        `conditional_prob`, over rounds that accepted j - 1, None without such rounds;
        `fixed_length_sweep` of `sweep_of`, None without positions.
    """
    marginal = [count / num_rounds for count in at_least]
    reached = [num_rounds, *at_least][: len(at_least)]
    most, depth = list(marginal), len(at_least)
    if is_ragged:
        # A round that drafted less than j tokens and accepted them all might have accepted token j
        # too; it drafted at least depth - j + 1 tokens fewer than the longest.
        short = max(depth * num_rounds - num_drafted, 0)
        bounds = [
            (count + short // (depth - place)) / num_rounds
            for place, count in enumerate(at_least[1:], start=1)
        ]
        most = list(accumulate([*marginal[:1], *bounds], min))
        basis = "a range: some rounds drafted fewer tokens than the positions that are counted"
    else:
        basis = "exact in expectation over the rounds that were measured; another length starts "
        basis += "its rounds elsewhere, which counters cannot show"
    ranges = [
        (1 + low, 1 + high)
        for low, high in zip(accumulate(marginal), accumulate(most), strict=True)
    ]
    return {
        "num_rounds": num_rounds,
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "mean_acceptance_length": 1 + num_accepted / num_rounds,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "marginal_prob": marginal,
        "conditional_prob": [
            n / before if before else None for n, before in zip(at_least, reached, strict=True)
        ],
        "fixed_length_sweep": sweep_of(ranges, basis) if ranges else None,
        "why_no_sweep": None if ranges else "acceptance by position was not counted",
        "not_known": [
            *([f"acceptance beyond {depth} draft tokens"] if at_least and at_least[-1] else []),
            *(["how many rounds drafted each position"] if is_ragged else []),
            *not_known,
        ],
    }


def mean_ranges(mean_acceptance_length: Range, depth: int) -> list[Range]:
    """τ of chains of 1 to `depth` tokens, from the mean of the longest.

    Acceptance falls with the position, so the first K of `depth` positions hold at least their
    share of the accepted tokens, and at most all of them, or K.
    """
    low, high = (max(mean - 1, 0.0) for mean in mean_acceptance_length)
    return [(1 + low * k / depth, 1 + min(high, k)) for k in range(1, depth + 1)]


def sweep_of(ranges: Sequence[Range], basis: str, if_chains: str = "") -> dict[str, Any]:
    """`fixed_length_sweep`: its basis, and one entry for each length from 1 on.

    Returns:
        `basis`, `is_exact`, `if_chains`, and `chains` of `num_draft_tokens`,
        `mean_acceptance_length_range` (bonus token counted) and `pays_below_step_frac`: the largest
        cost of a draft token, as a share of a plain step, at which the last one pays; None if
        unknown. With plain steps of time 1 and draft tokens of time x each, τ(K) / (1 + K x) rises
        with the K-th token iff x < m / (τ(K-1) - (K-1) m), m being its acceptance.
    """
    is_exact = all(low == high for low, high in ranges)
    chains, before = list[dict[str, Any]](), 1.0
    for length, found in enumerate(ranges, start=1):
        gain = found[0] - before
        rest = before - (length - 1) * gain
        pays = gain / rest if is_exact and rest > 0 else None
        chains.append(
            {
                "num_draft_tokens": length,
                "mean_acceptance_length_range": list(found),
                "pays_below_step_frac": pays,
            }
        )
        before = found[0]
    return {"basis": basis, "is_exact": is_exact, "if_chains": if_chains, "chains": chains}


# ----------------------------------------------------------------- in words


def explain(figures: dict[str, Any], clock: ChainClock | None, load: str) -> dict[str, Any]:
    """The figures with the best length under a cost model, and `meaning`, two sentences.

    Args:
        clock: of a cost model; without one, a sentence states the cost at which a draft token pays.
        load: batch size and context of the clock, in words.
    """
    sweep = figures["fixed_length_sweep"]
    best = None if clock is None or sweep is None else best_lengths(sweep, clock)
    if sweep is None:
        worth = f"No length can be named: {figures['why_no_sweep']}"
    elif best is not None:
        worth = _best_words(best, len(sweep["chains"]), load, sweep["if_chains"])
    else:
        worth = _break_even_words(figures, sweep)
    unknown = "; ".join(figures["not_known"])
    lines = [_acceptance_words(figures), worth + (f". Not known: {unknown}." if unknown else ".")]
    return {**figures, "best_length": best, "meaning": lines}


def best_lengths(sweep: dict[str, Any], clock: ChainClock) -> dict[str, Any]:
    """The lengths that may be fastest, 0 for plain decoding; a single one if τ is exact.

    Returns:
        `num_draft_tokens`, a list, and `tokens_per_s_range` by length from 0 on.
    """
    taus = [(1.0, 1.0), *(chain["mean_acceptance_length_range"] for chain in sweep["chains"])]
    rates = [
        sorted(1e6 * tau / clock(length, tau) for tau in found) for length, found in enumerate(taus)
    ]
    surest = max(low for low, _ in rates)
    lengths = [length for length, (_, high) in enumerate(rates) if high >= surest]
    if sweep["is_exact"]:
        lengths = lengths[:1]  # the shortest of equals
    return {"num_draft_tokens": lengths, "tokens_per_s_range": rates}


def shown_range(found: Sequence[float], digits: str) -> str:
    """`2.10`, or `1.90 to 2.10` if the ends differ in these digits."""
    low, high = (f"{end:{digits}}" for end in found)
    return low if low == high else f"{low} to {high}"


def _mean_of(figures: dict[str, Any]) -> list[float]:
    mean: float | None = figures.get("mean_acceptance_length")
    found: list[float] = figures["mean_acceptance_length_range"] if mean is None else [mean, mean]
    return found


def _acceptance_words(figures: dict[str, Any]) -> str:
    mean = shown_range(_mean_of(figures), ".2f")
    emits = f"a round emits {mean} tokens (mean acceptance length, the target's own token counted)"
    marginal = figures.get("marginal_prob")
    if not marginal:
        return f"Acceptance by position is not known; {emits}."
    shares = ", ".join(f"{share:.0%}" for share in marginal)
    noun = "position" if len(marginal) == 1 else "positions"
    places = "1" if len(marginal) == 1 else f"1 to {len(marginal)}"
    rounds = figures["num_rounds"]
    sweep = figures["fixed_length_sweep"]
    least = "" if sweep is None or sweep["is_exact"] else "at least "
    return f"Draft {noun} {places} accepted in {least}{shares} of {rounds:,} rounds; {emits}."


def _best_words(best: dict[str, Any], depth: int, load: str, if_chains: str) -> str:
    lengths, rates = best["num_draft_tokens"], best["tokens_per_s_range"]

    def rate(length: int) -> str:
        return shown_range(rates[length], ".0f")

    if len(lengths) > 1:
        named = ", ".join(map(str, lengths[:-1])) + f" or {lengths[-1]}"
        line = f"{named} draft tokens may be best at {load}: their ranges overlap"
    elif lengths == [0]:
        line = f"plain decoding is best at {load}, {rate(0)} tokens/s against {rate(1)} with 1 "
        line += "draft token"
    else:
        tokens = "1 draft token is" if lengths == [1] else f"{lengths[0]} draft tokens are"
        line = f"{tokens} best at {load}, {rate(lengths[0])} tokens/s against {rate(0)} of plain "
        line += "decoding; more were not measured" if lengths == [depth] else "decoding"
    line = f"{if_chains}, {line}" if if_chains else line
    return line[0].upper() + line[1:]


def _break_even_words(figures: dict[str, Any], sweep: dict[str, Any]) -> str:
    if not sweep["is_exact"]:
        steps = f"{_mean_of(figures)[0]:.2f} plain steps"
        line = f"Drafting pays where a round takes less time than {steps}; "
        return line + "--cost-model says which lengths may be best"
    pays = [chain["pays_below_step_frac"] for chain in sweep["chains"]]
    shares = ", ".join("any share" if share is None else f"{share:.0%}" for share in pays)
    which = (
        " 1 pays where it costs" if len(pays) == 1 else f"s 1 to {len(pays)} pay where they cost"
    )
    line = f"draft token{which} less than {shares} of a plain step; --cost-model names the best "
    line = (f"{sweep['if_chains']}, " if sweep["if_chains"] else "") + line + "length"
    return line[0].upper() + line[1:]
