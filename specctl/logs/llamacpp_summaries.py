"""Figures of the metrics, logs and answers of llama.cpp's server, build 11549.

- Metrics (`--metrics`): `llamacpp:spec_decode_num_drafts_total` and its companions count as vLLM's
  do, rounds without a draft left out.
- Log: for each request a line `draft acceptance = ...`, with sums and the mean length of rounds
  with a draft in two digits; from `-lv 4` on also `acc per pos = (...)`, rates in three digits.
- Answers: `timings` of one completion a line. A request emits `predicted_n` - 1 tokens in rounds,
  and each round one more than it accepts, but a last one whose last draft token is the stop token.
"""

from __future__ import annotations

import json
import re
from typing import Any

from specctl.errors import InputError
from specctl.logs.acceptance_figures import NOT_REPLAYED, UNKNOWN_BATCHES, chain_figures
from specctl.logs.engine_summaries import Exposed, Interval, mean_figures, summarise_counters
from specctl.logs.sources import Source, Spot, text_lines

STEM = "llamacpp:spec_decode_"
ACCEPTANCE_MARK, RATES_MARK = "draft acceptance = ", "acc per pos = ("
_TASK = re.compile(r"\| task (\d{1,9}) \|")
_ACCEPTANCE = re.compile(
    r"\(\s*(\d{1,9}) accepted /\s*(\d{1,9}) generated\), mean len =\s*(\d{1,6}\.\d\d)"
)
_RATES = re.compile(r"acc per pos = \((\d\.\d{3}(?:, \d\.\d{3})*)\)")
_MEAN_ERROR = 0.005
_LEVEL = "run the server with -lv 4 for acceptance by position"


def summarise_llamacpp_counters(source: Source) -> dict[str, Any]:
    """Figures of one scrape of `/metrics`."""
    newer = "scrape llama.cpp of September 2026 or newer; build 11549 was checked"
    off = "this server does not speculate: start it with --spec-type"
    return summarise_counters(source, Exposed(STEM, newer, off))


def summarise_llamacpp_log(source: Source) -> dict[str, Any]:
    """Figures over all requests of a log."""
    sums: dict[str, tuple[Spot, int, int, float]] = {}
    rates: dict[str, list[float]] = {}
    for spot, line in text_lines(source):
        if ACCEPTANCE_MARK not in line and RATES_MARK not in line:
            continue
        task = _TASK.search(line)
        found, by_position = _ACCEPTANCE.search(line), _RATES.search(line)
        if task is None or (found is None and by_position is None):
            raise spot.refuse(
                f"{line.strip()[-60:]!r} is no line of a request's drafts",
                "use a log as build 11549 writes it",
            )
        if found is not None:
            sums[task[1]] = (spot, int(found[1]), int(found[2]), float(found[3]))
        elif by_position is not None:
            rates[task[1]] = [float(rate) for rate in by_position[1].split(", ")]
    if not sums:
        raise InputError(
            f"{source.name} has no line {ACCEPTANCE_MARK!r}",
            hint="log a server that drafts (--spec-type), at -lv 3 or above",
        )
    accepted = sum(of[1] for of in sums.values())
    drafted = sum(of[2] for of in sums.values())
    facts = {"num_requests": len(sums), "num_draft_tokens": drafted}
    if not sums.keys() <= rates.keys():
        bounds = [_rounds(*of[1:]) for of in sums.values()]
        least, most = (sum(ends) for ends in zip(*bounds, strict=True))
        mean = 1 + accepted / most, 1 + accepted / least
        return {**NOT_REPLAYED, **mean_figures(mean, None, _LEVEL, [], facts)}
    if len({len(rates[name]) for name in sums}) > 1:
        raise InputError(
            f"{source.name}: requests have different numbers of positions",
            hint="give each server's log alone",
        )
    num_rounds, is_ragged, at_least = 0, False, [0] * len(rates[next(iter(sums))])
    for name, (spot, of_request, generated, mean_length) in sums.items():
        interval = Interval(mean_length, of_request, generated, rates[name])
        rounds, even = interval.rounds(spot)
        counts = [round(rate * rounds) for rate in interval.rates]
        at_least = [a + b for a, b in zip(at_least, counts, strict=True)]
        num_rounds, is_ragged = num_rounds + rounds, is_ragged or not even
    unknown = [UNKNOWN_BATCHES, "rounds without a draft"]
    unknown += ["the exact number of rounds"] if is_ragged else []
    found_figures = chain_figures(
        num_rounds, at_least, drafted, accepted, is_ragged=is_ragged, not_known=unknown
    )
    return {**NOT_REPLAYED, "num_requests": len(sums), **found_figures}


def _rounds(accepted: int, drafted: int, mean: float) -> tuple[float, float]:
    """Least and most rounds behind the sums of a request and the digits of its mean."""
    if not accepted:
        return 1, max(drafted, 1)
    least = accepted / (mean + _MEAN_ERROR - 1)
    most = accepted / (mean - _MEAN_ERROR - 1) if mean > 1 + _MEAN_ERROR else drafted
    return max(least, 1), max(min(most, drafted), 1)


def summarise_llamacpp_answers(source: Source) -> dict[str, Any]:
    """Figures over completions, one JSON object a line."""
    requests = tokens = drafted = accepted = 0
    for spot, line in text_lines(source):
        try:
            timings = json.loads(line)["timings"]
            names = ("predicted_n", "draft_n", "draft_n_accepted")
            values = [timings.get(name) or 0 for name in names]
            if not all(isinstance(one, int) and one >= 0 for one in values):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise spot.refuse(
                f"{line.strip()[:40]!r} is no answer with timings of llama.cpp",
                "keep one answer of /v1/completions, /v1/chat/completions or /completion a line",
            ) from error
        requests += 1
        tokens, drafted, accepted = (
            before + more
            for before, more in zip(
                (tokens, drafted, accepted), (max(values[0] - 1, 0), *values[1:]), strict=True
            )
        )
    if not drafted or tokens <= accepted:
        raise InputError(
            f"{source.name}: its {requests} answers have no draft tokens",
            hint="keep the answers of a server that drafts (--spec-type)",
        )
    mean = tokens / (tokens - accepted + requests), tokens / (tokens - accepted)
    facts = {
        "num_requests": requests,
        "num_tokens": tokens,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
    }
    why = "answers do not state the draft length: import the server's metrics or log"
    return {**NOT_REPLAYED, **mean_figures((max(mean[0], 1.0), mean[1]), None, why, [], facts)}
