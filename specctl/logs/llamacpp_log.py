"""llama.cpp's log: one request a line, at its end (`tools/server/server-context.cpp`).

- build 11549: `draft acceptance = 0.89474 (34 accepted / 38 generated), mean len = 3.62`, and from
  `-lv 4` on a line `acc per pos = (0.923, 0.923, 0.769)`;
- June 2026 (llama.cpp#24536): `..., mean acceptance length = 2.92, acceptance rate per position =
  (0.805, 0.632, 0.483)` on the line itself;
- before: `draft acceptance rate = 0.57576 (171 accepted / 297 generated)` alone; the rounds follow
  from `eval time = 1912.55 ms / 254 tokens`, of the same task.

Means and rates are over rounds with a draft.
"""

from __future__ import annotations

import re
from dataclasses import replace

from specctl.logs.server_log import (
    CONTRADICTS,
    CUT,
    MEAN_ERROR,
    NUMBER,
    Interval,
    ServerLog,
    rounds_of,
)
from specctl.logs.wrappers import Line

_TASK = re.compile(r"task (\d{1,9})")
_SUMS = re.compile(r"\(\s*(\d{1,9}) accepted\s*/\s*(\d{1,9}) generated\)")
_MEAN = re.compile(rf"mean (?:len|acceptance length)\s*=\s*{NUMBER}")
_RATES = re.compile(r"\(?(\d\.\d{3}(?:,\s*\d\.\d{3})*)\)")
_EVAL = re.compile(r" ms /\s*(\d{1,9}) tokens")
NO_POSITIONS = "run the server with -lv 4 for acceptance by position"


class LlamacppLog:
    """Reads llama.cpp's lines, one after another."""

    def __init__(self, name: str) -> None:
        self.log = ServerLog("llamacpp", name)
        self._tokens: dict[str, int] = {}
        self._open: dict[str, tuple[Interval, float]] = {}

    def take(self, line: Line) -> None:
        found = _TASK.search(line.before)
        task = f"{line.process} {found[1] if found else ''}"
        if line.mark.startswith("draft acceptance"):
            self._open.pop(task, None)
            request = self._request(line, task)
            if isinstance(request, str):
                self.log.leave_out(line.spot, request)
            if not isinstance(request, Interval):
                return
            self.log.intervals.append(request)
            if mean := _MEAN.search(line.text):
                self._open[task] = request, float(mean[1])
            if "per position" in line.text:
                self._positions(line, task)
        elif line.mark.startswith("acc per pos"):
            self._positions(line, task)
        elif line.mark.startswith("eval time"):
            self.log.has_lines = True
            if timed := _EVAL.search(line.text):
                self._tokens[task] = int(timed[1])

    def _request(self, line: Line, task: str) -> Interval | str | None:
        """The request of a line, the reason why it is left out, or None for one without drafts."""
        sums, mean = _SUMS.search(line.text), _MEAN.search(line.text)
        timed = self._tokens.pop(task, None)
        if sums is None:
            return CUT
        accepted, drafted = map(int, sums.groups())
        if accepted > drafted:
            return CONTRADICTS
        if not drafted:
            return None
        if mean is not None:
            least, most = _rounds(accepted, drafted, float(mean[1]))
        elif timed is not None and timed - 1 > accepted:
            # Each round emits one token more than it accepts, a request's first token stands
            # before its rounds, and a last round may end with an accepted stop token.
            least, most = timed - 1 - accepted, timed - accepted
        else:
            return "says no mean length, and no `eval time` of its task"
        return Interval(
            line.spot,
            line.process,
            line.time,
            (1 + accepted / most, 1 + accepted / least),
            (least + most) / 2,
            num_drafted=drafted,
            num_accepted=accepted,
        )

    def _positions(self, line: Line, task: str) -> None:
        """Joins rates by position to the request of the same task."""
        rates = _RATES.search(line.text.partition("per position")[2] or line.text)
        if task not in self._open:
            return  # its request is not there
        (one, mean), intervals = self._open.pop(task), self.log.intervals
        place = next(k for k in reversed(range(len(intervals))) if intervals[k] is one)
        shares = [float(rate) for rate in re.split(r",\s*", rates[1])] if rates else []
        found = rounds_of(mean, one.num_accepted, one.num_drafted, shares) if shares else None
        if found is None:
            self.log.leave_out(line.spot, CONTRADICTS if shares else CUT)
            del intervals[place]
            return
        num_rounds, is_even = found
        mean = 1 + one.num_accepted / num_rounds
        intervals[place] = replace(
            one,
            mean=(mean, mean),
            weight=num_rounds,
            num_rounds=num_rounds,
            at_least=tuple(round(share * num_rounds) for share in shares),
            is_even=is_even,
            num_draft_tokens=len(shares),
        )


def _rounds(accepted: int, drafted: int, mean: float) -> tuple[float, float]:
    """Least and most rounds behind the sums of a request and the digits of its mean."""
    if not accepted:
        return 1, max(drafted, 1)
    least = accepted / (mean + MEAN_ERROR - 1)
    most = accepted / (mean - MEAN_ERROR - 1) if mean > 1 + MEAN_ERROR else drafted
    return max(least, 1), max(min(most, drafted), 1)
