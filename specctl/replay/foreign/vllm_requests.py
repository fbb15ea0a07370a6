"""vLLM's per-request acceptance, `metrics.speculative_decoding` of its responses, summarised.

Written with `--per-request-spec-decode-metrics summary|detailed`
(docs/features/speculative_decoding/acceptance_metrics.md of vLLM; experimental there). Whole
responses are read, or the bare objects; responses without it (n > 1, no speculation) are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import InputError
from specctl.logs.positions import Longs
from specctl.replay.foreign.lines import (
    OnBytes,
    Row,
    Spot,
    count_of,
    counts_of,
    json_objects,
    kind_of,
)
from specctl.replay.foreign.rates import PositionRates, at_least, chain_sweep
from specctl.replay.foreign.spec_bench import WHY_NOT_REPLAYED


@dataclass
class _Totals:
    num_requests: int = 0
    num_without: int = 0
    num_drafted: int = 0
    means: list[float] = field(default_factory=list)
    histogram: Longs = field(default_factory=lambda: np.zeros(1, np.int64))
    lengths: set[int] = field(default_factory=set)


def summarise_requests(path: Path, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Figures over all responses of a file.

    Raises:
        InputError: a malformed response, by its line; one whose counts contradict each other;
            none that drafted.
    """
    totals = _Totals()
    for spot, metrics in _metrics(path, on_bytes):
        totals.num_requests += 1
        if metrics is None:
            totals.num_without += 1
        else:
            _add(totals, metrics, spot)
    if not totals.histogram.sum():
        raise InputError(
            str(path),
            expected="responses with speculative steps",
            found=f"{totals.num_requests} without",
            fix="serve with --per-request-spec-decode-metrics summary",
        )
    return _figures(totals)


def is_response(row: Row) -> bool:
    """Whether a record is a response with these metrics, or the bare object."""
    metrics = row.get("metrics")
    return "num_spec_steps" in row or (
        isinstance(metrics, dict) and "speculative_decoding" in metrics
    )


def _metrics(path: Path, on_bytes: OnBytes | None) -> Iterator[tuple[Spot, Row | None]]:
    for spot, row in json_objects(path, on_bytes):
        if "num_spec_steps" in row:
            yield spot, row
            continue
        metrics = row.get("metrics") or {}
        found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else metrics
        if found is not None and not isinstance(found, dict):
            raise spot.refuse("'metrics.speculative_decoding' as an object", kind_of(found))
        yield spot, found


def _add(totals: _Totals, metrics: Row, spot: Spot) -> None:
    histogram = counts_of(metrics.get("acceptance_histogram"), "'acceptance_histogram'", spot)
    steps = count_of(metrics, "num_spec_steps", spot)
    accepted = count_of(metrics, "num_accepted_draft_tokens", spot)
    drafted = count_of(metrics, "num_draft_tokens", spot)
    _check(metrics, histogram, steps, accepted, drafted, spot)
    totals.num_drafted += drafted
    totals.histogram = _sum(totals.histogram, histogram)
    totals.lengths |= _draft_lengths(metrics, steps, drafted)
    if steps:
        totals.means.append(1 + accepted / steps)


def _check(
    metrics: Row, histogram: Longs, steps: int, accepted: int, drafted: int, spot: Spot
) -> None:
    """The counts must tell one story, or some of them belong to another request."""
    laws = {
        "'num_spec_steps' as the sum of the histogram": int(histogram.sum()) == steps,
        "'num_accepted_draft_tokens' as the histogram's": accepted
        == int(histogram @ np.arange(len(histogram))),
        "no more accepted than drafted tokens": accepted <= drafted,
    }
    for key, total in (("per_step_accepted", accepted), ("per_step_drafted", drafted)):
        if metrics.get(key) is not None:
            listed = counts_of(metrics[key], repr(key), spot)
            laws[f"{key!r} with one entry a step, adding up"] = (
                len(listed) == steps and int(listed.sum()) == total
            )
    for law, holds in laws.items():
        if not holds:
            raise spot.refuse(law, "another count", "leave the response out")


def _draft_lengths(metrics: Row, steps: int, drafted: int) -> set[int]:
    """Draft lengths that occurred. -1 stands for several that were not written down."""
    by_length = metrics.get("acceptance_histogram_by_draft_length")
    if isinstance(by_length, dict) and all(key.isdecimal() for key in by_length):
        return {int(key[:9]) for key in by_length}
    if not steps:
        return set()
    return {drafted // steps} if drafted % steps == 0 else {-1}


def _sum(one: Longs, other: Longs) -> Longs:
    size = max(len(one), len(other))
    return np.pad(one, (0, size - len(one))) + np.pad(other, (0, size - len(other)))


def _figures(totals: _Totals) -> dict[str, Any]:
    histogram = totals.histogram.tolist()
    steps, accepted = sum(histogram), sum(j * count for j, count in enumerate(histogram))
    longest = len(histogram) - 1
    rates = PositionRates.of_counts(steps, at_least(histogram))
    return {
        "replayable": False,
        "why_not_replayed": WHY_NOT_REPLAYED,
        "num_requests": totals.num_requests,
        "num_requests_without_metrics": totals.num_without,
        "num_rounds": steps,
        "num_draft_tokens": totals.num_drafted,
        "num_accepted_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / steps,
        "mean_of_request_means": float(np.mean(totals.means)),
        "draft_acceptance_rate": accepted / totals.num_drafted if totals.num_drafted else None,
        "acceptance_histogram": histogram,
        **rates.to_json(),
        "fixed_length_sweep": chain_sweep(rates, is_ragged=totals.lengths != {longest}),
    }
