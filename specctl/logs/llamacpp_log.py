"""llama.cpp's log: lines of a request at its end (`tools/server/server-context.cpp`).

- build 11549: `draft acceptance = 0.89474 (34 accepted / 38 generated), mean len = 3.62`, and from
  `-lv 4` on a line `acc per pos = (0.923, 0.923, 0.769)`;
- June 2026 (llama.cpp#24536): `..., mean acceptance length = 2.92, acceptance rate per position =
  (0.805, 0.632, 0.483)` on the line itself;
- before: `draft acceptance rate = 0.57576 (171 accepted / 297 generated)` alone; the rounds follow
  from `eval time = 1912.55 ms / 254 tokens`, of the same task.

Means and rates are over rounds with a draft. `stop processing: n_tokens = 285, truncated = 0`
(`n_past` before October 2025) has the text at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
_TEXT = re.compile(r"n_(?:tokens|past) = (\d{1,9}), truncated = 0")
NO_POSITIONS = "run the server with -lv 4 for acceptance by position"


@dataclass
class _Request:
    """Lines of one request, behind their marks."""

    line: Line  # `draft acceptance`
    num_tokens: int | None  # emitted, of `eval time`
    positions: str | None = None
    text_tokens: int | None = None  # at the end

    def interval(self) -> Interval | str | None:
        """The request, the reason why it is left out, or None for one without drafts."""
        sums, mean = _SUMS.search(self.line.text), _MEAN.search(self.line.text)
        if sums is None:
            return CUT
        accepted, drafted = map(int, sums.groups())
        if not drafted:
            return None
        if accepted > drafted:
            return CONTRADICTS
        tokens, rates, counted = self.num_tokens, list[float](), None
        if mean is None:
            if tokens is None or tokens - 1 <= accepted:
                return "says no mean length, and no `eval time` of its task"
            # Each round emits one token more than it accepts, a request's first token stands
            # before its rounds, and a last round may end with an accepted stop token.
            least, most = float(tokens - 1 - accepted), float(tokens - accepted)
        elif self.positions is None:
            least, most = _rounds(accepted, drafted, float(mean[1]))
        else:
            if (shares := _RATES.search(self.positions)) is None:
                return CUT
            rates = [float(rate) for rate in re.split(r",\s*", shares[1])]
            counted = rounds_of(float(mean[1]), accepted, drafted, rates)
            if counted is None:
                return CONTRADICTS
            least = most = counted[0]
        num_rounds, is_even = counted or (0, False)
        context = None
        if tokens is not None and self.text_tokens is not None:
            context = self.text_tokens - tokens / 2  # halfway through its rounds
        return Interval(
            self.line.spot,
            self.line.process,
            self.line.time,
            (1 + accepted / most, 1 + accepted / least),
            (least + most) / 2,
            num_rounds,
            drafted,
            accepted,
            at_least=tuple(round(rate * num_rounds) for rate in rates),
            is_even=is_even,
            num_draft_tokens=len(rates) or None,
            context_tokens=context,
        )


class LlamacppLog:
    """Reads llama.cpp's lines, one after another."""

    def __init__(self, name: str) -> None:
        self.log = ServerLog("llamacpp", name)
        self._tokens: dict[str, int] = {}  # by process and task
        self._last: dict[str, _Request] = {}
        self._requests: list[_Request] = []

    def take(self, line: Line) -> None:
        found = _TASK.search(line.before)
        task = f"{line.process} {found[1] if found else ''}"
        if line.mark.startswith("draft acceptance"):
            request = _Request(line, self._tokens.pop(task, None))
            if "per position" in line.text:
                request.positions = line.text.partition("per position")[2]
            self._last[task] = request
            self._requests.append(request)
        elif line.mark.startswith("acc per pos") and task in self._last:
            self._last[task].positions = line.text
        elif line.mark.startswith("stop processing"):
            if task in self._last and (ended := _TEXT.match(line.text)):
                self._last[task].text_tokens = int(ended[1])
        elif line.mark.startswith("eval time"):
            self.log.has_lines = True
            if timed := _EVAL.search(line.text):
                self._tokens[task] = int(timed[1])
        elif line.mark.startswith("synthetic"):
            self.log.set("synthetic", "--spec-synth-rates and --spec-synth-len")

    def close(self) -> ServerLog:
        for request in self._requests:
            if (interval := request.interval()) is not None:
                self.log.add(request.line.spot, interval, request.line.text)
        return self.log


def _rounds(accepted: int, drafted: int, mean: float) -> tuple[float, float]:
    """Least and most rounds behind the sums of a request and the digits of its mean."""
    if not accepted:
        return 1, max(drafted, 1)
    least = accepted / (mean + MEAN_ERROR - 1)
    most = accepted / (mean - MEAN_ERROR - 1) if mean > 1 + MEAN_ERROR else drafted
    return max(least, 1), max(min(most, drafted), 1)
