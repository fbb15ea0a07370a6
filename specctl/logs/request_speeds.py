"""Measured speeds of llama.cpp's requests, and those with drafts against those without."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot
from typing import Any

import numpy as np

from specctl.logs.server_log import ServerLog
from specctl.stats import MIN_PROMPTS, Interval, ratio_of_sums


def request_speeds(
    logs: Sequence[ServerLog], servers: Sequence[Sequence[ServerLog]]
) -> list[dict[str, Any]]:
    """`log`, `num_requests` and `tokens_per_s` of a request, first token and prompt left out.

    `at_a_time` is the usual number of requests together, None if not known. `over_plain` and
    `over_plain_interval` are to the logs without drafts of its server with as many: None without
    any, the interval also for fewer than eight requests of either side. `other_loads` are those of
    its server's logs without drafts, where none has as many.
    """
    rows = []
    for log in logs:
        if not log.written:
            continue
        server = next((server for server in servers if log in server and log.intervals), [])
        bases = [other for other in server if not other.intervals and other.written]
        load = _load(log)
        plain = [one for other in bases if _load(other) == load for one in other.written]
        speed, over, ends = _speed(log.written), None, None
        if plain:
            of_plain = _speed(plain)
            over = speed.value / of_plain.value
            if min(len(log.written), len(plain)) >= MIN_PROMPTS:
                halves = [float(one.high / one.value) - 1 for one in (speed, of_plain)]
                factor = exp(hypot(*halves))
                ends = [over / factor, over * factor]
        rows.append(
            {
                "log": log.name,
                "num_requests": len(log.written),
                "at_a_time": load,
                "tokens_per_s": speed.value,
                "over_plain": over,
                "over_plain_interval": ends,
                "other_loads": [] if plain else [_load(other) for other in bases],
            }
        )
    return rows


def _load(log: ServerLog) -> int | None:
    """The median of requests at a time."""
    known = sorted(together for *_, together in log.written if together)
    return known[len(known) // 2] if known else None


def _speed(written: Sequence[tuple[int, float, int | None]]) -> Interval:
    """Tokens a second, over requests."""
    tokens, seconds = np.array([one[:2] for one in written], float).T
    return ratio_of_sums(tokens, seconds)
