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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
METRIC = re.compile(
    r"\s*(?:[\w./\-]+:(?:\d+:)?\s*|\d+:\s*)?"  # of grep
    r"(?P<sample>(?P<name>(?:ray_)?(?:vllm|sglang|llamacpp)[:_]\w+)(?:\{|\s+[\d.+\-=NnI]).*)"
)
"""A sample of an engine."""
Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name, as `vllm:spec_decode_num_drafts`, and labels."""


@dataclass(frozen=True)
class Sample:
    """One value of one series."""

    spot: Spot
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    @property
    def engine(self) -> str:
        return self.name.partition(":")[0]

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

    @classmethod
    def of_lines(cls, name: str, lines: Iterable[tuple[Spot, str]]) -> Scrape:
        """Of a text.

        Raises:
            InputError: a malformed sample, or a second scrape behind the first.
        """
        return cls.of(name, (found for spot, line in lines for found in _parsed(spot, line)))

    @classmethod
    def of(cls, name: str, samples: Iterable[Sample]) -> Scrape:
        found: dict[Series, Sample] = {}
        for sample in samples:
            earlier = found.setdefault((sample.name, sample.labels), sample)
            if earlier is not sample:
                raise sample.spot.refuse(
                    f"{sample.name} of line {earlier.spot.number} again, so these are two scrapes",
                    "save each as a file; `specctl import BEFORE AFTER` gives what was counted "
                    "between them",
                )
        return cls(name, found)

    def since(self, before: Scrape) -> Scrape:
        """The counts between an earlier scrape of the same servers and this one.

        Raises:
            InputError: a restart between them, or scrapes of different servers.
        """
        here, there = ({key for key in one.samples if is_counter(key[0])} for one in (self, before))
        if missing := sorted(here ^ there):
            where, other = (self, before) if missing[0] in here else (before, self)
            raise InputError(
                f"{missing[0][0]} {_shown(missing[0])} is in {where.name} and not in {other.name}, "
                "so they are not two scrapes of one server",
                hint="give two scrapes of one server, the earlier one first",
            )
        counted = dict(self.samples)
        same_start = any(key[0].endswith("_created") for key in here)
        for key in sorted(here, key=lambda key: (not key[0].endswith("_created"), key)):
            new, old = self.samples[key], before.samples[key]
            if key[0].endswith("_created"):
                if new.value != old.value:
                    raise InputError(
                        f"{key[0]} is {old.value:.10g} in {before.name} and {new.value:.10g} in "
                        f"{self.name}: the server restarted between the scrapes",
                        hint=f"import {self.name} alone for what was counted since its start",
                    )
                continue
            if new.value < old.value:
                raise InputError(
                    f"{key[0]} {_shown(key)} fell from {old.value:g} in {before.name} to "
                    f"{new.value:g} in {self.name}: the later scrape was given first"
                    + ("" if same_start else ", or the server restarted between them"),
                    hint=f"try `specctl import {self.name} {before.name}`",
                )
            counted[key] = Sample(new.spot, new.name, new.labels, new.value - old.value)
        return Scrape(f"{before.name} to {self.name}", counted, is_window=True)


def is_counter(name: str) -> bool:
    """Whether a name counts since the server's start; gauges are of the moment."""
    return name.endswith("_created") or name.partition(":")[2] in _COUNTERS


def _matters(name: str) -> bool:
    """Whether something here reads it."""
    return is_counter(name) or "spec_" in name


_COUNTERS = {
    *(f"spec_decode_num_{of}" for of in ("drafts", "draft_tokens", "accepted_tokens")),
    "spec_decode_num_accepted_tokens_per_pos",
    *("generation_tokens", "num_requests", "num_aborted_requests", "spec_verify_calls"),
}


def _shown(key: Series) -> str:
    return "{" + ", ".join(f'{name}="{value}"' for name, value in key[1]) + "}"


def _parsed(spot: Spot, line: str) -> Iterator[Sample]:
    if (own := METRIC.match(line)) is None:
        return
    match = _SAMPLE.fullmatch(own["sample"].strip())
    if match is None:
        if _matters(_own_name(own["name"]) or ""):
            raise spot.refuse(f"{own['sample'].strip()[:60]} is no whole sample", "scrape again")
        return
    # Positions add up to the accepted tokens, so that a cut there is found.
    if not line.endswith("\n") and _matters(_own_name(own["name"]) or "") and "per_pos" not in line:
        raise spot.refuse(
            "this sample is the last and has no line end, so its number may be cut off",
            "scrape again, all of a page",
        )
    yield from _sample(
        spot, match["name"], dict(_PAIR.findall(match["labels"] or "")), match["value"]
    )


def _own_name(name: str) -> str | None:
    """As the engine writes it, without `_total`; None for names of others."""
    found = _NAME.fullmatch(name)
    return f"{found[1]}:{found[2].removesuffix('_total')}" if found else None


def _sample(spot: Spot, name: str, labels: Mapping[str, str], text: str) -> Iterator[Sample]:
    """A sample by the engine's own name; none for names of others, or histograms."""
    own = _own_name(name)
    if own is None or "le" in labels:
        return
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        if not _matters(own):
            return
        raise spot.refuse(f"{own} is {text[:40]}, no finite number from 0 on", "scrape again")
    yield Sample(spot, own, tuple(sorted(labels.items())), value)


# --------------------------------------------------------------------------- JSON


def json_scrapes(name: str, document: Any) -> list[Scrape] | None:
    """Scrapes in an answer of Prometheus' API, or in lines of VictoriaMetrics; None for others.

    Raises:
        InputError: an answer without counters.
    """
    spot = Spot(name, 1)
    if isinstance(document, dict) and document.get("status") == "error":
        raise InputError(
            f"{name}: Prometheus answers with an error: {str(document.get('error'))[:200]}",
            hint="correct the query",
        )
    data = document.get("data") if isinstance(document, dict) else None
    if isinstance(data, dict) and "resultType" in data:
        rows = data.get("result")
    elif isinstance(document, dict) and isinstance(document.get("metric"), dict):
        rows = [document]
    elif (
        isinstance(document, list)
        and document
        and all(isinstance(row, dict) and isinstance(row.get("metric"), dict) for row in document)
    ):
        rows = document
    else:
        return None
    if not rows:
        raise InputError(f"{name}: the query found no series", hint=_QUERY)
    try:
        pairs = [({**row["metric"]}, _values(row)) for row in rows]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"{name} is no whole answer of Prometheus' API: a series lacks its labels or numbers",
            hint="query again",
        ) from error
    if not any("__name__" in labels for labels, _ in pairs):
        raise InputError(
            f"{name}: its series have no name, so they are of an expression such as rate() or "
            "sum(), which holds no counts",
            hint=_QUERY,
        )
    for labels, values in pairs:
        numbers = [float(value) for value in values]
        own = labels.get("__name__", "").removesuffix("_total")
        if is_counter(own) and numbers != sorted(numbers):
            raise InputError(
                f"{name}: {own} falls within the range, so the server restarted in it",
                hint="query a range of one run of the server",
            )
    ends = [
        Scrape.of(
            name if end else f"{name}, first values",
            (
                sample
                for labels, values in pairs
                if values
                for sample in _sample(
                    spot,
                    labels.get("__name__", ""),
                    {key: value for key, value in labels.items() if key != "__name__"},
                    values[end],
                )
            ),
        )
        for end in (0, -1)
    ]
    return ends if any(len(values) > 1 for _, values in pairs) else ends[1:]


_QUERY = 'query the counters themselves: {__name__=~"vllm:spec_decode_.+"}'


def _values(row: dict[str, Any]) -> list[str]:
    """Values of a vector, a matrix, or an export, in order of time.

    Raises:
        ValueError: one that is no number; KeyError, IndexError and TypeError without any.
    """
    pairs = [row["value"]] if "value" in row else row["values"]
    values = [str(one[1] if isinstance(one, list) else one) for one in pairs]
    if not values or any(math.isnan(float(value)) for value in values):
        raise ValueError(row)
    return values


def json_documents(text: str) -> list[Any]:
    """One document, or one a line; empty if the text is neither."""
    try:
        return [json.loads(text)]
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return []
