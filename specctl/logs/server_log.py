"""A server's log as intervals of rounds, whichever engine wrote it.

vLLM and SGLang print a line for an interval of time, llama.cpp one for a request. What a reader
leaves out is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specctl.errors import InputError
from specctl.logs.sources import Spot

NUMBER = r"(\d{1,9}(?:\.\d{1,6})?)"
MEAN_ERROR, RATE_ERROR = 0.005 + 1e-9, 0.0005 + 1e-9
"""Rounding of two and of three digits behind the point."""
_MAX_OFF = 20_000
"""Distance from the likeliest number of rounds that is searched; enough for a mean of 1.1 over a
million tokens."""


@dataclass(frozen=True)
class Interval:
    """Rounds that one line sums up; a request, in llama.cpp's log."""

    spot: Spot
    process: str
    time: str
    mean: tuple[float, float]  # least and most mean acceptance length that the digits allow
    weight: float  # in means of means: rounds, else running requests
    num_rounds: int = 0  # 0: not known
    num_drafted: int = 0
    num_accepted: int = 0
    at_least: tuple[int, ...] = ()  # rounds that accepted at least 1, 2, ... tokens; empty: unknown
    is_even: bool = False  # each round drafted all positions
    num_running: int | None = None  # requests, when the line was printed
    seconds: float | None = None
    rate: float | None = None  # SGLang's accept rate
    drafts: str = "chain"  # or "tree", "varying", "" if nothing tells
    num_draft_tokens: int | None = None  # of a chain; None if nothing tells
    tokens_per_s: float | None = None


@dataclass
class ServerLog:
    """Everything that was read of one engine's lines.

    `settings` holds what lines of the start say, by name: each value once, in order.
    """

    engine: str
    intervals: list[Interval] = field(default_factory=list)
    settings: dict[str, list[str]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    first_left_out: dict[str, Spot] = field(default_factory=dict)
    num_plain: int = 0  # lines of the engine about intervals, with or without drafts
    num_idle: int = 0  # lines about drafts in which none was drafted
    plain: list[tuple[int, float]] = field(default_factory=list)  # running requests, tokens/s
    _seen: set[tuple[str, ...]] = field(default_factory=set)

    def leave_out(self, spot: Spot, reason: str) -> None:
        self.left_out[reason] += 1
        self.first_left_out.setdefault(reason, spot)

    def add(self, interval: Interval, *identity: str) -> None:
        """Adds an interval, unless the same process printed it at the same time before: loggers
        with two handlers print twice, and files are joined twice."""
        key = (interval.process, interval.time, *identity)
        if interval.time and key in self._seen:
            self.leave_out(interval.spot, TWICE)
            return
        self._seen.add(key)
        self.intervals.append(interval)

    def set(self, name: str, value: str) -> None:
        values = self.settings.setdefault(name, [])
        if value not in values:
            values.append(value)

    def one(self, name: str) -> str | None:
        """The value of a setting, None if it is not there or changed."""
        values = self.settings.get(name, [])
        return values[0] if len(values) == 1 else None

    def refuse(self, name: str, otherwise: str, hint: str) -> InputError:
        """The error for a log without any interval that can be used."""
        if not self.left_out:
            return InputError(f"{name}: {otherwise}", hint=hint)
        [(reason, count)] = self.left_out.most_common(1)
        spot = self.first_left_out[reason]
        more = f", as {count - 1:,} more" if count > 1 else ""
        return InputError(f"{spot}: this line {reason}{more}", hint=_FIX.get(reason, _COPY))


_COPY = "give the log as the server wrote it"
TWICE = "repeats one of the same process, time and figures"
CUT = "is cut off or split: its end is missing"
CONTRADICTS = "contradicts itself, so it was edited or is of an unknown version"
_FIX = {CUT: "give the file itself, not lines that were copied, or found by grep in split records"}


class Starts:
    """Counts the starts of processes: a start line after an interval begins another run."""

    def __init__(self) -> None:
        self._runs: Counter[str] = Counter()
        self._has_run: set[str] = set()

    def start(self, process: str) -> None:
        """A start line of a process, or of that whose ranks have longer names."""
        for name in [one for one in self._has_run if belongs(one, process)]:
            self._runs[name] += 1
            self._has_run.discard(name)

    def name(self, process: str) -> str:
        """The run of a process, when it prints an interval."""
        self._has_run.add(process)
        runs = self._runs[process]
        return f"{process or 'the server'}, start {runs + 1}" if runs else process


def belongs(rank: str, process: str) -> bool:
    """Whether a process, e.g. `SGLangEngine pid=7 TP0`, is a rank of another."""
    return not process or rank == process or rank.startswith(process + " ")


def processes_of(intervals: Sequence[Interval]) -> list[dict[str, Any]]:
    """Intervals and spans of each process, and whether it began when another had ended."""
    named: dict[str, list[Interval]] = {}
    for one in intervals:
        named.setdefault(one.process, []).append(one)
    spans = [(own[0].spot, own[-1].spot) for own in named.values()]
    follows = [False] + [
        before[1].path == after[0].path and before[1].number < after[0].number
        for before, after in pairwise(spans)
    ]
    return [
        {
            "process": name,
            "num_intervals": len(own),
            "mean_acceptance_length": sum(one.weight * sum(one.mean) / 2 for one in own)
            / sum(one.weight for one in own),
            "first_line": own[0].spot.number,
            "last_line": own[-1].spot.number,
            "from": own[0].time,
            "to": own[-1].time,
            "follows": after,
        }
        for (name, own), after in zip(named.items(), follows, strict=True)
    ]


def rounds_of(
    mean: float, accepted: int, drafted: int, rates: Sequence[float]
) -> tuple[int, bool] | None:
    """Rounds behind sums, a mean of two digits and rates of three, and whether each drafted all.

    None if the figures contradict each other.
    """

    def fits(num_rounds: int) -> bool:
        counts = [round(rate * num_rounds) for rate in rates]
        off = abs(sum(counts) - accepted)
        return (
            abs(1 + accepted / num_rounds - mean) <= MEAN_ERROR
            and off <= RATE_ERROR * num_rounds * len(counts)
            and counts == sorted(counts, reverse=True)
            and all(
                abs(count / num_rounds - rate) <= RATE_ERROR
                for count, rate in zip(counts, rates, strict=True)
            )
        )

    even, rest = divmod(drafted, len(rates))
    if rest == 0 and fits(even):
        return even, True
    if not accepted:  # unknown; the least
        return (even + bool(rest), False) if not any(rates) and mean <= 1 + MEAN_ERROR else None
    likeliest = round(accepted / max(mean - 1, MEAN_ERROR))
    for off in range(_MAX_OFF):
        for num_rounds in {likeliest - off, likeliest + off}:
            if even < num_rounds <= drafted and fits(num_rounds):
                return num_rounds, False
    return None
