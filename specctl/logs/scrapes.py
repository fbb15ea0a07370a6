"""Samples of Prometheus metrics, and the window between two scrapes.

Read are the text of `/metrics` and `/federate`, OpenMetrics (`# EOF`, exemplars), `promtool query
instant`, and JSON: Prometheus' API (vector, or matrix, whose first and last values make a window)
and VictoriaMetrics' export. Ray and OpenTelemetry write `ray_vllm_...` and `vllm_...` for
`vllm:...`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specctl.errors import InputError
from specctl.logs.sources import Spot

MAX_COUNTER = 2**53
"""Largest counter that a float64, the number type of Prometheus, counts exactly."""
_LABEL = r'\s*[\w.]+="(?:[^"\\]|\\.)*"\s*'
_PAIR = re.compile(r'([\w.]+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(
    rf"(?P<name>[\w:]+)(?:\{{(?P<labels>(?:{_LABEL}(?:,{_LABEL})*,?)?)\}})?"
    r"\s+(?:=> *)?(?P<value>[^\s#]+)(?:\s+@?\[?-?[\d.eE+]+\]?)?\s*(?:#.*)?"
)
_NAME = re.compile(r"(?:ray_)?(vllm|sglang|llamacpp)[:_](\w+)")
_START = "process_start_time_seconds"
_METRIC = re.compile(
    r"\s*(?:[\w./\-]+:(?:\d+:)?\s*|\d+:\s*)?"  # of grep
    rf"(?P<sample>(?P<name>(?:ray_)?(?:vllm|sglang|llamacpp)[:_]\w+|{_START})"
    r"(?:\{|\s+[\d.+\-=NnI]).*)"
)
"""A sample of an engine, or the start of its process."""
Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name, as `vllm:spec_decode_num_drafts`, and labels."""


@dataclass(frozen=True)
class Sample:
    """One value of one series."""

    spot: Spot
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def count(self) -> int:
        """The value as a whole number. Raises InputError for any other."""
        if not (self.value <= MAX_COUNTER and self.value.is_integer()):
            raise self.spot.refuse(f"{self.name} is {self.value:g}, no count", "scrape again")
        return int(self.value)


@dataclass
class Scrape:
    """The samples of engines in one scrape, by series."""

    name: str
    samples: dict[Series, Sample]
    is_window: bool = False  # differences between two scrapes
    starts: dict[Series, list[float]] = field(default_factory=dict)  # of processes, s

    @property
    def engine(self) -> str:
        """Raises InputError for samples of several engines."""
        engine, *others = sorted({name.partition(":")[0] for name, _ in self.samples})
        if others:
            raise InputError(
                f"{self.name} has metrics of {' and '.join([engine, *others])}",
                hint="give each server's alone",
            )
        return engine

    @classmethod
    def of_lines(cls, name: str, lines: Iterable[tuple[Spot, str]]) -> Scrape:
        """Of a text.

        Raises:
            InputError: a malformed sample, or a second scrape behind the first.
        """
        return cls.of(name, (_parsed(spot, line) for spot, line in lines))

    @classmethod
    def of(cls, name: str, samples: Iterable[Sample | None]) -> Scrape:
        found: dict[Series, Sample] = {}
        starts: dict[Series, list[float]] = {}
        for sample in filter(None, samples):
            series = sample.name, sample.labels
            if sample.name == _START or sample.name.endswith("_created"):
                starts.setdefault(series, []).append(sample.value)
                continue
            earlier = found.setdefault(series, sample)
            if earlier is not sample:
                raise sample.spot.refuse(
                    f"{sample.name} of line {earlier.spot.number} again, so these are two scrapes",
                    "save each as a file; `specctl import BEFORE AFTER` gives what was counted "
                    "between them",
                )
        return cls(name, found, starts=starts)

    def since(self, before: Scrape) -> Scrape:
        """The counts between an earlier scrape of the same servers and this one.

        Raises:
            InputError: a restart between them, or scrapes of different servers.
        """
        here, there = ({key for key in one.samples if _counts(key[0])} for one in (self, before))
        if odd := sorted(here ^ there):
            raise InputError(
                f"{_shown(odd[0])} is in only one of {before.name} and {self.name}, so these "
                "are not two scrapes of one server",
                hint="give two scrapes of one server, the earlier one first, and those of "
                "different servers each alone",
            )
        self._refuse_restart(before)
        counted = dict(self.samples)
        for key in sorted(here):
            new, old = self.samples[key], before.samples[key]
            if new.value < old.value:
                raise InputError(
                    f"{_shown(key)} goes from {old.value:.10g} in {before.name} to "
                    f"{new.value:.10g} in {self.name}: the later scrape was given first, or the "
                    "server restarted between them",
                    hint=f"try `specctl import {self.name} {before.name}` if {self.name} is the "
                    f"earlier one, or import {self.name} alone for what was counted since its "
                    "start",
                )
            counted[key] = replace(new, value=new.value - old.value)
        return Scrape(f"{before.name} to {self.name}", counted, is_window=True)

    def _refuse_restart(self, before: Scrape) -> None:
        """Raises InputError for servers that started again between two scrapes."""
        # Metrics of other programs may stand beside: their labels differ.
        labels = {pair for _, own in self.samples for pair in own}
        for key in sorted(self.starts.keys() & before.starts.keys()):
            new, old = max(self.starts[key]), max(before.starts[key])
            if new != old and labels.issuperset(key[1]):
                newer = self.name if new > old else before.name
                raise InputError(
                    f"{_shown(key)} goes from {old:.10g} in {before.name} to {new:.10g} in "
                    f"{self.name}: the server restarted between them",
                    hint=f"import {newer} alone for what was counted since its start",
                )


_COUNTERS = {
    *(f"spec_decode_num_{of}" for of in ("drafts", "draft_tokens", "accepted_tokens")),
    "spec_decode_num_accepted_tokens_per_pos",
    *("generation_tokens", "num_requests", "num_aborted_requests", "spec_verify_calls"),
}


def _counts(name: str) -> bool:
    """Whether a name counts since the server's start; gauges are of the moment."""
    return name.partition(":")[2] in _COUNTERS


def _is_read(name: str) -> bool:
    return _counts(name) or "spec_" in name


def _shown(key: Series) -> str:
    name, labels = key
    if not labels:
        return name
    return name + " {" + ", ".join(f'{label}="{value}"' for label, value in labels) + "}"


def _parsed(spot: Spot, line: str) -> Sample | None:
    if (own := _METRIC.match(line)) is None:
        return None
    text, is_read = own["sample"].strip(), _is_read(_own_name(own["name"]) or "")
    match = _SAMPLE.fullmatch(text)
    if match is None:
        if is_read:
            raise spot.refuse(f"{text[:60]} is no whole sample", "scrape again")
        return None
    # Positions add up to the accepted tokens, so that a cut there is found.
    if is_read and not line.endswith("\n") and "per_pos" not in line:
        raise spot.refuse(
            "this sample is the last and has no line end, so its number may be cut off",
            "scrape again, all of a page",
        )
    return _sample(spot, match["name"], dict(_PAIR.findall(match["labels"] or "")), match["value"])


def _own_name(name: str) -> str | None:
    """As the engine writes it, without `_total`; None for names of others."""
    if name == _START:
        return name
    found = _NAME.fullmatch(name)
    return f"{found[1]}:{found[2].removesuffix('_total')}" if found else None


def _sample(spot: Spot, name: str, labels: Mapping[str, str], text: str) -> Sample | None:
    """A sample by the engine's own name; none of others, of histograms, or without a number."""
    own = _own_name(name)
    if own is None or "le" in labels:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        if not _is_read(own):
            return None
        raise spot.refuse(f"{own} is {text[:40]}, no finite number from 0 on", "scrape again")
    return Sample(spot, own, tuple(sorted(labels.items())), value)


# --------------------------------------------------------------------------- JSON


def json_scrapes(name: str, records: Sequence[Any]) -> list[Scrape]:
    """The scrape in an answer of Prometheus' API or in records of VictoriaMetrics, the first and
    last values of a range, or nothing.

    Raises:
        InputError: an answer without counters, or a range over a restart.
    """
    if not (records and isinstance(records[0], dict)):
        return []
    first, data = records[0], records[0].get("data")
    if first.get("status") == "error":
        raise InputError(
            f"{name}: Prometheus answers with an error: {str(first.get('error'))[:200]}",
            hint="correct the query",
        )
    if isinstance(data, dict) and "resultType" in data:
        records = data.get("result", ())
    elif "metric" not in first:
        return []
    try:
        series = [(dict(row["metric"]), _values(row)) for row in records]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"{name} is no whole answer of Prometheus' API: a series lacks its labels or numbers",
            hint="query again",
        ) from error
    ends: list[list[Sample | None]] = [[], []]
    for labels, values in series:
        own = str(labels.pop("__name__", ""))
        if _counts(_own_name(own) or "") and values != sorted(values, key=float):
            raise InputError(
                f"{name}: {own} falls within the range, so the server restarted in it",
                hint="query a range of one run of the server",
            )
        for end, place in zip(ends, (0, -1), strict=True):
            end.append(_sample(Spot(name, 1), own, labels, values[place]))
    if not any(ends[1]):
        raise InputError(
            f"{name} has no series of an engine: its query found none, or it is of an expression "
            "such as rate(), which holds no counts",
            hint='query the counters themselves: {__name__=~"vllm:spec_decode_.+"}',
        )
    is_range = any(len(values) > 1 for _, values in series)
    before = [Scrape.of(f"{name}, first values", ends[0])] if is_range else []
    return [*before, Scrape.of(name, ends[1])]


def _values(row: dict[str, Any]) -> list[str]:
    """Values of a vector, a matrix, or an export, in order of time; at least one, all numbers."""
    pairs = [row["value"]] if "value" in row else row["values"]
    values = [str(one[1] if isinstance(one, list) else one) for one in pairs]
    if not values or any(math.isnan(float(value)) for value in values):
        raise ValueError(row)
    return values


def json_records(text: str) -> list[Any]:
    """One document, a list's, or one a line; empty if the text is no JSON."""
    for documents in ([text], [line for line in text.splitlines() if line.strip()]):
        try:
            found = [json.loads(document) for document in documents]
        except ValueError:
            continue
        return found[0] if len(found) == 1 and isinstance(found[0], list) else found
    return []
