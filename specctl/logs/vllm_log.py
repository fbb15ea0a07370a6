"""vLLM's log.

`SpecDecoding metrics: ...` sums up an interval of 10 s (`vllm/v1/spec_decode/metrics.py`):

- 0.9: `Draft acceptance rate, Mean acceptance length, Accepted, Drafted, Per-position acceptance
  rate`. Some builds leave the bonus token out of the mean; the rates by position tell which.
- 0.10.2 to 0.33: `Mean acceptance length, Accepted throughput, Drafted throughput, Accepted,
  Drafted, Per-position acceptance rate, Avg Draft acceptance rate`.
- 0.8 (V1): `Draft acceptance rate, Accepted, Drafted`, without rounds; V0 (`Speculative metrics:
  ...`): sums since the start, which count tokens behind a rejected one too.

The number of rounds is not printed. It follows from the drafted tokens if every round drafts the
same positions: all, or the first ones under a schedule by batch size. Else it follows from the
digits. `Engine 000: Avg prompt throughput: ..., Running: N reqs` stands before it
(`v1/metrics/loggers.py`). A start prints `vLLM API server version`, in 0.32 and 0.33 a logo with
the version or `vLLM server version`, and
`speculative_config=SpeculativeConfig(method=, model=, num_spec_tokens=)`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from specctl.logs.moments import moments
from specctl.logs.server_log import (
    BEFORE_0_9,
    CONTRADICTS,
    CUT,
    NO_DRAFTS,
    NUMBER,
    RATE_ERROR,
    Interval,
    ServerLog,
    rounds_of,
)
from specctl.logs.wrappers import Line, is_cut

_MEAN = re.compile(rf"Mean\s*acceptance\s*length:\s*{NUMBER}")
_NO_FIGURE = re.compile(r"acceptance\s*length:\s*[^\s\d]")  # of a program that prints such lines
_TOKENS = re.compile(r"Accepted:\s*(\d{1,12})\s*tokens.*?Drafted:\s*(\d{1,12})\s*tokens")
_RATES = re.compile(rf"Per-position\s*acceptance\s*rate:\s*\[?({NUMBER}(?:,\s*{NUMBER})*)")
_AVERAGE = re.compile(rf"Avg\s*Draft\s*acceptance\s*rate:\s*{NUMBER}%")
_LOAD = re.compile(rf"Avg\s*generation\s*throughput:\s*{NUMBER}.*?Running:\s*(\d{{1,6}})")
_VERSION = re.compile(r"v?(\d+\.\d+[\w.+]*)")
_SPECULATIVE = re.compile(
    r"speculative_config'?[=:] ?(?:SpeculativeConfig\((?P<old>[^)]*)\)|\{(?P<new>[^{}]*)\}|"
    r"(?P<none>None))"
)
_SETTING = re.compile(
    r"'?\b(method|model|num_spec_tokens|num_speculative_tokens)'?[=:] ?'?([\w./\-]+)'?"
)
_SCHEDULE = re.compile(r"num_speculative_tokens_per_batch_size'?[=:] ?(\[\[[\d, \[\]]+\]\])")
_CONTEXT = re.compile(r"max_seq_len=(\d{1,9})")
_MODEL = re.compile(r"config: model='([^']*)'")
_CORE = re.compile(r"EngineCore\w* pid=\d+")
"""The process that starts an engine; another prints its lines."""
_MOST_APART = 2.0
"""Seconds between the lines of an interval, which are printed together."""
_REPEATED = re.compile(r"\[repeated (\d+)x across cluster\]")


class VllmLog:
    """Reads vLLM's lines, one after another."""

    def __init__(self, name: str) -> None:
        self.log = ServerLog("vllm", name)
        # Of the line of throughput before: running requests and tokens/s, `Engine 000:`, and time.
        self._before: dict[str, tuple[tuple[int, float] | None, str, str]] = {}

    def take(self, line: Line) -> None:
        mark = line.mark
        load, engine, time = self._before.get(line.process, (None, "", ""))
        if mark == "SpecDecoding metrics:":
            load = None if _seconds_apart(time, line.time) > _MOST_APART else load
            found = _interval(line, self.log.run(line.process), load)
            self.log.add(line.spot, found, line.text, engine)
            if repeated := _REPEATED.search(line.text):
                reason = "was printed by other processes too, and Ray left those out"
                self.log.leave_out(line.spot, reason, int(repeated[1]))
        elif mark == "Avg prompt throughput:":
            self.log.has_lines = True
            if loaded := _LOAD.search(line.text):
                load = int(loaded[2]), float(loaded[1])
                self.log.plain.append((*load, None))
                self._give_back(line, *load)
            self._before[line.process] = load, line.before.strip()[-11:], line.time
        elif mark == "Speculative metrics:":
            self.log.leave_out(line.spot, BEFORE_0_9)
        elif mark == "DiffusionDecoding metrics:":
            self.log.leave_out(line.spot, "is of a diffusion model, which drafts nothing")
        elif mark.startswith(("vLLM", "▀▄▀", "Initializing")):
            process = _CORE.sub("", line.process).strip()
            self.log.start(process)
            if version := _VERSION.match(line.text):
                self.log.set("version", version[1].rstrip("."), process)
            if model := _MODEL.search(line.text):
                self.log.set("model", model[1], process)
            if context := _CONTEXT.search(line.text):
                self.log.set("max_seq_len", context[1], process)
            self._settings(line.text, process)
        elif mark == "non-default args:":
            self._settings(line.text, line.process)

    def close(self) -> ServerLog:
        return self.log

    def _give_back(self, line: Line, num_running: int, tokens_per_s: float) -> None:
        """Gives a load to the interval before, if it is of its time and has none.

        Exports that sort by time may turn two lines of one second round.
        """
        for last in self.log.intervals[-1:]:
            is_near = 0 <= _seconds_apart(last.time, line.time) <= _MOST_APART
            if last.num_running is None and is_near and last.process == self.log.run(line.process):
                last = replace(last, num_running=num_running, tokens_per_s=tokens_per_s)
                self.log.intervals[-1] = last

    def _settings(self, text: str, process: str) -> None:
        if (found := _SPECULATIVE.search(text)) is None:
            return
        if found["none"]:
            self.log.set("speculation", "off", process)
            return
        self.log.set("speculation", "on", process)
        if "'synthetic'" in found[0]:
            self.log.set("synthetic", "rejection_sample_method synthetic", process)
        # Arguments name a family of methods by other words than the configuration made of them.
        of = "" if found["old"] else " argument"
        names = {"method": f"method{of}", "model": f"drafter{of}"}
        for name, value in _SETTING.findall(found["old"] or found["new"]):
            self.log.set(names.get(name, "num_draft_tokens"), value, process)
        if of:
            schedule = _SCHEDULE.search(found["new"])
            self.log.set("schedule", schedule[1] if schedule else "none", process)


def _seconds_apart(first: str, second: str) -> float:
    """Below 0 if a time is not known."""
    known = moments((first, second))
    return abs(known[1] - known[0]) if known else -1.0


def _interval(line: Line, run: str, load: tuple[int, float] | None) -> Interval | str:
    """The interval of a line, or the reason why it is left out."""
    text = line.text
    mean, tokens, rates = _MEAN.search(text), _TOKENS.search(text), _RATES.search(text)
    if tokens and int(tokens[2]) == 0:  # its rates are nan
        return NO_DRAFTS
    if tokens and rates is None and text.lstrip().startswith("Draft acceptance rate"):
        return BEFORE_0_9
    if is_cut(line) and not _NO_FIGURE.search(text):
        return CUT
    if tokens is None or mean is None or rates is None or "\ufffd" in text:
        return "lacks figures that vLLM 0.9 to 0.33 prints"
    shares = [float(rate) for rate in re.split(r",\s*", rates[1])]
    accepted, drafted = int(tokens[1]), int(tokens[2])
    average = _AVERAGE.search(text)
    found = rounds_of(float(mean[1]), accepted, drafted, shares)
    if found is None and average is None:  # some builds of 0.9 leave the bonus token out
        found = rounds_of(float(mean[1]) + 1, accepted, drafted, shares)
    off = abs(100 * accepted / drafted - float(average[1])) if average else 0.0
    if found is None or off > 100 * RATE_ERROR:
        return CONTRADICTS
    num_rounds, even_length = found
    return Interval(
        line.spot,
        run,
        line.time,
        (num_rounds, num_rounds),
        drafted,
        accepted,
        at_least=tuple(round(share * num_rounds) for share in shares),
        even_length=even_length,
        num_draft_tokens=len(shares),
        num_running=load[0] if load else None,
        tokens_per_s=load[1] if load else None,
    )
