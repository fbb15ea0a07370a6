"""llama.cpp's log: lines of a request at its end (`tools/server/server-context.cpp`).

- build 11549: `draft acceptance = 0.89474 (34 accepted / 38 generated), mean len = 3.62`, and from
  `-lv 4` on a line `acc per pos = (0.923, 0.923, 0.769)`;
- June 2026 (llama.cpp#24536): `..., mean acceptance length = 2.92, acceptance rate per position =
  (0.805, 0.632, 0.483)` on the line itself;
- before: `draft acceptance rate = 0.57576 (171 accepted / 297 generated)` alone; the rounds follow
  from `eval time = 1912.55 ms / 254 tokens`, of the same task.

`eval time = 154.41 ms / 48 tokens` of each request, drafted or not, counts the first token but no
time for it: 47 tokens took it. A request ran alone if no other was between its `processing task`
and its `stop processing`.

At the start stand `adding speculative implementation 'draft-eagle3'` and, since May 2026 (#23269),
`- n_max=6, n_min=0, p_min=0.500000, backend_sampling=0`, without the last for small drafters.

Means and rates are over rounds with a draft. `stop processing: n_tokens = 285, truncated = 0`
(`n_past` before October 2025) has the text at the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.logs.server_log import (
    CONTRADICTS,
    CUT,
    MEAN_ERROR,
    NO_COUNTS,
    NUMBER,
    STOP,
    STREAMED,
    Interval,
    ServerLog,
    rounds_of,
)
from specctl.logs.sources import Spot
from specctl.logs.wrappers import Line

_TASK = re.compile(r"task (\d{1,9})")
_SUMS = re.compile(r"\(\s*(\d{1,9}) accepted\s*/\s*(\d{1,9}) generated\)")
_MEAN = re.compile(rf"mean (?:len|acceptance length)\s*=\s*{NUMBER}")
_RATES = re.compile(r"\(?(\d\.\d{3}(?:,\s*\d\.\d{3})*)\)")
_EVAL = re.compile(rf"{NUMBER} ms /\s*(\d{{1,9}}) tokens")
_SETTING = re.compile(r"(n_min|p_min|backend_sampling)=(\d{1,9}(?:\.\d{1,9})?)")
_TEXT = re.compile(r"n_(?:tokens|past) = (\d{1,9}), truncated = 0")
NO_POSITIONS = {
    "log": "run the server with -lv 4 for acceptance by position",
    "answers": "answers do not state the draft length: import the server's metrics or log",
}
"""By form."""
_WITHOUT = "is of a request that drafted no token: it was too short, or nothing was proposed"


@dataclass
class _Request:
    """Facts of one request, from its lines."""

    spot: Spot
    process: str
    time: str
    sums: tuple[int, int] | None = None  # accepted and drafted tokens; None: cut off
    num_tokens: int | None = None  # emitted
    ms: float | None = None  # of all but the first of them
    num_together: int | None = None  # most requests at a time, this one among them
    mean: float | None = None
    positions: str | None = None
    text_tokens: int | None = None  # at the end

    @property
    def tokens_per_s(self) -> float | None:
        if not self.ms or self.num_tokens is None or self.num_tokens < 2:
            return None
        return 1e3 * (self.num_tokens - 1) / self.ms

    @property
    def context_tokens(self) -> float | None:
        """The text halfway through its rounds."""
        if self.num_tokens is None or self.text_tokens is None:
            return None
        return self.text_tokens - self.num_tokens / 2

    def interval(self) -> Interval | str | None:
        """The request, the reason why it is left out, or None for one without drafts."""
        if self.sums is None:
            return CUT
        (accepted, drafted), tokens = self.sums, self.num_tokens
        if not drafted:
            return None
        if accepted > drafted or (tokens is not None and tokens < accepted):
            return CONTRADICTS
        rates, rounds, even_length = list[float](), (0.0, 0.0), 0
        if self.mean is None:
            if tokens is None:
                return "says no mean length, and no `eval time` of its task"
            # Each round emits one token more than it accepts, a request's first token stands
            # before its rounds, and a last round may end with an accepted stop token.
            rounds = max(tokens - 1 - accepted, 1), max(tokens - accepted, 1)
        elif self.positions is None:
            rounds = _rounds(accepted, drafted, self.mean)
        else:
            if (shares := _RATES.search(self.positions)) is None:
                return CUT
            rates = [float(rate) for rate in re.split(r",\s*", shares[1])]
            if (counted := rounds_of(self.mean, accepted, drafted, rates)) is None:
                return CONTRADICTS
            rounds, even_length = (counted[0],) * 2, counted[1]
        return Interval(
            self.spot,
            self.process,
            self.time,
            rounds,
            drafted,
            accepted,
            at_least=tuple(round(rate * rounds[0]) for rate in rates),
            even_length=even_length,
            num_draft_tokens=len(rates) or None,
            num_running=1 if self.num_together == 1 else None,
            tokens_per_s=self.tokens_per_s,
            context_tokens=self.context_tokens,
        )


class LlamacppLog:
    """Reads llama.cpp's lines, one after another."""

    def __init__(self, name: str) -> None:
        self.log = ServerLog("llamacpp", name)
        self._drafted: list[_Request] = []
        self._without: list[_Request] = []
        # By process and task: those whose drafts are not read yet, and those with drafts.
        self._timed: dict[str, _Request] = {}
        self._last: dict[str, _Request] = {}
        # By process and running task: the most that ran at a time since it began.
        self._together: dict[str, dict[str, int]] = {}
        self._methods: dict[str, dict[str, None]] = {}  # by process that has not answered yet

    def take(self, line: Line) -> None:
        found = _TASK.search(line.before)
        task = f"{line.process} {found[1] if found else ''}"
        running = self._together.setdefault(line.process, {})
        if line.mark == "processing task":
            running[task] = 0
            running.update({one: max(most, len(running)) for one, most in running.items()})
        elif line.mark.startswith("eval time"):
            self.log.has_lines = True
            if timed := _EVAL.search(line.text):
                request = self._request(line)
                request.ms, request.num_tokens = float(timed[1]), int(timed[2])
                request.num_together = running.get(task)
                self._end(task)
                self._timed[task] = request
        elif line.mark.startswith("draft acceptance"):
            sums, mean = _SUMS.search(line.text), _MEAN.search(line.text)
            request = self._timed.pop(task, self._request(line))
            request.spot, request.time = line.spot, line.time
            request.sums = (int(sums[1]), int(sums[2])) if sums else None
            request.mean = float(mean[1]) if mean else None
            if "per position" in line.text:
                request.positions = line.text.partition("per position")[2]
            self._last[task] = request
            self._drafted.append(request)
        elif line.mark.startswith("acc per pos") and task in self._last:
            self._last[task].positions = line.text
        elif line.mark.startswith("stop processing"):
            running.pop(task, None)
            last = self._timed.get(task) or self._last.get(task)
            if last and (ended := _TEXT.match(line.text)):
                last.text_tokens = int(ended[1])
        elif line.mark.startswith("loading"):
            if "draft" not in line.mark:
                self.log.start(line.process)
                running.clear()
                self._methods.pop(line.process, None)
            named = "drafter" if "draft" in line.mark else "model"
            self.log.set(named, line.text.partition("'")[0], line.process)
        elif line.mark.endswith("specified") or line.mark.startswith("adding"):
            self.log.set("speculation", "off" if line.mark.startswith("no") else "on", line.process)
            if method := re.match(r" '([\w-]{1,40})'", line.text):
                self._methods.setdefault(line.process, {})[method[1]] = None
        elif line.mark.startswith("- n_max"):
            for name, value in _SETTING.findall(line.text):
                self.log.set(name, f"{float(value):g}", line.process)
        elif line.mark.startswith("synthetic"):
            self.log.set("synthetic", "--spec-synth-rates and --spec-synth-len", line.process)

    def _request(self, line: Line) -> _Request:
        if methods := self._methods.pop(line.process, None):
            self.log.set("method", ", ".join(methods), line.process)
        return _Request(line.spot, self.log.run(line.process), line.time)

    def _end(self, task: str) -> None:
        """A request whose lines are over without one of drafts."""
        if task in self._timed:
            self._without.append(self._timed.pop(task))

    def close(self) -> ServerLog:
        for task in [*self._timed]:
            self._end(task)
        for process, methods in self._methods.items():
            self.log.set("method", ", ".join(methods), process)
        _add(self.log, self._drafted, self._without)
        _note_stops(self.log)
        return self.log


def answers(name: str, records: Sequence[Any]) -> ServerLog:
    """Completions of llama.cpp with `timings`, each a request."""
    log, keys = ServerLog("llamacpp", name, "answers"), ("draft_n_accepted", "draft_n")
    drafted, without = list[_Request](), list[_Request]()
    for number, record in enumerate(records, start=1):
        timings, spot = record["timings"], Spot(name, number)
        timings = timings if isinstance(timings, dict) else {}
        if record.get("stop") is False or record.get("object") == "chat.completion.chunk":
            log.leave_out(spot, STREAMED)
            continue
        counts = [timings.get(key, 0) for key in (*keys, "predicted_n", "prompt_n", "cache_n")]
        if "predicted_n" not in timings or not all(isinstance(n, int) and n >= 0 for n in counts):
            log.leave_out(spot, NO_COUNTS)
            continue
        accepted, num_drafted, tokens, *prompt = counts
        text = sum(prompt) + tokens if "cache_n" in timings else None
        sums, ms = (accepted, num_drafted), timings.get("predicted_ms")
        request = _Request(spot, "", "", sums, tokens, text_tokens=text)
        request.ms = ms if isinstance(ms, int | float) and ms > 0 else None
        (drafted if num_drafted else without).append(request)
    _add(log, drafted, without)
    return log


def _add(log: ServerLog, drafted: Sequence[_Request], without: Sequence[_Request]) -> None:
    """Requests into the log. Those without drafts are of a plain server if none drafted, and no
    line of the start names a way to."""
    for request in drafted:
        if (found := request.interval()) is not None:
            log.add(request.spot, found, str(request.sums))
    is_plain = "drafter" not in log.settings and log.settings.get("speculation") != ["on"]
    for request in without:
        if drafted:
            log.leave_out(request.spot, _WITHOUT)
        elif is_plain and (speed := request.tokens_per_s):
            is_alone = request.num_together == 1
            log.plain.append((1 if is_alone else None, speed, request.context_tokens))
    log.written = [
        (one.num_tokens - 1, one.ms / 1e3, one.num_together)
        for one in (*drafted, *without)
        if one.tokens_per_s and one.num_tokens and one.ms
    ]


def _note_stops(log: ServerLog) -> None:
    """Whether each run ended drafts early: as its start says, else as its rounds show.

    Rounds at the end of a text draft less by themselves: K - 1, K - 2, ... tokens at most once.
    """
    runs = dict.fromkeys(one.process for one in log.intervals)
    for name in {"method", *STOP} & log.settings.keys():
        if any(name in log.said(run) for run in runs):
            for run in runs:
                log.note(run, name, log.said(run).get(name, "not stated"))
    for run in runs:
        said = {name: values[-1] for name, values in log.settings.items() if len(values) == 1}
        said |= log.said(run)
        missing, most = 0.0, 0.0
        for one in log.intervals:
            if one.process == run and one.rounds and (depth := len(one.at_least)):
                missing += depth * one.rounds[0] - one.num_drafted
                most += depth * (depth - 1) / 2
        p_min = said.get("p_min", "not stated")
        if "ngram" not in said.get("method", "") and (p_min != "not stated" or most):
            is_on = missing > most if p_min == "not stated" else float(p_min) > 0
            log.note(run, "early stop", "on" if is_on else "off")


def _rounds(accepted: int, drafted: int, mean: float) -> tuple[float, float]:
    """Least and most rounds behind the sums of a request and the digits of its mean."""
    if not accepted:
        return 1, max(drafted, 1)
    least = accepted / (mean + MEAN_ERROR - 1)
    most = accepted / (mean - MEAN_ERROR - 1) if mean > 1 + MEAN_ERROR else drafted
    return max(least, 1), max(min(most, drafted), 1)
