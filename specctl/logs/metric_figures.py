"""Figures of engines' metrics.

- vLLM (`vllm/v1/spec_decode/metrics.py`, 0.9 to 0.33) and llama.cpp (build 11549):
  `spec_decode_num_drafts`, `_num_draft_tokens`, `_num_accepted_tokens` and, with a label `position`
  from 0 on, `_num_accepted_tokens_per_pos`. A position over drafts is its *marginal* rate. Rounds
  without a draft are left out. Engines and servers of one model are added up.
- SGLang (`observability/metrics_collector.py` of 0.5.23, `--enable-metrics`): counters of finished
  requests, `spec_verify_calls`, `generation_tokens` and `num_requests` (reading a prompt gives the
  first token of a request); gauges of the last interval, `spec_accept_length`, `_accept_rate`,
  `_num_steps`, `_num_draft_tokens` (root counted). A request's last round is cut at the end of the
  text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specctl.errors import InputError
from specctl.logs.acceptance_figures import (
    TREES,
    UNKNOWN_BATCHES,
    VARIES,
    chain_figures,
    mean_figures,
)
from specctl.logs.scrapes import Sample, Scrape

_STEM = "spec_decode_"
_TOTALS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_BY_POSITION = "num_accepted_tokens_per_pos"
_OLD = (
    "spec_decode_draft_acceptance_rate",
    "spec_decode_efficiency",
    "spec_decode_num_emitted_tokens",
)
_NO_COUNTER = {
    "vllm": "either this server does not speculate (--speculative-config), or the scrape was "
    "filtered",
    "llamacpp": "either this server drafts nothing (--spec-type), or it is older than September "
    "2026: its log has `draft acceptance`",
}


def figures_by_model(scrape: Scrape) -> dict[str, dict[str, Any]]:
    """Figures of each model with rounds, and `engine`.

    Raises:
        InputError: no rounds, counters that contradict each other, or those of an unknown version.
    """
    engines = {sample.engine for sample in scrape.samples.values()}
    if len(engines) > 1:
        raise InputError(
            f"{scrape.name} has metrics of {' and '.join(sorted(engines))}",
            hint="give each server's alone",
        )
    [engine] = engines
    models: dict[str, dict[str, list[Sample]]] = {}
    for (name, labels), sample in scrape.samples.items():
        named = models.setdefault(dict(labels).get("model_name", ""), {})
        named.setdefault(name.partition(":")[2], []).append(sample)
    of_model = _sglang_figures if engine == "sglang" else _counter_figures
    found = {name: of_model(scrape, name, models[name]) for name in sorted(models)}
    figures = {name: {"engine": engine, **own} for name, own in found.items() if own}
    if not figures:
        raise (_no_gauges if engine == "sglang" else _no_drafts)(scrape, engine, models)
    return figures


# --------------------------------------------------------------------------- vLLM, llama.cpp


def _no_drafts(
    scrape: Scrape, engine: str, models: dict[str, dict[str, list[Sample]]]
) -> InputError:
    names = {name for named in models.values() for name in named}
    if names & {*_OLD}:
        return InputError(
            f"{scrape.name} has metrics of a vLLM before 0.9, which count neither rounds nor "
            "acceptance by position",
            hint="upgrade vLLM, and scrape again",
        )
    known = {_STEM + name for name in (*_TOTALS, _BY_POSITION)}
    if names & known:
        when = "between the scrapes" if scrape.is_window else "yet"
        return InputError(
            f"{scrape.name} counts no drafts {when}",
            hint="scrape once the server has served some requests",
        )
    if own := sorted(name for name in names if name.startswith(_STEM)):
        return InputError(
            f"{scrape.name} has counters of drafts that no release known here writes "
            f"({', '.join(own[:3])}), and no {_STEM}num_drafts",
            hint="scrape vLLM 0.9 or newer, or llama.cpp of September 2026 or newer",
        )
    return InputError(
        f"{scrape.name} has metrics of {engine} and none of drafts ({engine}:{_STEM}...)",
        hint=_NO_COUNTER[engine],
    )


def _counter_figures(
    scrape: Scrape, model: str, named: dict[str, list[Sample]]
) -> dict[str, Any] | None:
    """Figures of one model, None without rounds."""
    counters: Counter[str | int] = Counter()
    for name, samples in named.items():
        if not name.startswith(_STEM) or name.endswith("_created") or name in _OLD:
            continue
        own = name.removeprefix(_STEM)
        for sample in samples:
            position = dict(sample.labels).get("position", "")
            if own == _BY_POSITION and not (position.isdecimal() and len(position) < 5):
                raise sample.spot.refuse(
                    f'the label position is {repr(position)[:40]}, not "0", "1", ...',
                    "scrape again",
                )
            if own in (*_TOTALS, _BY_POSITION):
                counters[int(position) if own == _BY_POSITION else own] += sample.count()
    if not counters["num_drafts"]:
        return None
    drafts, drafted, accepted = totals = [counters[name] for name in _TOTALS]
    positions = sorted(key for key in counters if isinstance(key, int))
    at_least = [counters[position] for position in positions]
    chained = [drafts, *at_least]
    rules = {
        "a counter is missing": all(name in counters for name in _TOTALS),
        "positions have a gap": positions == [*range(len(positions))],
        "a position is accepted more often than the one before": chained
        == sorted(chained, reverse=True),
        "positions do not add up to the accepted tokens": not at_least or sum(at_least) == accepted,
        "more tokens are accepted than drafted": accepted <= drafted,
    }
    for broken, holds in rules.items():
        if not holds:
            shown = dict(zip(_TOTALS, totals, strict=True))
            raise InputError(
                f"{scrape.name}, model {model!r}: {broken} ({shown}, by position {at_least[:8]})",
                hint="scrape again, all of a page",
            )
    servers = {
        tuple((k, v) for k, v in sample.labels if k in ("instance", "pod", "ReplicaId", "engine"))
        for sample in named[_STEM + "num_drafts"]
    }
    figures = chain_figures(
        drafts,
        at_least,
        drafted,
        accepted,
        is_ragged=drafted != drafts * len(at_least),
        not_known=[UNKNOWN_BATCHES],
    )
    return {"num_engines": len(servers), **figures}


# --------------------------------------------------------------------------- SGLang


def _no_gauges(
    scrape: Scrape, engine: str, models: dict[str, dict[str, list[Sample]]]
) -> InputError:
    if any(
        "spec_accept_length" in named or "spec_verify_calls" in named for named in models.values()
    ):
        what = "counts no rounds of drafts: its sglang:spec_verify_calls and accept length are 0"
        hint = "either speculation is off (--speculative-algorithm), or nothing was decoded yet"
    else:
        what = "has metrics of SGLang and neither sglang:spec_verify_calls nor spec_accept_length"
        hint = "either speculation is off, or the scrape was filtered"
    return InputError(f"{scrape.name} {what}", hint=hint)


def _sglang_figures(
    scrape: Scrape, model: str, named: dict[str, list[Sample]]
) -> dict[str, Any] | None:
    def total(name: str) -> int:
        return sum(sample.count() for sample in named.get(name, []))

    def values(name: str) -> Sequence[float]:
        return sorted({sample.value for sample in named.get(name, [])} - {0.0})

    rounds, lengths = total("spec_verify_calls"), values("spec_accept_length")
    if not rounds and (scrape.is_window or not lengths):
        return None
    facts: dict[str, Any] = {"num_rounds": rounds or None, "last_interval_means": lengths}
    if rounds:
        # Reading a prompt gives a finished request's first token; an aborted one may have none.
        requests, aborted = total("num_requests"), total("num_aborted_requests")
        tokens = total("generation_tokens") - requests
        mean = (tokens / rounds, (tokens + min(aborted, requests)) / rounds)
        if mean[0] < 1:
            raise InputError(
                f"{scrape.name}, model {model!r}: {rounds} rounds and only {tokens} tokens besides "
                f"the first ones of {requests} requests, less than one a round",
                hint="scrape one server, all of whose requests speculate",
            )
        facts |= {"num_requests": requests, "num_tokens": tokens}
    else:
        mean = (lengths[0], lengths[-1])
    drafted, steps = values("spec_num_draft_tokens"), values("spec_num_steps")
    if len(drafted) > 1:
        depth, why = None, VARIES
    elif drafted and len(steps) == 1 and steps[0] != drafted[0] - 1:
        depth, why = None, TREES
    else:
        why = "a gauge sglang:spec_num_draft_tokens above 0 is not there"
        depth = int(drafted[0]) - 1 if drafted else None
    earlier = "whether the draft length changed" if rounds else "anything"
    unknown = [f"{earlier} before the last interval"]
    return mean_figures(mean, depth, why, unknown, facts)
