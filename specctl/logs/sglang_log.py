"""SGLang's log.

`Decode batch, #running-req: 24, ..., accept len: 2.92, accept rate: 0.64, ..., gen throughput
(token/s): 1476.00, #queue-req: 0` sums up `--decode-log-interval` (40) steps of one rank
(`managers/scheduler_metrics_mixin.py` up to 0.5.11, `scheduler_components/metrics_reporter.py` of
0.5.23). The length counts the target's own token. The rate has had three definitions, with `steps`
= `--speculative-num-steps` and `n` = `--speculative-num-draft-tokens`, root counted:

- up to October 2025 (sglang#11572): length / steps, which may exceed 1;
- up to April 2026 (sglang#13212, #23530): length / n, at first with steps + 1 for n;
- since then: (length - 1) / (n - 1).

`#token` (of hybrid models `#full token`) is the cache of the running requests, in which beginnings
that they share count once. The first lines print `server_args=ServerArgs(...)`, or a dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import ceil, floor

from specctl.logs.server_log import (
    CONTRADICTS,
    CUT,
    MEAN_ERROR,
    NUMBER,
    Interval,
    ServerLog,
    belongs,
)
from specctl.logs.wrappers import Line, is_cut

_TEXT = re.compile(r"#(?:full )?token:\s*(\d{1,12}),")
_RUNNING = re.compile(r"#running-req:\s*(\d{1,9})")
_LENGTH = re.compile(rf"(?<!block )accept len:\s*{NUMBER},")
_RATE = re.compile(rf"accept rate:\s*{NUMBER},")
_SPEED = re.compile(rf"gen throughput \(token/s\):\s*{NUMBER}")
_ARGUMENT = re.compile(
    r"\b(speculative_(?:algorithm|num_steps|num_draft_tokens|eagle_topk|adaptive))'?[:=] ?'?(\w+)"
)
_PATH = re.compile(r"\b(model_path|speculative_draft_model_path)'?[:=] ?'([^']*)'")
_MAX_DEPTH = 256
_BEFORE_OCTOBER = "SGLang is older than October 2025"
_DEPTHS: dict[str, Callable[[float, float], float]] = {
    _BEFORE_OCTOBER: lambda length, rate: length / rate,
    "SGLang is older than April 2026": lambda length, rate: length / rate - 1,
    "SGLang is of April 2026 or newer": lambda length, rate: (length - 1) / rate,
}
"""Draft tokens of a chain from a mean and a rate, by release."""


class SglangLog:
    """Reads SGLang's lines, one after another."""

    def __init__(self, name: str) -> None:
        self.log = ServerLog("sglang", name)
        self._arguments: dict[str, dict[str, str]] = {}

    def take(self, line: Line) -> None:
        if line.mark == "server_args":
            self.log.start(line.process)
            arguments = dict(_ARGUMENT.findall(line.text))
            self._arguments[line.process] = arguments
            for name, path in _PATH.findall(line.text):
                self.log.set("model" if name == "model_path" else "drafter", path, line.process)
            algorithm = arguments.get("speculative_algorithm")
            if algorithm is not None:
                self.log.set("speculation", "off" if algorithm == "None" else "on", line.process)
                if algorithm != "None":
                    self.log.set("method", algorithm, line.process)
        elif line.mark == "Decode batch":
            self.log.has_lines = True
            if (found := self._interval(line)) is not None:
                self.log.add(line.spot, found, line.text)

    def close(self) -> ServerLog:
        return self.log

    def _interval(self, line: Line) -> Interval | str | None:
        """The interval of a line, the reason why it is left out, or None for one without drafts."""
        text = line.text
        running, length, rate, speed = (p.search(text) for p in (_RUNNING, _LENGTH, _RATE, _SPEED))
        if running and speed and "accept" not in text:
            self.log.plain.append((int(running[1]), float(speed[1]), None))
            return CUT if is_cut(line) else None
        if is_cut(line):
            return CUT
        if "accept len: 0.00" in text:  # no round in this interval
            return None
        if running is None or length is None or float(length[1]) < 1:
            return "lacks #running-req or an accept len of at least 1"
        drafts, depth = self._drafts(line)
        mean, together, held = float(length[1]), int(running[1]), _TEXT.search(text)
        interval = Interval(
            line.spot,
            self.log.run(line.process),
            line.time,
            stated_mean=(max(mean - MEAN_ERROR, 1.0), mean + MEAN_ERROR),
            rate=float(rate[1]) if rate else None,
            drafts=drafts,
            num_draft_tokens=depth,
            num_running=together,
            tokens_per_s=float(speed[1]) if speed else None,
            context_tokens=int(held[1]) / together if held and together else None,
        )
        if depth and rate and not any(depth in _fitting(interval, name) for name in _DEPTHS):
            return CONTRADICTS
        return interval

    def _drafts(self, line: Line) -> tuple[str, int | None]:
        """The kind of drafts and a chain's length, as the start of this process says."""
        owners = [name for name in self._arguments if belongs(line.process, name)]
        arguments = self._arguments[max(owners, key=len)] if owners else {}
        topk, tokens = (
            arguments.get(f"speculative_{name}", "") for name in ("eagle_topk", "num_draft_tokens")
        )
        if arguments.get("speculative_adaptive") == "True" or "cap len: " in line.text:
            return "varying", None
        if topk.isdecimal() and int(topk) > 1:
            return "tree", None
        depth = int(tokens) - 1 if tokens.isdecimal() and int(tokens) > 1 else None
        return ("chain" if topk == "1" else ""), depth


def chain_lengths(intervals: Sequence[Interval]) -> dict[str, list[int]]:
    """Chain lengths that fit all means and rates, by release of SGLang; releases without one
    are left out."""
    rated = [one for one in intervals if one.rate is not None]
    if not rated:
        return {}
    found = {name: set.intersection(*({*_fitting(one, name)} for one in rated)) for name in _DEPTHS}
    return {name: sorted(depths) for name, depths in found.items() if depths}


def _fitting(one: Interval, release: str) -> range:
    """Chain lengths that a mean and a rate leave in their digits."""
    if release != _BEFORE_OCTOBER and _is_above_1(one):
        return range(0)
    depth_of, rate = _DEPTHS[release], one.rate or 0.0
    low = depth_of(one.mean[0], rate + MEAN_ERROR)
    high = depth_of(one.mean[1], max(rate - MEAN_ERROR, 1e-9))
    return range(max(ceil(low - 1e-9), 1), min(floor(high + 1e-9), _MAX_DEPTH) + 1)


def stated_length(intervals: Sequence[Interval]) -> tuple[int | None, str]:
    """The draft length that means and rates leave, or None and why it is not known."""
    fitting = chain_lengths(intervals)
    if all(one.rate is None for one in intervals):
        why = "the lines have no accept rate"
    elif not fitting:
        why = "mean and rate fit no chain, so these may be trees"
    elif any(len(depths) > 4 for depths in fitting.values()):
        why = "means and rates leave many draft lengths"
    elif [*fitting] != [_BEFORE_OCTOBER] and [len(found) for found in fitting.values()] == [1]:
        return next(iter(fitting.values()))[0], ""
    else:
        lengths = [
            f"{' or '.join(map(str, depths))} if {name}"
            for name, depths in reversed(fitting.items())
        ]
        above = (
            "an accept rate above 1 is of an SGLang older than October 2025; "
            if any(map(_is_above_1, intervals))
            else ""
        )
        why = f"{above}the draft length is {'; '.join(lengths)}"
    return None, f"{why}: keep the log's line of server_args, which says the draft length"


def _is_above_1(one: Interval) -> bool:
    return one.rate is not None and one.rate > 1 + MEAN_ERROR
