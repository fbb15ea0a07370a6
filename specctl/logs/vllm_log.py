"""vLLM's log.

`SpecDecoding metrics: ...` sums up an interval of 10 s (`vllm/v1/spec_decode/metrics.py`):

- 0.9: `Draft acceptance rate, Mean acceptance length, Accepted, Drafted, Per-position acceptance
  rate`. Some builds leave the bonus token out of the mean; the rates by position tell which.
- 0.10.2 to 0.33: `Mean acceptance length, Accepted throughput, Drafted throughput, Accepted,
  Drafted, Per-position acceptance rate, Avg Draft acceptance rate`. Drafted tokens over their
  throughput give the interval's length.
- 0.8 (V1): `Draft acceptance rate, Accepted, Drafted`, without rounds; V0 (`Speculative metrics:
  ...`): sums since the start, which count tokens behind a rejected one too.

The number of rounds is not printed. It follows from the drafted tokens if every round drafts all
positions, else from the digits. `Engine 000: Avg prompt throughput: ..., Running: N reqs` stands
before it (`v1/metrics/loggers.py`). The start prints `vLLM API server version` and
`speculative_config=SpeculativeConfig(method=, model=, num_spec_tokens=)`.
"""

from __future__ import annotations

import re

from specctl.logs.server_log import (
    BEFORE_0_9,
    CONTRADICTS,
    CUT,
    MEAN_ERROR,
    NO_DRAFTS,
    NUMBER,
    RATE_ERROR,
    Interval,
    ServerLog,
    rounds_of,
)
from specctl.logs.wrappers import Line, is_cut

_MEAN = re.compile(rf"Mean\s*acceptance\s*length:\s*{NUMBER}")
_TOKENS = re.compile(r"Accepted:\s*(\d{1,12})\s*tokens.*?Drafted:\s*(\d{1,12})\s*tokens")
_RATES = re.compile(rf"Per-position\s*acceptance\s*rate:\s*\[?({NUMBER}(?:,\s*{NUMBER})*)")
_SPEED = re.compile(rf"Drafted\s*throughput:\s*{NUMBER}")
_AVERAGE = re.compile(rf"Avg\s*Draft\s*acceptance\s*rate:\s*{NUMBER}%")
_LOAD = re.compile(rf"Avg\s*generation\s*throughput:\s*{NUMBER}.*?Running:\s*(\d{{1,6}})")
_VERSION = re.compile(r"v?(\d+\.\d+[\w.+]*)")
_SPECULATIVE = re.compile(
    r"speculative_config'?[=:] ?(?:SpeculativeConfig\((?P<old>[^)]*)\)|\{(?P<new>[^{}]*)\}|"
    r"(?P<none>None))"
)
_SETTING = re.compile(r"'?(method|num_spec_tokens|num_speculative_tokens)'?[=:] ?'?([\w./\-]+)'?")
_REPEATED = re.compile(r"\[repeated (\d+)x across cluster\]")


class VllmLog:
    """Reads vLLM's lines, one after another."""

    def __init__(self, name: str) -> None:
        self.log = ServerLog("vllm", name)
        self._running: dict[str, tuple[int, float]] = {}
        self._engine: dict[str, str] = {}  # `Engine 000:`, which stands in the line of throughput

    def take(self, line: Line) -> bool:
        mark = line.mark
        if mark == "SpecDecoding metrics:":
            self._interval(line)
        elif mark == "Avg prompt throughput:":
            self.log.has_lines = True
            self._engine[line.process] = line.before.strip()[-11:]
            if load := _LOAD.search(line.text):
                self._running[line.process] = int(load[2]), float(load[1])
                self.log.plain.append((int(load[2]), float(load[1])))
        elif mark == "Speculative metrics:":
            self.log.leave_out(line.spot, BEFORE_0_9)
        elif mark == "DiffusionDecoding metrics:":
            self.log.leave_out(line.spot, "is of a diffusion model, which drafts nothing")
        elif mark.startswith(("vLLM API", "Initializing")):
            self.log.start(line.process)
            if version := _VERSION.match(line.text):
                self.log.set("version", version[1].rstrip("."))
            self._settings(line.text)
        elif mark == "non-default args:":
            self._settings(line.text)
        else:
            return False
        return True

    def _settings(self, text: str) -> None:
        if (found := _SPECULATIVE.search(text)) is None:
            return
        if found["none"]:
            self.log.set("speculation", "off")
            return
        self.log.set("speculation", "on")
        for name, value in _SETTING.findall(found["old"] or found["new"]):
            # Arguments name a family of methods by other words than the configuration made of them.
            method = "method" if found["old"] else "method argument"
            self.log.set(method if name == "method" else "num_draft_tokens", value)

    def _interval(self, line: Line) -> None:
        log, text = self.log, line.text
        mean, tokens, rates = _MEAN.search(text), _TOKENS.search(text), _RATES.search(text)
        if tokens is not None and int(tokens[2]) == 0:  # its rates are nan
            log.leave_out(line.spot, NO_DRAFTS)
            return
        if tokens and rates is None and text.lstrip().startswith("Draft acceptance rate"):
            log.leave_out(line.spot, BEFORE_0_9)
            return
        if is_cut(line):
            log.leave_out(line.spot, CUT)
            return
        if tokens is None or mean is None or rates is None or "\ufffd" in text:
            log.leave_out(line.spot, "lacks figures that vLLM 0.9 to 0.33 prints")
            return
        shares = [float(rate) for rate in re.split(r",\s*", rates[1])]
        accepted, drafted = int(tokens[1]), int(tokens[2])
        average = _AVERAGE.search(text)
        # Some builds of 0.9 leave the bonus token out of the mean.
        means = [float(mean[1])] + ([float(mean[1]) + 1] if average is None else [])
        found = next(filter(None, (rounds_of(m, accepted, drafted, shares) for m in means)), None)
        off = abs(100 * accepted / drafted - float(average[1])) if average else 0.0
        if found is None or off > 100 * RATE_ERROR:
            log.leave_out(line.spot, CONTRADICTS)
            return
        num_rounds, is_even = found
        speed, load = _SPEED.search(text), self._running.get(line.process)
        log.add(
            Interval(
                line.spot,
                line.process,
                line.time,
                (1 + accepted / num_rounds - MEAN_ERROR, 1 + accepted / num_rounds + MEAN_ERROR),
                num_rounds,
                num_rounds,
                drafted,
                accepted,
                tuple(round(share * num_rounds) for share in shares),
                is_even,
                load[0] if load else None,
                drafted / float(speed[1]) if speed and float(speed[1]) else None,
                tokens_per_s=load[1] if load else None,
                num_draft_tokens=len(shares),
            ),
            text,
            self._engine.get(line.process, ""),
        )
        if repeated := _REPEATED.search(text):
            reason = "was printed by other processes too, and Ray left those out"
            log.leave_out(line.spot, reason, int(repeated[1]))
