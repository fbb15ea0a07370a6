"""`specctl import`: logs and metrics of servers as figures, and sentences on their meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.errors import InputError, UsageError
from specctl.formatting import listed
from specctl.logs.acceptance_figures import narrowed
from specctl.logs.advice import Advice, explain
from specctl.logs.comparing import compared, servers, without_repeats
from specctl.logs.foreign import foreign
from specctl.logs.llamacpp_log import LlamacppLog, answers
from specctl.logs.metric_figures import figures_by_model
from specctl.logs.moments import oldest_first
from specctl.logs.own_clock import held_against, own_advices
from specctl.logs.pooling import grouped, pooled
from specctl.logs.request_speeds import request_speeds
from specctl.logs.scrapes import Scrape, json_records, json_scrapes
from specctl.logs.server_log import ENGINES, Interval, ServerLog
from specctl.logs.sglang_log import SglangLog
from specctl.logs.sources import Source, text_lines
from specctl.logs.vllm_log import VllmLog
from specctl.logs.wrappers import engine_lines


def read(source: Source) -> list[ServerLog] | list[Scrape]:
    """The log or the scrapes of a source, whatever wraps them.

    Raises:
        InputError: none is there; the sentence says what it is.
    """
    readers = [made(source.name) for made in (VllmLog, SglangLog, LlamacppLog)]
    for line in oldest_first(engine_lines(source)):
        for reader in readers:
            reader.take(line)
    logs = [reader.close() for reader in readers]
    found = [log for log in logs if log.intervals]
    if len(found) > 1:
        names = listed(ENGINES[log.engine] for log in found)
        raise InputError(f"{source.name} has lines of {names}", hint="give each server's log alone")
    if found := found or [log for log in logs if log.has_lines or log.left_out or log.settings]:
        return found[:1]
    lines = list(text_lines(source))
    scrape = Scrape.of_lines(source.name, lines)
    if scrape.samples:
        return [scrape]
    records = json_records("".join(line for _, line in lines))
    if scrapes := json_scrapes(source.name, records):
        return scrapes
    if records and all(isinstance(one, dict) and "timings" in one for one in records):
        return [answers(source.name, records)]
    head = "".join(line for _, line in lines[:200])
    raise foreign(source.name, head, is_json=bool(records))


# --------------------------------------------------------------------------- one summary


def import_files(
    sources: Sequence[Source], advice: Advice | None = None, batch_sizes: Sequence[int] = (1,)
) -> dict[str, Any]:
    """The summary of logs, each with figures of its own, or of one scrape or the window between
    two.

    Args:
        advice: of a cost model; without one, logs of several draft lengths of a drafter are a
            clock of their own, at `batch_sizes`.

    Returns:
        `format`, `engine`, facts of the log's start, `left_out`, and figures: at the top, or by
        model, log or draft length in `models`.

    Raises:
        InputError: a source that cannot be read, or sources that do not go together.
    """
    found = [one for source in sources for one in read(source)]
    logs = [one for one in found if isinstance(one, ServerLog)]
    scrapes = [one for one in found if isinstance(one, Scrape)]
    engines = {ENGINES[log.engine] for log in logs}
    if (logs and scrapes) or len(engines) > 1:
        raise InputError(
            f"{listed([source.name for source in sources])} do not go together"
            + (f": logs of {listed(sorted(engines))}" if len(engines) > 1 else ""),
            hint="give logs of one engine, or two scrapes of one server, the earlier one first",
        )
    if scrapes:
        return _explained(_of_scrapes(scrapes), advice)
    has_drafts = any(log.intervals for log in logs)
    for log in logs:
        is_plain = has_drafts and log.plain and not log.left_out
        if log.settings.get("synthetic") or not (log.intervals or is_plain):
            raise log.refusal()
    logs, told = without_repeats(logs)
    together, taken = servers(logs)
    of_logs = {**_of_logs(logs), "request_speeds": request_speeds(logs, together)}
    if advice is not None:
        _check_context(advice.context_tokens, logs)
        return {**_explained(of_logs, held_against(advice, logs)), "taken": told}
    own = own_advices(together, batch_sizes)
    summary = _explained(of_logs, None, own)
    timed = {log.name for server in together if server[0].name in own for log in server}
    plain = [name for name in summary["without_drafts"] if name in timed]
    for_clock = [*summary.get("for_clock", ()), *plain]
    return {**summary, "for_clock": for_clock, "taken": [*told, *taken]}


def _check_context(tokens: float, logs: Sequence[ServerLog]) -> None:
    for log in logs:
        longest = max(map(int, log.settings.get("max_seq_len", ())), default=tokens)
        if tokens > longest:
            raise UsageError(
                f"--context-tokens {tokens:.0f} is more than the server of {log.name} takes: "
                f"max_seq_len={longest:.0f}",
                hint="give the usual text of a request",
            )


def _of_scrapes(scrapes: Sequence[Scrape]) -> dict[str, Any]:
    if len(scrapes) > 2:
        raise InputError(
            f"{len(scrapes)} scrapes, and a window has two ends",
            hint="give two scrapes of one server, the earlier one first, and those of "
            "different servers each alone",
        )
    scrape = scrapes[0] if len(scrapes) == 1 else scrapes[1].since(scrapes[0])
    since = (
        f"counted from {scrape.name}" if scrape.is_window else "counted since the server's start"
    )
    models = figures_by_model(scrape)
    return {
        "format": f"{scrape.engine}-prometheus",
        "engine": scrape.engine,
        "source": scrape.name,
        "models": {name: {**own, "counted": since} for name, own in models.items()},
    }


def _of_logs(logs: Sequence[ServerLog]) -> dict[str, Any]:
    engine, names = logs[0].engine, [log.name for log in logs]
    models: dict[str, dict[str, Any]] = {}
    lines: dict[str, list[Interval]] = {}
    for log in logs:
        groups = grouped(log)
        for name, intervals in groups.items():
            of_log = [log.name] if len(logs) > 1 else []
            label = ", ".join([*of_log, *([name] if len(groups) > 1 or not of_log else [])])
            said = {"source": log.name, "settings": log.settings_of(intervals)}
            lines[label] = intervals
            models[label] = {**said, **pooled(log, intervals)}
    summary: dict[str, Any] = {
        "format": f"{engine}-{logs[0].form}",
        "engine": engine,
        "source": listed(names),
        "without_drafts": [log.name for log in logs if not log.intervals],
        "left_out": [
            {"reason": reason, "lines": count, "first": str(log.first_left_out[reason])}
            for log in logs
            for reason, count in log.left_out.items()
        ],
    }
    if len(models) == 1:
        return {**summary, **next(iter(models.values()))}
    return {**summary, "models": models, "comparison": compared(engine, models, lines)}


def _explained(
    summary: dict[str, Any], advice: Advice | None, own: Mapping[str, Advice] | None = None
) -> dict[str, Any]:
    """The summary with advice, or with the logs' own, by log, for a drafter's longest drafts."""
    models, own = summary.get("models"), own or {}
    if models is None:
        return explain(summary, advice or next(iter(own.values()), None))
    sweeps = {name: of["fixed_length_sweep"] for name, of in models.items()}
    lengths = {name: len(sweep["chains"]) if sweep else 0 for name, sweep in sweeps.items()}

    def of_log(name: str) -> Advice | None:
        return own.get(models[name].get("source", ""))

    explained, for_clock = dict[str, dict[str, Any]](), list[str]()
    for name, figures in models.items():
        mine = of_log(name)
        together = [other for other in models if of_log(other) is mine]
        longest = max(lengths[other] for other in together)
        if mine and lengths[name] < longest:
            for_clock.append(name)
        elif mine and longest and not sweeps[name]["is_exact"]:
            measured = {
                lengths[other]: sweeps[other]["chains"][-1]["mean_acceptance_length_range"]
                for other in together
                if 0 < lengths[other] < longest
            }
            if measured:
                figures = {**figures, "fixed_length_sweep": narrowed(sweeps[name], measured)}
        given = advice or (None if name in for_clock else mine)
        has_prices = not (mine or (summary.get("comparison") and len({*lengths.values()}) == 1))
        explained[name] = explain(figures, given, has_prices=has_prices)
    return {**summary, "models": explained, "for_clock": for_clock}
