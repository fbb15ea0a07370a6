"""A server's log as intervals of rounds, whichever engine wrote it.

vLLM and SGLang print a line for an interval of time, llama.cpp one for a request. What a reader
leaves out is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl.errors import InputError
from specctl.logs.sources import Spot

NUMBER = r"(\d{1,9}\.\d{1,6})"
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
    rounds: tuple[float, float] | None = None  # least and most; None: not known
    num_drafted: int = 0
    num_accepted: int = 0
    at_least: tuple[int, ...] = ()  # rounds that accepted at least 1, 2, ... tokens; empty: unknown
    even_length: int = 0  # draft tokens of each round; 0 if rounds differ
    stated_mean: tuple[float, float] = (1.0, 1.0)  # of unknown rounds, as the digits allow
    rate: float | None = None  # SGLang's accept rate
    drafts: str = "chain"  # or "tree", "varying", "" if nothing tells
    num_draft_tokens: int | None = None  # most of a chain; None if nothing tells
    num_running: int | None = None  # requests, when the line was printed
    tokens_per_s: float | None = None
    context_tokens: float | None = None  # text of a request, as a mean

    @property
    def mean(self) -> tuple[float, float]:
        """Least and most mean acceptance length."""
        if self.rounds is None:
            return self.stated_mean
        least, most = self.rounds
        return 1 + self.num_accepted / most, 1 + self.num_accepted / least

    @property
    def length(self) -> float | None:
        """Draft tokens of a round, as a mean where a line mixes lengths."""
        if self.rounds is None or not self.num_drafted:
            return self.num_draft_tokens
        return self.num_drafted * 2 / sum(self.rounds)

    @property
    def weight(self) -> float:
        """Rounds, else running requests, for means over lines."""
        return max(self.num_running or 0, 1) if self.rounds is None else sum(self.rounds) / 2


@dataclass
class ServerLog:
    """Everything that was read of one engine's lines.

    `settings` holds what lines of the start say, by name: each value once, in order.
    """

    engine: str
    name: str
    form: str = "log"  # or "answers" of llama.cpp
    intervals: list[Interval] = field(default_factory=list)
    settings: dict[str, list[str]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    first_left_out: dict[str, Spot] = field(default_factory=dict)
    has_lines: bool = False  # of the engine at work, with or without drafts
    # Running requests, tokens/s and a request's text; None if not known.
    plain: list[tuple[int | None, float, float | None]] = field(default_factory=list)
    # Of llama.cpp's requests: tokens behind the first, their seconds, and requests at a time.
    written: list[tuple[int, float, int | None]] = field(default_factory=list)
    _said: dict[str, dict[str, str]] = field(default_factory=dict)  # last values, by process
    _of_run: dict[str, dict[str, str]] = field(default_factory=dict)
    _starts: Counter[str] = field(default_factory=Counter)
    _running: set[str] = field(default_factory=set)
    _added: set[tuple[str, ...]] = field(default_factory=set)

    def leave_out(self, spot: Spot, reason: str, lines: int = 1) -> None:
        self.left_out[reason] += lines
        self.first_left_out.setdefault(reason, spot)

    def start(self, process: str) -> None:
        """A start line: what the process, or its ranks, print from now on is another run."""
        for rank in [one for one in self._running if belongs(one, process)]:
            self._starts[rank] += 1
            self._running.discard(rank)
            self._said = {name: of for name, of in self._said.items() if not belongs(rank, name)}

    def run(self, process: str) -> str:
        """The name of a process' run, now that it prints a line."""
        starts = self._starts[process]
        run = f"{process or 'the server'}, start {starts + 1}" if starts else process
        if process not in self._running:
            self._running.add(process)
            for name, said in self._said.items():
                if belongs(process, name):
                    self._of_run.setdefault(run, {}).update(said)
        return run

    def settings_of(self, intervals: Sequence[Interval]) -> dict[str, list[str]]:
        """Settings of all runs of the log, or of the runs of these intervals."""
        runs = [
            self._of_run.get(run, {}) for run in dict.fromkeys(one.process for one in intervals)
        ]
        return {
            name: values
            if len(values) == 1
            else [value for value in values if any(run.get(name) == value for run in runs)]
            for name, values in self.settings.items()
        }

    def add(self, spot: Spot, found: Interval | str, *identity: str) -> None:
        """Adds what a line holds, or the reason why it is left out.

        A process that prints the same at the same time again is counted once: loggers with two
        handlers print twice, and files are joined twice.
        """
        if isinstance(found, str):
            self.leave_out(spot, found)
            return
        key = (found.process, found.time, *identity)
        if found.time and key in self._added:
            self.leave_out(spot, "repeats one of the same process, time and figures")
            return
        self._added.add(key)
        self.intervals.append(found)

    def set(self, name: str, value: str, process: str) -> None:
        """Notes what a start line of a process, or of all, says."""
        self._said.setdefault(process, {})[name] = value
        self._list(name, value)

    def said(self, run: str) -> dict[str, str]:
        """What the start lines of a run say."""
        return self._of_run.get(run, {})

    def note(self, run: str, name: str, value: str) -> None:
        """Notes a setting of a run that its own lines tell."""
        self._of_run.setdefault(run, {})[name] = value
        self._list(name, value)

    def _list(self, name: str, value: str) -> None:
        values = self.settings.setdefault(name, [])
        if value not in values:
            values.append(value)

    def refusal(self) -> InputError:
        """The error for a log without any interval that can be used."""
        if made_up := self.settings.get("synthetic"):
            return InputError(
                f"{self.name}: this {ENGINES[self.engine]} makes acceptances up, as its start says",
                hint=f"start it without {made_up[0]}",
            )
        if self.left_out:
            [(reason, count)] = self.left_out.most_common(1)
            more = f", like {count - 1:,} more" if count > 1 else ""
            spot = self.first_left_out[reason]
            return InputError(f"{spot}: this line {reason}{more}", hint=_FIX.get(reason, _COPY))
        engine, (lines, flag, otherwise) = ENGINES[self.engine], _DRAFTS[self.engine]
        if self.form == "answers":
            return InputError(
                f"{self.name} has no answer with draft tokens",
                hint="give answers of a server that drafts (--spec-type) beside it",
            )
        if self.settings.get("speculation") == ["off"]:
            return InputError(
                f"{self.name}: this {engine} does not speculate, as its start says",
                hint=f"start it with {flag}; a log without drafts can stand beside one with drafts",
            )
        return InputError(
            f"{self.name} has no line of {engine} about drafts ({lines})",
            hint=otherwise
            if self.settings.get("speculation")
            else f"either the server does not speculate ({flag}), or {otherwise}",
        )


ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
STOP = ("p_min", "n_min", "backend_sampling")
"""Settings of llama.cpp's drafts beside their length, as its start names them."""
_DRAFTS = {
    "vllm": (
        "`SpecDecoding metrics: ...`",
        "--speculative-config",
        "the lines are hidden (--disable-log-stats) or were left out",
    ),
    "sglang": (
        "`Decode batch, ... accept len: ...`",
        "--speculative-algorithm",
        "fewer than --decode-log-interval steps were logged (--log-level info)",
    ),
    "llamacpp": (
        "`draft acceptance = ...`",
        "--spec-type, -md",
        "it logs less than -lv 3",
    ),
}
"""Lines about drafts, the option that turns them on, and another reason for their absence."""
CUT = "is cut off or split: its end is missing"
CONTRADICTS = "contradicts itself, so it was edited or is of an unknown version"
BEFORE_0_9 = (
    "is of a vLLM before 0.9, which prints neither rounds nor acceptance by position (V0 also "
    "counts accepted tokens behind a rejected one)"
)
NO_DRAFTS = "drafted no token, as n-grams without a match do"
STREAMED = "is a part of a streamed answer"
NO_COUNTS = "has timings without whole counts"
_COPY = "give the log as the server wrote it"
_FIX = {
    CUT: "give the file itself, not lines that were copied, or found by grep in split records",
    NO_DRAFTS: "give more of the log",
    STREAMED: 'send requests without "stream": true, or import the server\'s log',
    NO_COUNTS: "keep one answer of /v1/completions or /completion a line",
    BEFORE_0_9: "upgrade to vLLM 0.9 or newer, and import its log",
}


def under_schedule(intervals: Sequence[Interval]) -> bool:
    """Whether the draft length was that of a table by batch size: lines drafted fewer tokens than
    the server was started with in all of their rounds, and most rounds are of lines of one length.
    """
    even = [one for one in intervals if one.even_length]
    is_most = 2 * sum(one.weight for one in even) > sum(one.weight for one in intervals)
    return is_most and any(one.even_length < len(one.at_least) for one in even)


def belongs(rank: str, process: str) -> bool:
    """Whether a process, e.g. `SGLangEngine pid=7 TP0`, is a rank of another."""
    return not process or rank == process or rank.startswith(process + " ")


def rounds_of(
    mean: float, accepted: int, drafted: int, rates: Sequence[float]
) -> tuple[int, int] | None:
    """Rounds behind sums, a mean of two digits and rates of three, and the draft tokens of each, 0
    if they differ.

    None if the figures contradict each other.
    """

    def fits(num_rounds: int) -> bool:
        counts = [round(rate * num_rounds) for rate in rates]
        off = abs(sum(rates) * num_rounds - accepted)
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
    # Nothing accepted fits any length.
    shortest = sum(rate > 0 for rate in rates) or len(rates)
    for length in range(len(rates), shortest - 1, -1):
        if drafted % length == 0 and fits(drafted // length):
            return drafted // length, length
    if not accepted:  # unknown; the least
        return (even + bool(rest), 0) if not any(rates) and mean <= 1 + MEAN_ERROR else None
    likeliest = round(accepted / max(mean - 1, MEAN_ERROR))
    for off in range(_MAX_OFF):
        for num_rounds in {likeliest - off, likeliest + off}:
            if even < num_rounds <= drafted and fits(num_rounds):
                return num_rounds, 0
    return None
