"""vLLM's Prometheus counters of speculative decoding, summarised by model.

`vllm/v1/spec_decode/metrics.py`: `vllm:spec_decode_num_drafts`, `_num_draft_tokens`,
`_num_accepted_tokens` and, with a label `position` counted from 0,
`_num_accepted_tokens_per_pos`; the text of `/metrics` appends `_total` (and `_created` gauges,
which are times and not read). A position's counter rises where at least that many tokens were
accepted: over drafts it is the *marginal* rate. Counters run since the server's start, over all
requests; rounds without a draft are not among them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.errors import InputError
from specctl.replay.foreign.lines import MAX_COUNTER, OnBytes, Spot, text_lines
from specctl.replay.foreign.rates import PositionRates, chain_sweep
from specctl.replay.foreign.spec_bench import WHY_NOT_REPLAYED

STEM = "vllm:spec_decode_"
_SAMPLE = re.compile(
    r"vllm:spec_decode_(?P<name>num_drafts|num_draft_tokens|num_accepted_tokens"
    r"|num_accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*"
)
_LABEL = re.compile(r'\s*(?P<key>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"\s*(?:,|$)')
_POSITION = re.compile(r"\d{1,4}")


@dataclass
class _Counters:
    """Of one model, engines added."""

    totals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    per_position: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def summarise_counters(path: Path, *, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Figures of one scrape of `/metrics`, by model.

    Raises:
        InputError: a malformed counter, by its line; none, or ones that contradict each other.
    """
    models: dict[str, _Counters] = {}
    seen: dict[tuple[str, str], Spot] = {}
    for spot, line in text_lines(path, on_bytes):
        if line.startswith(STEM) and (sample := _SAMPLE.fullmatch(line)):
            _check_new(spot, sample, seen)
            _add(models, sample, spot)
        elif line.startswith(STEM) and "_created" not in line:
            raise spot.refuse("a counter of vLLM's speculative decoding", line.strip()[:60])
    if not any(counters.totals["num_drafts"] for counters in models.values()):
        raise InputError(
            str(path),
            expected=f"a counter {STEM}num_drafts_total above 0",
            found="none" if not models else "no drafts yet",
            fix="scrape /metrics of a vLLM server that has speculated",
        )
    return {
        "replayable": False,
        "why_not_replayed": WHY_NOT_REPLAYED,
        "models": {name: _figures(path, name, models[name]) for name in sorted(models)},
    }


def is_metrics(line: str) -> bool:
    """Whether a line is of the exposition format."""
    return line.startswith(("# HELP ", "# TYPE ", "vllm:"))


def _check_new(spot: Spot, sample: re.Match[str], seen: dict[tuple[str, str], Spot]) -> None:
    """Two scrapes in one file would be added up."""
    key = (sample["name"], sample["labels"] or "")
    earlier = seen.setdefault(key, spot)
    if earlier is not spot:
        found = f"{sample['name']} of line {earlier.number} again"
        raise spot.refuse("one scrape, each counter once", found, "keep one scrape")


def _add(models: dict[str, _Counters], sample: re.Match[str], spot: Spot) -> None:
    labels = _labels(sample["labels"] or "", spot)
    counters = models.setdefault(labels.get("model_name", ""), _Counters())
    value = _count(sample["value"], spot)
    if sample["name"] != "num_accepted_tokens_per_pos":
        counters.totals[sample["name"]] += value
        return
    position = labels.get("position", "")
    if not _POSITION.fullmatch(position):
        raise spot.refuse('a label position="0", "1", ...', repr(position)[:40])
    counters.per_position[int(position)] += value


def _labels(text: str, spot: Spot) -> dict[str, str]:
    found, end = {}, 0
    while end < len(text):
        label = _LABEL.match(text, end)
        if label is None:
            raise spot.refuse('labels as key="value"', text[end : end + 40])
        found[label["key"]] = label["value"]
        end = label.end()
    return found


def _count(text: str, spot: Spot) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value <= MAX_COUNTER and value.is_integer()):
        raise spot.refuse("a count", text[:40])
    return int(value)


def _figures(path: Path, model: str, counters: _Counters) -> dict[str, Any]:
    drafts, drafted, accepted = (
        counters.totals[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    at_least = [count for _, count in sorted(counters.per_position.items())]
    _check(path, model, counters, at_least)
    if not drafts:
        return {"num_rounds": 0}
    rates = PositionRates.of_counts(drafts, at_least)
    is_ragged = drafted != drafts * len(at_least)
    return {
        "num_rounds": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / drafts,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        **rates.to_json(),
        "fixed_length_sweep": chain_sweep(rates, is_ragged=is_ragged) if at_least else None,
    }


def _check(path: Path, model: str, counters: _Counters, at_least: list[int]) -> None:
    """A scrape is one moment; counters that contradict each other are not."""
    totals = counters.totals
    chained = [totals["num_drafts"], *at_least]
    accepted = totals["num_accepted_tokens"]
    laws = {
        "positions 0, 1, ... without a gap": sorted(counters.per_position)
        == [*range(len(at_least))],
        "no position accepted more often than the one before": chained
        == sorted(chained, reverse=True),
        "the positions to add up to the accepted tokens": not at_least or sum(at_least) == accepted,
        "no more accepted than drafted tokens": accepted <= totals["num_draft_tokens"],
    }
    for law, holds in laws.items():
        if not holds:
            raise InputError(
                f"{path}, model {model!r}",
                expected=law,
                found=f"{dict(totals)}, by position {at_least[:8]}",
                fix="scrape again",
            )
