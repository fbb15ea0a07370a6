"""Figures of engines' metrics.

- vLLM (`vllm/v1/spec_decode/metrics.py`, 0.9 to 0.33) and llama.cpp (build 11549):
  `spec_decode_num_drafts`, `_num_draft_tokens`, `_num_accepted_tokens` and, with a label `position`
  from 0 on, `_num_accepted_tokens_per_pos`. A position over drafts is its *marginal* rate. Rounds
  without a draft are left out. Engines and servers of one model are added up; llama.cpp names no
  model, so that its servers on one page of `/federate` stand apart.
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
from specctl.logs.server_log import ENGINES

_STEM = "spec_decode_"
_TOTALS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_WHOLE = 0.9
"""Share of whole chains below which drafts were ended early, or texts are short."""
_BY_POSITION = "num_accepted_tokens_per_pos"
_OLD = {f"{_STEM}{name}" for name in ("draft_acceptance_rate", "efficiency", "num_emitted_tokens")}
_ROUNDS = {
    "vllm": _STEM + "num_drafts",
    "llamacpp": _STEM + "num_drafts",
    "sglang": "spec_verify_calls",
}
_OFF = {
    "vllm": "does not speculate (--speculative-config)",
    "sglang": "does not speculate (--speculative-algorithm)",
    "llamacpp": "drafts nothing (--spec-type), or is of before September 2026: import its log then",
}
Labels = tuple[tuple[str, str], ...]
Named = dict[str, list[Sample]]
"""Samples of one model by name, without the engine's."""


def figures_by_model(scrape: Scrape) -> dict[str, dict[str, Any]]:
    """Figures of each model with rounds.

    Raises:
        InputError: no rounds, counters that contradict each other, or those of an unknown version.
    """
    engine, models = scrape.engine, dict[str, Named]()
    for (name, labels), sample in scrape.samples.items():
        server = " ".join(value for _, value in _server(labels))
        named = models.setdefault(dict(labels).get("model_name", server), {})
        named.setdefault(name.partition(":")[2], []).append(sample)
    of_model = _sglang_figures if engine == "sglang" else _counter_figures
    found = {name: of_model(scrape, name, models[name]) for name in sorted(models)}
    if figures := {name: own for name, own in found.items() if own}:
        return figures
    names = {name for named in models.values() for name in named}
    if names & _OLD:
        what = "has metrics of a vLLM before 0.9, which count neither rounds nor positions"
        hint = "upgrade vLLM, and scrape again"
    elif names & {_ROUNDS[engine], "spec_accept_length"}:
        what = f"counts no drafts {'between the scrapes' if scrape.is_window else 'yet'}"
        hint = "scrape once the server has served some requests; if it then counts none, it "
        hint += _OFF[engine]
    else:
        drafts = sorted(name for name in names if "spec_" in name)
        what = f"has metrics of {ENGINES[engine]} and no {engine}:{_ROUNDS[engine]}"
        what += f" (of drafts: {', '.join(drafts[:3])})" if drafts else ""
        hint = f"either this server {_OFF[engine]}, or the scrape was filtered"
    raise InputError(f"{scrape.name} {what}", hint=hint)


def _server(labels: Labels) -> Labels:
    """The labels that tell servers and their engines apart."""
    return tuple(one for one in labels if one[0] in ("instance", "pod", "ReplicaId", "engine"))


def _counter_figures(scrape: Scrape, model: str, named: Named) -> dict[str, Any] | None:
    """Figures of vLLM or llama.cpp, None without rounds."""
    totals = [sum(one.count() for one in named.get(_STEM + name, ())) for name in _TOTALS]
    by_position: Counter[int] = Counter()
    for sample in named.get(_STEM + _BY_POSITION, ()):
        position = dict(sample.labels).get("position", "")
        if not position.isdecimal():
            raise sample.spot.refuse(
                f'the label position is {position[:40]!r}, not "0", "1", ...', "scrape again"
            )
        by_position[int(position)] += sample.count()
    drafts, drafted, accepted = totals
    if not drafts:
        return None
    positions = sorted(by_position)
    at_least = [by_position[position] for position in positions]
    rules = {
        "a counter is missing": all(_STEM + name in named for name in _TOTALS),
        "positions have a gap": positions == [*range(len(positions))],
        "a position is accepted more often than the one before": [drafts, *at_least]
        == sorted([drafts, *at_least], reverse=True),
        "positions do not add up to the accepted tokens": not at_least or sum(at_least) == accepted,
        "more tokens are accepted than drafted": accepted <= drafted,
    }
    if broken := [rule for rule, holds in rules.items() if not holds]:
        shown = dict(zip(_TOTALS, totals, strict=True))
        raise InputError(
            f"{scrape.name}, model {model!r}: {broken[0]} ({shown}, by position {at_least[:8]})",
            hint="scrape again, all of a page",
        )
    servers = {_server(sample.labels) for sample in named[_STEM + "num_drafts"]}
    is_short = drafted < _WHOLE * drafts * len(at_least)
    figures = chain_figures(
        drafts,
        at_least,
        drafted,
        accepted,
        is_ragged=drafted != drafts * len(at_least),
        ends_alike=scrape.engine == "llamacpp",
        not_known=[
            *[f"why {drafted / drafts:.1f} of {len(at_least)} tokens were drafted a round"]
            * is_short,
            UNKNOWN_BATCHES,
        ],
    )
    return {"num_engines": len(servers), **figures}


def _sglang_figures(scrape: Scrape, model: str, named: Named) -> dict[str, Any] | None:
    """Figures of SGLang, None without rounds."""

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
    return facts | mean_figures(mean, depth, why, unknown)
