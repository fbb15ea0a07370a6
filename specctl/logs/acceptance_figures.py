"""Acceptance counted by servers: by draft position, and for chains of any shorter length.

Counts of rounds by accepted tokens give the expectation for every chain up to the measured length:
E[accepted | K] = Σ_{j <= K} P(at least j). τ by length is a range if some rounds drafted fewer
tokens, or if only the mean is known. Longer chains remain unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations
from operator import mul
from typing import Any

from specctl.stats import MIN_PROMPTS, share

Range = tuple[float, float]
"""Least and most of a figure; equal if it is known."""
_IF_CHAINS = "if the drafts were chains (--speculative-eagle-topk 1)"
"""SGLang's figures count trees by depth and chains alike."""
TREES = "the drafts are trees, of which shorter chains do not follow"
VARIES = "the number of draft tokens changed while the server ran"
UNKNOWN_BATCHES = "which requests were decoded together"


# ----------------------------------------------------------------- counts


def chain_figures(
    num_rounds: int,
    at_least: Sequence[int],
    num_drafted: int,
    num_accepted: int,
    *,
    is_ragged: bool,
    ends_alike: bool = False,
    reached: Sequence[int] = (),
    not_known: Sequence[str] = (),
) -> dict[str, Any]:
    """Figures of rounds with chains, and of every shorter chain.

    Args:
        num_rounds: above 0. at_least: rounds with at least 1, 2, ... accepted draft tokens.
        is_ragged: some rounds drafted fewer positions; each drafted at least one.
        ends_alike: shorter chains end where these did: at the end of a text, or at a stop.
        reached: rounds that drafted each position and accepted those before, if not all drafted
            alike and these are known; `at_least` then counts rounds among them.
        not_known: further facts that the source lacks.

    Returns:
        Sums and ratios; `marginal_prob`, P(at least j accepted), over all rounds;
        `conditional_prob`, over rounds that accepted j - 1, None without such rounds;
        `fixed_length_sweep` of `sweep_of`, None without positions.
    """
    marginal, basis = [count / num_rounds for count in at_least], "the same rounds"
    ends = [share(count, num_rounds) for count in at_least] if num_rounds >= MIN_PROMPTS else []
    if reached:
        basis, ends = "the rounds that drafted them", []
        pairs = zip(at_least, reached, strict=True)
        marginal = [
            *accumulate((count / before if before else 0.0 for count, before in pairs), mul)
        ]
    basis = f"of fewer tokens is computed from {basis}"
    reached = reached or [num_rounds, *at_least][: len(at_least)]
    most, depth = list(marginal), len(at_least)
    if is_ragged and ends_alike:
        basis += ", whose drafts end where these did"
    elif is_ragged:
        # A round that drafted less than j tokens and accepted them all might have accepted token j
        # too; it drafted at least depth - j + 1 tokens fewer than the longest.
        short = max(depth * num_rounds - num_drafted, 0)
        bounds = [
            (count + short // (depth - place)) / num_rounds
            for place, count in enumerate(at_least[1:], start=1)
        ]
        most = list(accumulate([*marginal[:1], *bounds], min))
        basis = "a range: some rounds drafted fewer tokens than the positions that are counted"
    totals = (accumulate(rates, initial=1.0) for rates in (marginal, most))
    ranges = [*zip(*totals, strict=True)][1:]
    return {
        "num_rounds": num_rounds,
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "mean_acceptance_length": 1 + num_accepted / num_rounds,
        "mean_acceptance_length_range": [1 + num_accepted / num_rounds] * 2,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "marginal_prob": marginal,
        "marginal_interval": [[end.low, end.high] for end in ends] or None,
        "interval_basis": "as if rounds were independent: the true ones are wider",
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


def narrowed(sweep: dict[str, Any], measured: Mapping[int, Range]) -> dict[str, Any]:
    """A sweep of ranges with τ of shorter drafts, by length, as other logs of the drafter have it.

    No position is accepted more often than one before it, so τ by length is concave: it is above
    the line through a measured length on either side, and below that through two of one side. The
    sweep stays as it is where the logs contradict each other.
    """
    own = [tuple(chain["mean_acceptance_length_range"]) for chain in sweep["chains"]]
    known = {0: (1.0, 1.0), len(own): own[-1], **measured}
    ranges = list[Range]()
    for length, (low, high) in enumerate(own, start=1):
        if length in known:
            low, high = max(low, known[length][0]), min(high, known[length][1])
        for first, last in combinations(sorted(known), 2):
            (first_low, first_high), (last_low, last_high) = known[first], known[last]
            if first <= length <= last:
                along = (length - first) / (last - first)
                low = max(low, first_low + (last_low - first_low) * along)
            elif length > last:
                rise = (last_high - first_low) / (last - first)
                high = min(high, last_high + max(rise, 0.0) * (length - last))
            else:
                rise = (last_low - first_high) / (last - first)
                high = min(high, first_high - max(rise, 0.0) * (first - length))
        if low > high + 1e-9:
            return sweep
        ranges.append((low, max(low, high)))
    basis = "a range between measured lengths: no position is accepted more often than one before"
    return sweep_of(ranges, basis, sweep["if_chains"])


def mean_figures(
    mean: tuple[float, float],
    depth: int | None,
    why_no_sweep: str,
    not_known: list[str],
    *,
    is_chain: bool = False,
) -> dict[str, Any]:
    """Figures from a range of the mean acceptance length and, if known, draft tokens a round."""
    basis = "a range: only the mean is known; no position is accepted more often than one before it"
    figures: dict[str, Any] = {
        "mean_acceptance_length_range": list(mean),
        "num_draft_tokens_per_round": depth,
        "fixed_length_sweep": None,
        "why_no_sweep": why_no_sweep,
        "not_known": ["acceptance by position", *not_known, UNKNOWN_BATCHES],
    }
    if depth is not None and depth > 0:
        sweep = sweep_of(mean_ranges(mean, depth), basis, "" if is_chain else _IF_CHAINS)
        figures |= {"fixed_length_sweep": sweep, "why_no_sweep": None}
    return figures
