"""Figures of the metrics and logs of vLLM and SGLang.

- vLLM's Prometheus counters (`vllm/v1/spec_decode/metrics.py` of 0.32.0; since 0.9):
  `vllm:spec_decode_num_drafts`, `_num_draft_tokens`, `_num_accepted_tokens` and, with a label
  `position` counted from 0, `_num_accepted_tokens_per_pos`; the text of `/metrics` appends
  `_total`. The counter of a position over drafts is its *marginal* rate. Counters run from the
  server's start, over all requests with drafts. Engines of one model (data parallel) are added up.
- vLLM's log (the same module): a line `SpecDecoding metrics: ...` for each busy interval, with sums
  of tokens and acceptance by position in three digits.
- SGLang's metrics (`observability/metrics_collector.py` of 0.5.23, `--enable-metrics`): counters
  of finished requests, `sglang:spec_verify_calls`, `sglang:generation_tokens` and
  `sglang:num_requests` (reading a prompt gives the first token of a request); gauges of the last
  interval, `sglang:spec_accept_length`, `_accept_rate`, `_num_steps`, `_num_draft_tokens` (root
  counted). A request's last round is cut at the end of the text.
- SGLang's log (`managers/scheduler_components/metrics_reporter.py`): a line `Decode batch, ...`
  every `--decode-log-interval` (40) steps, with `accept len` and `accept rate`, means of the
  interval's rounds in two digits; `server_args={...}` at the start.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from specctl.errors import InputError
from specctl.logs.acceptance_figures import (
    NOT_REPLAYED,
    UNKNOWN_BATCHES,
    chain_figures,
    mean_ranges,
    sweep_of,
)
from specctl.logs.sources import Sample, Source, Spot, metric_samples, text_lines

# ----------------------------------------------------------------- vLLM, metrics

STEM = "vllm:spec_decode_"
_TOTALS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_BY_POSITION = "num_accepted_tokens_per_pos"
_POSITION = re.compile(r"\d{1,4}")


class Exposed(NamedTuple):
    """Counters of one engine that count as vLLM's do."""

    stem: str = STEM
    newer: str = "scrape vLLM 0.9 or newer; 0.32.0 was checked"  # hint for unknown counters
    off: str = "this server does not speculate: start it with --speculative-config"


VLLM_COUNTERS = Exposed()


def summarise_counters(source: Source, exposed: Exposed = VLLM_COUNTERS) -> dict[str, Any]:
    """Figures of one scrape of `/metrics`, by model."""
    stem = exposed.stem
    models: dict[str, Counter[str | int]] = {}
    for sample in metric_samples(source, stem):
        name, position = sample.name.removeprefix(stem), sample.labels.get("position", "")
        if name not in (*_TOTALS, _BY_POSITION):
            known = f"{stem} followed by {', '.join(_TOTALS)} or {_BY_POSITION}"
            problem = f"unknown counter {sample.name[:80]}; known are {known}"
            raise sample.spot.refuse(problem, exposed.newer)
        if name == _BY_POSITION and not _POSITION.fullmatch(position):
            raise sample.spot.refuse(
                f'the label position is {repr(position)[:40]}, not "0", "1", ...'
            )
        key = int(position) if name == _BY_POSITION else name
        counters = models.setdefault(sample.labels.get("model_name", ""), Counter())
        counters[key] += sample.count()
    if not any(counters["num_drafts"] for counters in models.values()):
        raise InputError(
            f"{source.name} needs a counter {stem}num_drafts_total above 0: "
            f"{'there are no drafts yet' if models else 'it has none'}",
            hint="scrape it once the server has served some requests" if models else exposed.off,
        )
    figures = {name: _counter_figures(source, name, models[name]) for name in sorted(models)}
    return {**NOT_REPLAYED, "models": {name: found for name, found in figures.items() if found}}


def _counter_figures(source: Source, model: str, counters: Counter[str | int]) -> dict[str, Any]:
    """Figures of one model, unless its counters contradict each other."""
    drafts, drafted, accepted = totals = [counters[name] for name in _TOTALS]
    positions = sorted(key for key in counters if isinstance(key, int))
    at_least = [counters[position] for position in positions]
    chained = [drafts, *at_least]
    rules = {
        "positions have a gap": positions == [*range(len(positions))],
        "a position is accepted more often than the one before": chained
        == sorted(chained, reverse=True),
        "positions do not add up to the accepted tokens": not at_least or sum(at_least) == accepted,
        "more tokens are accepted than drafted": accepted <= drafted,
    }
    for broken, holds in rules.items():
        if not holds:
            named = dict(zip(_TOTALS, totals, strict=True))
            raise InputError(
                f"{source.name}, model {model!r}: {broken} ({named}, by position {at_least[:8]})",
                hint="scrape again",
            )
    if not drafts:
        return {}
    return chain_figures(
        drafts,
        at_least,
        drafted,
        accepted,
        is_ragged=drafted != drafts * len(at_least),
        not_known=[UNKNOWN_BATCHES],
    )


# ----------------------------------------------------------------- vLLM, log

LOG_MARK = "SpecDecoding metrics: "
THROUGHPUT = "Avg prompt throughput: "
"""Mark of the line of every interval in vLLM's log, with or without speculation."""
_PROCESS = re.compile(r"\((\w+) pid=(\d+)\)")
_NUMBER = r"(\d{1,9}(?:\.\d{1,6})?)"
_MEAN = re.compile(rf"Mean acceptance length: {_NUMBER}")
_TOKENS = re.compile(r"Accepted: (\d{1,12}) tokens, Drafted: (\d{1,12}) tokens")
_RATES = re.compile(rf"Per-position acceptance rate: ({_NUMBER}(?:, {_NUMBER})*)")
_MEAN_ERROR, _RATE_ERROR = 0.005 + 1e-9, 0.0005 + 1e-9
"""Rounding of two and of three digits behind the point."""
_MAX_EXACT = 1000
"""Most rounds of an interval whose counts follow exactly from three digits."""
_MAX_OFF = 20_000
"""Distance from the likeliest number of rounds that is searched; enough for a mean of 1.1 over a
million tokens."""


def summarise_engine_log(source: Source) -> dict[str, Any]:
    """Figures over all intervals of vLLM's log.

    The log does not print the number of rounds. It follows from the drafted tokens if every round
    drafts all positions, else from the digits of the mean length.
    """
    num_intervals = num_other = rounds = drafted = accepted = most_rounds = 0
    at_least: list[int] = []
    is_ragged = False
    processes: dict[str, str] = {}
    for spot, line in text_lines(source):
        num_other += THROUGHPUT in line
        before, mark, text = line.partition(LOG_MARK)
        if not mark:
            continue
        if process := _PROCESS.search(before):
            pid = processes.setdefault(process[1], process[2])
            if pid != process[2]:
                raise spot.refuse(
                    f"{process[1]} has pid {process[2]}, and {pid} before, so these are two "
                    "servers",
                    "give each server's log alone",
                )
        interval = Interval.parse(text, spot)
        num_intervals += 1
        if not interval.drafted:
            continue
        if at_least and len(at_least) != len(interval.rates):
            raise spot.refuse(
                f"{len(interval.rates)} positions, after lines of {len(at_least)}",
                "give each server's log alone",
            )
        num_rounds, even = interval.rounds(spot)
        counts = [round(rate * num_rounds) for rate in interval.rates]
        at_least = [a + b for a, b in zip(at_least or [0] * len(counts), counts, strict=True)]
        rounds, is_ragged = rounds + num_rounds, is_ragged or not even
        drafted, accepted = drafted + interval.drafted, accepted + interval.accepted
        most_rounds = max(most_rounds, num_rounds)
    if not rounds:
        fix = "log a server that speculates, without --disable-log-stats, for some minutes"
        if num_other and not num_intervals:
            fix = "speculation is off: start the server with --speculative-config"
        problem = f"no line {LOG_MARK!r}, and {num_other} of throughput"
        if num_intervals:
            problem = f"none of its {num_intervals} lines {LOG_MARK!r} has drafted tokens"
        raise InputError(f"{source.name}: {problem}", hint=fix)
    unknown = [
        UNKNOWN_BATCHES,
        *(["rates beyond three digits"] if most_rounds > _MAX_EXACT else []),
        *(["the exact number of rounds"] if is_ragged else []),
    ]
    figures = chain_figures(
        rounds, at_least, drafted, accepted, is_ragged=is_ragged, not_known=unknown
    )
    return {**NOT_REPLAYED, "num_intervals": num_intervals, **figures}


@dataclass(frozen=True)
class Interval:
    """One line: mean tokens a round, sums of draft tokens, and rates by position."""

    mean: float
    accepted: int
    drafted: int
    rates: list[float]

    @classmethod
    def parse(cls, text: str, spot: Spot) -> Self:
        tokens = _TOKENS.search(text)
        if tokens is not None and int(tokens[2]) == 0:  # its rates are then nan
            return cls(1.0, 0, 0, [])
        mean, rates = _MEAN.search(text), _RATES.search(text)
        if mean is None or tokens is None or rates is None:
            raise spot.refuse(
                "mean acceptance length, tokens or rates by position are missing in "
                f"{text.strip()[:80]!r}",
                "use the log of vLLM 0.9 or newer",
            )
        found = [float(rate) for rate in rates[1].split(", ")]
        return cls(float(mean[1]), int(tokens[1]), int(tokens[2]), found)

    def rounds(self, spot: Spot) -> tuple[int, bool]:
        """Rounds of the interval, and whether each drafted all positions."""
        even, rest = divmod(self.drafted, len(self.rates))
        if rest == 0 and self._fits(even):
            return even, True
        if not self.accepted:  # unknown; the least
            return even + bool(rest), False
        likeliest = round(self.accepted / max(self.mean - 1, _MEAN_ERROR))
        for off in range(_MAX_OFF):
            for num_rounds in {likeliest - off, likeliest + off}:
                if even < num_rounds <= self.drafted and self._fits(num_rounds):
                    return num_rounds, False
        found = f"{self.accepted} of {self.drafted} tokens, mean {self.mean}, {self.rates[:8]}"
        raise spot.refuse(f"these figures contradict each other: {found}", "remove the line")

    def _fits(self, num_rounds: int) -> bool:
        """Whether the printed figures fit a number of rounds."""
        counts = [round(rate * num_rounds) for rate in self.rates]
        off = abs(sum(counts) - self.accepted)
        return (
            abs(1 + self.accepted / num_rounds - self.mean) <= _MEAN_ERROR
            and off <= _RATE_ERROR * num_rounds * len(counts)
            and counts == sorted(counts, reverse=True)
            and all(
                abs(count / num_rounds - rate) <= _RATE_ERROR
                for count, rate in zip(counts, self.rates, strict=True)
            )
        )


# ----------------------------------------------------------------- SGLang

SGLANG = "sglang:"
DECODE_MARK = "Decode batch"
SERVER_ARGS = "server_args="
_RUNNING = re.compile(r"#running-req: (\d{1,9}),")
_LENGTH = re.compile(rf", accept len: {_NUMBER}(?:, accept rate: {_NUMBER})?,")
_ARGUMENT = re.compile(r"\b(speculative_(?:num_draft_tokens|eagle_topk|adaptive))'?[:=] ?(\w+)")
_MAX_DEPTH = 256
_TREES = "the drafts are trees, of which shorter chains do not follow"
_VARIES = "the number of draft tokens changed while the server ran"
_NO_DEPTH = "the number of draft tokens is not there: keep the log's line of server_args"
_IF_CHAINS = "if the drafts were chains (--speculative-eagle-topk 1)"
"""SGLang's figures count trees by depth and chains alike."""


def summarise_sglang_counters(source: Source) -> dict[str, Any]:
    """Figures of one scrape of SGLang's `/metrics`, by model."""
    models: dict[str, dict[str, list[Sample]]] = {}
    for sample in metric_samples(source, SGLANG):
        named = models.setdefault(sample.labels.get("model_name", ""), {})
        named.setdefault(sample.name.removeprefix(SGLANG), []).append(sample)
    figures = {name: _sglang_figures(source, name, models[name]) for name in sorted(models)}
    if not any(figures.values()):
        known = any("spec_accept_length" in named for named in models.values())
        fix = "speculation is off, or nothing was decoded yet: start the server with "
        fix += "--speculative-algorithm, and scrape it once it has served some requests"
        raise InputError(
            f"{source.name} needs a counter sglang:spec_verify_calls_total or a gauge "
            f"sglang:spec_accept_length above 0: {'it is 0' if known else 'it has neither'}",
            hint=fix if known else "scrape SGLang as 0.5.23 names its metrics",
        )
    return {**NOT_REPLAYED, "models": {name: found for name, found in figures.items() if found}}


def _sglang_figures(source: Source, model: str, named: dict[str, list[Sample]]) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(sample.count() for sample in named.get(name, []))

    def values(name: str) -> list[float]:
        return sorted({sample.number() for sample in named.get(name, [])} - {0.0})

    rounds, lengths = total("spec_verify_calls"), values("spec_accept_length")
    if not rounds and not lengths:
        return {}
    facts: dict[str, Any] = {"num_rounds": rounds or None, "last_interval_means": lengths}
    if rounds:
        # Reading a prompt gives a finished request's first token; an aborted one may have none.
        requests, aborted = total("num_requests"), total("num_aborted_requests")
        tokens = total("generation_tokens") - requests
        mean = (tokens / rounds, (tokens + min(aborted, requests)) / rounds)
        if mean[0] < 1:
            raise InputError(
                f"{source.name}, model {model!r}: {rounds} rounds and only {tokens} tokens besides "
                f"the first ones of {requests} requests, less than one a round",
                hint="scrape one server, all of whose requests speculate",
            )
        facts |= {"num_requests": requests, "num_tokens": tokens}
    else:
        mean = (lengths[0], lengths[-1])
    drafted, steps = values("spec_num_draft_tokens"), values("spec_num_steps")
    if len(drafted) > 1:
        depth, why = None, _VARIES
    elif drafted and len(steps) == 1 and steps[0] != drafted[0] - 1:
        depth, why = None, _TREES
    else:
        why = "a gauge sglang:spec_num_draft_tokens above 0 is not there"
        depth = int(drafted[0]) - 1 if drafted else None
    earlier = "whether the draft length changed" if rounds else "anything"
    unknown = [f"{earlier} before the last interval"]
    return mean_figures(mean, depth, why, unknown, facts)


def summarise_sglang_log(source: Source) -> dict[str, Any]:
    """Figures over all intervals of SGLang's log, each a mean of an unknown number of rounds."""
    started: Spot | None = None
    arguments: dict[str, str] = {}
    num_decode, is_capped = 0, False
    found: list[tuple[int, float, float | None]] = []
    for spot, line in text_lines(source):
        if SERVER_ARGS in line:
            if started is not None:
                raise spot.refuse(
                    f"another start, after that of line {started.number}",
                    "give each server's log alone",
                )
            started, arguments = spot, dict(_ARGUMENT.findall(line))
        if DECODE_MARK not in line:
            continue
        num_decode += 1
        if "accept" not in line:
            continue
        running, length = _RUNNING.search(line), _LENGTH.search(line)
        if running is None or length is None or float(length[1]) < 1:
            text = line[line.index(DECODE_MARK) :].strip()[:80]
            raise spot.refuse(
                f"#running-req or an accept len of at least 1 is missing in {text!r}",
                "use a log as SGLang 0.5.23 writes it",
            )
        is_capped = is_capped or "cap len: " in line
        found.append((int(running[1]), float(length[1]), float(length[2]) if length[2] else None))
    if not found:
        fix = "log at --log-level info for more than --decode-log-interval steps"
        if num_decode:
            fix = "speculation is off: start the server with --speculative-algorithm"
        raise InputError(
            f"{source.name} has {num_decode} lines {DECODE_MARK!r}, none of them with 'accept len'",
            hint=fix,
        )
    topk = arguments.get("speculative_eagle_topk")
    drafted = arguments.get("speculative_num_draft_tokens", "")
    if arguments.get("speculative_adaptive") == "True" or is_capped:
        depth, why = None, _VARIES
    elif topk is not None and topk.isdecimal() and int(topk) > 1:
        depth, why = None, _TREES
    else:
        depth, why = _depth_of(found), _NO_DEPTH
        depth = int(drafted) - 1 if drafted.isdecimal() else depth
    weights, means = [max(running, 1) for running, _, _ in found], [mean for _, mean, _ in found]
    facts = {
        "num_rounds": None,
        "num_intervals": len(found),
        "mean_of_interval_means": float(np.average(means, weights=weights)),
        "mean_running_requests": float(np.mean([running for running, _, _ in found])),
    }
    mean = max(min(means) - _MEAN_ERROR, 1.0), max(means) + _MEAN_ERROR
    unknown = ["how many rounds each interval had"]
    return {
        **NOT_REPLAYED,
        **mean_figures(mean, depth, why, unknown, facts, is_chain=topk == "1"),
    }


def _depth_of(intervals: list[tuple[int, float, float | None]]) -> int | None:
    """Draft tokens of a round, from mean and rate, if their digits leave one number.

    SGLang 0.5.23 counts the rate as accepted over `speculative_num_draft_tokens` - 1 a round.
    """
    fitting = set(range(1, _MAX_DEPTH))
    for _, length, rate in intervals:
        if rate is not None:
            low = (length - 1 - _MEAN_ERROR) / (rate + _MEAN_ERROR)
            high = (length - 1 + _MEAN_ERROR) / max(rate - _MEAN_ERROR, 1e-9)
            fitting &= {depth for depth in fitting if low <= depth <= high}
    return fitting.pop() if len(fitting) == 1 else None


def mean_figures(
    mean: tuple[float, float],
    depth: int | None,
    why_no_sweep: str,
    not_known: list[str],
    facts: dict[str, Any],
    *,
    is_chain: bool = False,
) -> dict[str, Any]:
    """Figures from a range of the mean acceptance length and, if known, draft tokens a round."""
    basis = "a range: only the mean is known; no position is accepted more often than one before it"
    figures = {
        **facts,
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
