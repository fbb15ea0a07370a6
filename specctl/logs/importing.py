"""`specctl import`: logs and metrics of servers as figures, and sentences on their meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from specctl.errors import InputError
from specctl.formatting import listed
from specctl.logs.acceptance_figures import NOT_REPLAYED, mean_figures
from specctl.logs.advice import Advice, explain
from specctl.logs.foreign import foreign_record, foreign_text
from specctl.logs.llamacpp_log import LlamacppLog
from specctl.logs.metric_figures import figures_by_model
from specctl.logs.own_clock import own_advice
from specctl.logs.pooling import grouped, pooled
from specctl.logs.scrapes import METRIC, Scrape, json_documents, json_scrapes
from specctl.logs.server_log import ServerLog
from specctl.logs.sglang_log import SglangLog
from specctl.logs.sources import Source, Spot, text_lines
from specctl.logs.vllm_log import VllmLog
from specctl.logs.wrappers import engine_lines

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}


@dataclass
class Reading:
    """One source: a log, or scrapes, or answers."""

    name: str
    log: ServerLog | None = None
    nothing: InputError | None = None  # why the log has no interval with drafts
    scrapes: list[Scrape] = field(default_factory=list)
    answers: dict[str, Any] | None = None


def read(source: Source) -> Reading:
    """The log or the metrics of a source, whatever wraps them.

    Raises:
        InputError: neither is there; the sentence says what it is.
    """
    readers = VllmLog(), SglangLog(), LlamacppLog()
    for line in engine_lines(source):
        any(reader.take(line) for reader in readers)
    found = [one for one in readers if one.log.intervals]
    if len(found) > 1:
        names = listed(ENGINES[one.log.engine] for one in found)
        raise InputError(f"{source.name} has lines of {names}", hint="give each server's log alone")
    # `eval time` stands in other logs of llama.cpp too, so that it does not tell by itself.
    told = found or [one for one in readers if one.log.num_plain or one.log.left_out]
    told = told or [one for one in readers if one.log.settings]
    if told:
        [reader, *_] = told
        nothing = None if found else reader.nothing(source.name)
        return Reading(source.name, log=reader.log, nothing=nothing)
    scrape = Scrape.of_lines(source.name, _metric_lines(source))
    if scrape.samples:
        return Reading(source.name, scrapes=[scrape])
    if reading := _from_json(source):
        return reading
    raise foreign_text(source.name, [line for _, line in islice(text_lines(source), 200)])


def _metric_lines(source: Source) -> Iterator[tuple[Spot, str]]:
    return ((spot, line) for spot, line in text_lines(source) if METRIC.match(line))


def _from_json(source: Source) -> Reading | None:
    """Scrapes or answers in JSON; None for a text that is none.

    Raises:
        InputError: JSON of another tool.
    """
    name, lines = source.name, [line for _, line in text_lines(source)]
    documents = json_documents("".join(lines))
    if not documents:
        return None
    document = documents[0] if len(documents) == 1 else documents
    if (scrapes := json_scrapes(name, document)) is not None:
        if not any(scrape.samples for scrape in scrapes):
            raise InputError(
                f"{name} has series of no engine that is read",
                hint='query the counters themselves: {__name__=~"vllm:spec_decode_.+"}',
            )
        return Reading(name, scrapes=scrapes)
    records = document if isinstance(document, list) else [document]
    if all(isinstance(one, dict) and "timings" in one for one in records):
        return Reading(name, answers=_answers(name, records))
    if error := foreign_record(name, records[0] if records else None):
        raise error
    return None


def _answers(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures over completions of llama.cpp, from their `timings`.

    A request emits `predicted_n` - 1 tokens in rounds, and each round one more than it accepts, but
    a last one whose last draft token is the stop token.
    """
    sums = {"predicted_n": 0, "draft_n": 0, "draft_n_accepted": 0}
    for number, record in enumerate(records, start=1):
        timings = record["timings"]
        for key in sums:
            value = timings.get(key) or 0 if isinstance(timings, dict) else None
            if not isinstance(value, int) or value < 0:
                raise Spot(name, number).refuse(
                    f"timings of an answer without a count {key}",
                    "keep one answer of /v1/completions or /completion a line",
                )
            sums[key] += max(value - 1, 0) if key == "predicted_n" else value
    tokens, drafted, accepted = sums.values()
    if not drafted or tokens <= accepted:
        raise InputError(
            f"{name}: its {len(records)} answers have no draft tokens",
            hint="keep the answers of a server that drafts (--spec-type)",
        )
    mean = tokens / (tokens - accepted + len(records)), tokens / (tokens - accepted)
    facts = {
        "num_requests": len(records),
        "num_tokens": tokens,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
    }
    why = "answers do not state the draft length: import the server's metrics or log"
    return mean_figures((max(mean[0], 1.0), mean[1]), None, why, [], facts)


# --------------------------------------------------------------------------- one summary


def import_files(
    sources: Sequence[Source], advice: Advice | None = None, batch_sizes: Sequence[int] = (1,)
) -> dict[str, Any]:
    """The summary of logs, each with figures of its own, of one scrape or of the window between
    two, or of answers.

    Args:
        advice: of a cost model; without one, logs of several draft lengths are a clock of their
            own, at `batch_sizes`.

    Returns:
        `format`, `engine`, facts of the log's start, `left_out`, and figures: at the top, or by
        model, log or draft length in `models`.

    Raises:
        InputError: a source that cannot be read, or sources that do not go together.
    """
    readings = [read(source) for source in sources]
    scrapes = [scrape for one in readings for scrape in one.scrapes]
    if scrapes and len(readings) == sum(bool(one.scrapes) for one in readings):
        return _explained(_of_scrapes(scrapes), advice)
    if len(readings) == 1 and readings[0].answers is not None:
        [one] = readings
        summary = {"format": "llamacpp-answers", "engine": "llamacpp", **(one.answers or {})}
        return _explained(summary, advice)
    logs = [one.log for one in readings if one.log is not None]
    if len(logs) < len(readings):
        raise InputError(
            f"{listed(one.name for one in readings)} do not go together",
            hint="give logs, or two scrapes of one server, the earlier one first",
        )
    engines = {log.engine for log in logs}
    if len(engines) > 1:
        raise InputError(
            f"logs of {listed(sorted(ENGINES[name] for name in engines))}",
            hint="give logs of one engine",
        )
    has_drafts = any(log.intervals for log in logs)
    for one, log in zip(readings, logs, strict=True):
        if one.nothing and not (has_drafts and log.plain and not log.left_out):
            raise one.nothing
    summary = _of_logs(readings)
    if advice is None and (own := own_advice(logs, batch_sizes)):
        return _explained(summary, own, only_longest=True)
    return _explained(summary, advice)


def _of_scrapes(scrapes: Sequence[Scrape]) -> dict[str, Any]:
    if len(scrapes) > 2:
        raise InputError(
            f"{len(scrapes)} scrapes, and a window has two ends",
            hint="give two scrapes of one server, the earlier one first",
        )
    scrape = scrapes[0] if len(scrapes) == 1 else scrapes[1].since(scrapes[0])
    models = figures_by_model(scrape)
    engine = next(iter(models.values()))["engine"]
    since = f"from {scrapes[0].name} to {scrapes[1].name}" if scrape.is_window else SINCE_START
    return {
        "format": f"{engine}-prometheus",
        "engine": engine,
        "source": scrape.name,
        "models": {name: {**own, "counted": since} for name, own in models.items()},
    }


SINCE_START = "since the server's start"


def _of_logs(readings: Sequence[Reading]) -> dict[str, Any]:
    logs = [one.log for one in readings if one.log is not None]
    engine = logs[0].engine
    models: dict[str, dict[str, Any]] = {}
    for one, log in zip(readings, logs, strict=True):
        groups = grouped(log)
        for name, intervals in groups.items():
            of_log = [one.name] if len(logs) > 1 else []
            label = ", ".join([*of_log, *([name] if len(groups) > 1 or not of_log else [])])
            said = {"engine": engine, "source": one.name, "settings": log.settings}
            models[label] = {**said, **pooled(log, intervals)}
    summary: dict[str, Any] = {
        "format": f"{engine}-log",
        "engine": engine,
        "source": listed(one.name for one in readings),
        "without_drafts": [one.name for one in readings if one.nothing],
        "left_out": [
            {"reason": reason, "lines": count, "first": str(log.first_left_out[reason])}
            for log in logs
            for reason, count in log.left_out.items()
        ],
    }
    if len(models) == 1:
        [figures] = models.values()
        return {**figures, **summary}
    return {**summary, "models": models, "comparison": _compared(models)}


def _compared(models: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence on the means of two logs or runs of one draft length."""
    if len(models) != 2:
        return []
    (one, first), (other, second) = models.items()
    lengths = {len(own.get("marginal_prob", ())) for own in models.values()}
    lengths |= {own.get("num_draft_tokens_per_round", 0) for own in models.values()}
    if len(lengths - {0}) != 1 or None in lengths:
        return []
    before, after = (
        own.get("mean_acceptance_length") or own["mean_of_interval_means"]
        for own in (first, second)
    )
    ends = [own["mean_interval"] for own in (first, second) if "mean_interval" in own]
    line = f"{other} against {one}: τ {after:.2f} against {before:.2f}"
    if len(ends) < 2:
        return [f"{line} (too few lines to tell from chance)."]
    half = sum(((high - low) / 2) ** 2 for low, high in ends) ** 0.5
    low, high = after - before - half, after - before + half
    verdict = (
        "no difference beyond chance"
        if low < 0 < high
        else ("a fall" if after < before else "a rise")
    )
    return [f"{line}, {verdict}: {after - before:+.2f}, 95% interval {low:+.2f} to {high:+.2f}."]


def _explained(
    summary: dict[str, Any], advice: Advice | None, *, only_longest: bool = False
) -> dict[str, Any]:
    """The summary with advice; only for the longest drafts where all logs are of one server."""
    models = summary.get("models")
    if models is None:
        return {**NOT_REPLAYED, **explain(summary, advice)}
    sweeps = {name: own["fixed_length_sweep"] for name, own in models.items()}
    lengths = {name: len(sweep["chains"]) if sweep else 0 for name, sweep in sweeps.items()}
    asked = {name: not only_longest or of == max(lengths.values()) for name, of in lengths.items()}
    return {
        **NOT_REPLAYED,
        **summary,
        "models": {
            name: explain(own, advice if asked[name] else None) for name, own in models.items()
        },
    }
