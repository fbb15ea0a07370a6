"""A summary of `specctl import` as text: what was read, acceptance, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specctl.engines.lengths import length_lines
from specctl.formatting import Table, count, listed
from specctl.logs.advice import NOT_BY_CONTEXT
from specctl.logs.server_log import ENGINES, STOP


def describe_summary(summary: dict[str, Any]) -> list[Any]:
    """Tables and sentences for each model, log or draft length of a summary."""
    parts: list[Any] = []
    for name, figures in summary.get("models", {"": summary}).items():
        read = _read_words(summary, name, figures)
        if name in summary.get("for_clock", []):
            shares = ", ".join(f"{share:.3f}" for share in figures.get("marginal_prob", ()))
            tau = _range(figures["mean_acceptance_length_range"], ".3f")
            accepted = f"accepted by position {shares}, τ {tau}" if shares else f"τ {tau}"
            parts.append(f"{read}; {accepted}; read for the time of its steps.")
            continue
        parts += [read, _acceptance(figures)]
        *said, unknown = figures["meaning"]
        parts += said
        if figures["best_lengths"]:
            parts.append(_what_to_do(figures))
        if figures["schedule"]:
            most = figures["best_lengths"][-1]["batch_size"]
            stop = {name: found[-1] for name, found in figures.get("settings", {}).items()}
            parts += length_lines(summary["engine"], figures["schedule"], most, stop)
        if figures["by_context"]:
            parts.append(_by_context(figures))
        parts.append(unknown)
    if speeds := summary.get("request_speeds"):
        parts.append(_request_speeds(speeds))
    parts += [*summary.get("taken", []), *summary.get("comparison", [])]
    timed = summary.get("for_clock", [])
    parts += [
        f"{name}: without drafts" + ("; read for the time of its steps." if name in timed else ".")
        for name in summary.get("without_drafts", [])
    ]
    left_out = [
        f"Left out {count(one['lines'], 'line')}: {'it' if one['lines'] == 1 else 'each'} "
        f"{one['reason']} (first: {one['first']})."
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
        *(method or []),
        count(depth, "draft token") if depth else "draft length not known",
        *(f"{key}={'/'.join(settings[key])}" for key in STOP if key in settings),
    ]
    amounts = [
        count(figures[f"num_{noun}s"], noun)
        for noun in ("request", "interval", "round")
        if figures.get(f"num_{noun}s")
    ]
    if when := figures.get("counted"):
        amounts.append(when)
    if figures.get("from"):
        amounts.append(f"{figures['from']} to {figures['to']}")
    source = figures.get("source", summary["source"])
    where = name if name.startswith(source) else f"{source}, {name}" if name else source
    return f"{where}: {', '.join(said)}; {', '.join(amounts)}"


def _acceptance(figures: dict[str, Any]) -> Table | str:
    sweep = figures["fixed_length_sweep"]
    if sweep is None:
        return f"Mean acceptance length {_range(figures['mean_acceptance_length_range'], '.3f')}"
    rows, ends = [], figures.get("marginal_interval")
    basis = f"Intervals {figures['interval_basis']}; " if ends else ""
    for place, chain in enumerate(sweep["chains"]):
        shares = [
            "-"
            if (found := figures.get(key)) is None or found[place] is None
            else f"{found[place]:.3f}"
            for key in ("marginal_prob", "conditional_prob")
        ]
        interval = f"{ends[place][0]:.3f} to {ends[place][1]:.3f}" if ends else "-"
        tau = _range(chain["mean_acceptance_length_range"], ".3f")
        rows.append((str(chain["num_draft_tokens"]), shares[0], interval, shares[1], tau))
    return Table(
        "Acceptance by position",
        ("draft token", "accepted", "95% interval", "of those reached", "τ up to here"),
        rows,
        f"{basis}τ {sweep['basis']}.",
    )


def _what_to_do(figures: dict[str, Any]) -> Table:
    sweep = figures["fixed_length_sweep"]
    rows, depth = [], len(sweep["chains"])
    for one in figures["best_lengths"]:
        gain, ends = _of_best(one, "over_plain_range", ".2f"), one["over_plain_interval"]
        gain = (f"x {gain}" if gain else "-") + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")
        cells = [str(one["batch_size"]), _lengths(one), gain]
        if sweep["is_exact"]:  # one length is the best
            [best], rates = one["num_draft_tokens"], one["tokens_per_s_range"]
            cells.append(f"x {rates[best][0] / rates[depth][0]:.2f}" if rates[depth] else "-")
        rows.append((*cells, _of_best(one, "tokens_per_s_range", ",.0f")))
    now = [f"over the log's {depth}"] * sweep["is_exact"]
    return Table(
        f"What to do, on {figures['clock']}",
        ("requests", "best length", "over plain decoding", *now, "tokens/s of all"),
        rows,
    )


def _request_speeds(speeds: Sequence[dict[str, Any]]) -> Table:
    rows, why = [], list[str]()
    for one in speeds:
        over, ends = one["over_plain"], one["over_plain_interval"]
        gain = "-" if over is None else f"x {over:.2f}"
        gain += f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else ""
        load = one["at_a_time"]
        if one["other_loads"]:
            others = listed(str(other or "unknown") for other in one["other_loads"])
            why.append(
                f"{one['log']} has no ratio: it has {load or 'unknown'} at a time, and "
                f"the logs without drafts {others}."
            )
        said = str(one["num_requests"]), str(load or "-"), f"{one['tokens_per_s']:,.0f}"
        rows.append((one["log"], *said, gain))
    return Table(
        "Measured speed of a request, behind its first token",
        ("log", "requests", "at a time", "tokens/s", "over plain decoding"),
        rows,
        " ".join(
            [
                *["Compare logs of the same prompts."] * any(one["over_plain"] for one in speeds),
                *why,
            ]
        ),
    )


def _by_context(figures: dict[str, Any]) -> Table:
    rows, loads = [], [one["batch_size"] for one in figures["best_lengths"] or ()]
    for part in figures["by_context"]:
        low, high = part["context_tokens"]
        best = part.get("best_lengths") or ()
        cells = [_lengths(one) for one in best] or ["-"] * len(loads)
        tau = _range(part["mean_acceptance_length_range"], ".2f")
        rows.append((f"{low:,.0f} to {high:,.0f}", str(part["num_lines"]), tau, *cells))
    return Table(
        "Best length by context",
        ("tokens of text", "lines", "τ", *(f"at {load}" for load in loads)),
        rows,
        NOT_BY_CONTEXT if len({row[3:] for row in rows}) > 1 else "",
    )


def _lengths(best: dict[str, Any]) -> str:
    lengths = best["num_draft_tokens"]
    return "off" if lengths == [0] else " or ".join(map(str, lengths))


def _range(found: Sequence[float], digits: str) -> str:
    """`2.10`, or `1.90 to 2.10` if the ends differ in these digits."""
    low, high = (f"{end:{digits}}" for end in found)
    return low if low == high else f"{low} to {high}"


def _of_best(best: dict[str, Any], key: str, digits: str) -> str:
    """A figure of the best lengths: `2.27`, or `1.91 to 2.23` of several; empty if unknown."""
    ranges = [best[key][length] for length in best["num_draft_tokens"]]
    if None in ranges:
        return ""
    return _range((min(low for low, _ in ranges), max(high for _, high in ranges)), digits)
