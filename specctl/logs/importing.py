"""`specctl import`: a server's log or metrics as a summary and two sentences on its meaning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specctl.artifacts.card import Description
from specctl.logs.acceptance_figures import ChainClock, explain, shown_range
from specctl.logs.engine_summaries import (
    DECODE_MARK,
    LOG_MARK,
    SERVER_ARGS,
    SGLANG,
    THROUGHPUT,
    summarise_counters,
    summarise_engine_log,
    summarise_sglang_counters,
    summarise_sglang_log,
)
from specctl.logs.sources import Source, Spot, text_lines

SUMMARIES: dict[str, Callable[..., dict[str, Any]]] = {
    "vllm-prometheus": summarise_counters,
    "vllm-log": summarise_engine_log,
    "sglang-prometheus": summarise_sglang_counters,
    "sglang-log": summarise_sglang_log,
}
LINES: dict[str, Callable[[str], bool]] = {
    "vllm-prometheus": lambda line: line.startswith("vllm:"),
    "sglang-prometheus": lambda line: line.startswith(SGLANG),
    "vllm-log": lambda line: LOG_MARK in line or THROUGHPUT in line,
    "sglang-log": lambda line: DECODE_MARK in line or SERVER_ARGS in line,
}
"""Tests of a line, by format."""
FORMATS = ("auto", *SUMMARIES)


def import_file(
    source: str | Path | Source,
    *,
    format: str = "auto",
    clock: ChainClock | None = None,
    load: str = "",
) -> dict[str, Any]:
    """The summary of a server's log or metrics, its `format` first.

    Args:
        source: a file, or the address of a server's `/metrics`.
        format: one of `FORMATS`.
        clock, load: of a cost model, for the best length; see `explain`.

    Raises:
        InputError: the source cannot be read or summarised.
    """
    text = source if isinstance(source, Source) else Source.of(source)
    name = detect_format(text) if format == "auto" else format
    summary = SUMMARIES[name](text)
    models = summary.get("models")
    if models is None:
        summary = explain(summary, clock, load)
    else:
        summary["models"] = {model: explain(models[model], clock, load) for model in models}
    return {"format": name, **summary}


def detect_format(source: Source) -> str:
    """The format of a text, by all of its lines; `InputError` for none or several."""
    first: tuple[Spot, str] | None = None
    formats: dict[str, Spot] = {}
    for spot, line in text_lines(source):
        first = first or (spot, line)
        for name, is_its in LINES.items():
            if name not in formats and is_its(line):
                formats[name] = spot
    if len(formats) > 1:
        one, other = list(formats)[:2]
        raise formats[other].refuse(
            f"a line of {other}, after lines of {one}", "give each server's alone"
        )
    if formats:
        return next(iter(formats))
    spot, line = first or (Spot(source.name, 1), "")
    raise spot.refuse(
        f"{line.strip()[:40]!r} is no line of {', '.join(SUMMARIES)}"
        if line
        else "an empty file has no format",
        "state the format with --format",
    )


# ----------------------------------------------------------------- in words


def describe_summary(summary: dict[str, Any]) -> list[Any]:
    """Figures and two sentences for each model of a summary."""
    title = f"summary of {summary['format']}"
    why_not = ("not replayed", summary["why_not_replayed"])
    parts: list[Any] = []
    for name, figures in summary.get("models", {"": summary}).items():
        parts.append(_describe_rates(f"{title} {name}".strip(), figures, why_not))
        parts += figures["meaning"]
    return parts


def _describe_rates(title: str, figures: dict[str, Any], why_not: tuple[str, str]) -> Description:
    plain = {k: v for k, v in figures.items() if isinstance(v, int | float) and k != "replayable"}
    facts = tuple((name.removeprefix("num_"), f"{value:.6g}") for name, value in plain.items())
    sweep = figures["fixed_length_sweep"]
    if sweep is None:
        return Description(title, (*facts, why_not))
    unknown = [None] * len(sweep["chains"])
    by_position = zip(
        figures.get("marginal_prob", unknown),
        figures.get("conditional_prob", unknown),
        sweep["chains"],
        strict=True,
    )
    rows = tuple(
        (
            str(chain["num_draft_tokens"]),
            *("-" if share is None else f"{share:.4f}" for share in shares),
            shown_range(chain["mean_acceptance_length_range"], ".3f"),
        )
        for *shares, chain in by_position
    )
    how = ", ".join(filter(None, (sweep["if_chains"], sweep["basis"])))
    return Description(title, (*facts, ("fixed-length τ", how), why_not), _RATE_COLUMNS, rows)


_RATE_COLUMNS = ("draft token", "marginal", "conditional", "τ if the chain ended here")
