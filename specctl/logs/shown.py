"""A summary of `specctl import` as text: what was read, acceptance, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specctl.formatting import Table, count, listed
from specctl.logs.advice import gain_words, mean_of, shown_range
from specctl.logs.server_log import ENGINES


def describe_summary(
    summary: dict[str, Any], settings: Callable[[str, Any, int], list[str]]
) -> list[Any]:
    """Tables and sentences for each model, log or draft length of a summary.

    Args:
        settings: an engine's settings for a schedule of lengths up to a load, in sentences.
    """
    parts: list[Any] = []
    for name, figures in summary.get("models", {"": summary}).items():
        parts += [_read_words(summary, name, figures), _acceptance(figures)]
        *said, unknown = figures["meaning"]
        parts += said
        if figures["best_lengths"]:
            parts.append(_what_to_do(figures))
        if figures["schedule"]:
            most = figures["best_lengths"][-1]["batch_size"]
            parts += settings(summary["engine"], figures["schedule"], most)
        parts.append(unknown)
    parts += summary.get("comparison", [])
    parts += [
        f"{name}: without drafts, read for the time of plain steps."
        for name in summary.get("without_drafts", [])
    ]
    left_out = [
        f"Left out: {count(one['lines'], 'line')} that {one['reason']} (first: {one['first']})."
        for one in summary.get("left_out", [])
    ]
    return [*parts, *left_out]


def _read_words(summary: dict[str, Any], name: str, figures: dict[str, Any]) -> str:
    """Engine, version, draft length, amount and time."""
    settings = figures.get("settings", {})
    depth = figures.get("num_draft_tokens_per_round") or len(figures.get("marginal_prob", ()))
    method = settings.get("method") or settings.get("method argument")
    said = [
        " ".join([ENGINES[summary["engine"]], *settings.get("version", [])]),
        listed(method) if method else "",
        count(depth, "draft token") if depth else "draft length not known",
    ]
    amounts = [
        count(figures[f"num_{noun}s"], noun)
        for noun in ("request", "interval", "round")
        if figures.get(f"num_{noun}s")
    ]
    amounts.append(figures.get("counted", ""))
    span = f"{figures['from']} to {figures['to']}" if figures.get("from") else ""
    source = summary.get("source", "")
    source = figures.get("source", source)
    where = name if name.startswith(source) else ", ".join(filter(None, (source, name)))
    return f"{where}: {', '.join(filter(None, said))}; {', '.join(filter(None, (*amounts, span)))}"


def _acceptance(figures: dict[str, Any]) -> Table | str:
    sweep = figures["fixed_length_sweep"]
    if sweep is None:
        return f"Mean acceptance length {shown_range(mean_of(figures), '.3f')}"
    rows = []
    for place, chain in enumerate(sweep["chains"]):
        shares = [
            "-"
            if (found := figures.get(key)) is None or found[place] is None
            else f"{found[place]:.3f}"
            for key in ("marginal_prob", "conditional_prob")
        ]
        ends = figures.get("marginal_interval")
        interval = "-" if ends is None else f"{ends[place][0]:.3f} to {ends[place][1]:.3f}"
        tau = shown_range(chain["mean_acceptance_length_range"], ".3f")
        rows.append((str(chain["num_draft_tokens"]), shares[0], interval, shares[1], tau))
    basis = figures.get("interval_basis")
    return Table(
        "Acceptance by position",
        ("draft token", "accepted", "95% interval", "of those reached", "τ up to here"),
        rows,
        f"Intervals {basis}; τ {sweep['basis']}." if basis else f"τ {sweep['basis']}.",
    )


def _what_to_do(figures: dict[str, Any]) -> Table:
    rows = []
    for one in figures["best_lengths"]:
        lengths = one["num_draft_tokens"]
        best = "off" if lengths == [0] else " or ".join(map(str, lengths))
        ends = one["over_plain_interval"]
        gain = gain_words(one) + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")
        speed = shown_range(one["tokens_per_s_range"][lengths[-1]], ",.0f")
        rows.append((str(one["batch_size"]), best, f"x {gain}", speed))
    return Table(
        f"What to do, on {figures['clock']}",
        ("requests", "best length", "over plain decoding", "tokens/s of all"),
        rows,
    )
