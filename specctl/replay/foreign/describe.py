"""What an import gave, for a person."""

from __future__ import annotations

from typing import Any

from specctl.artifacts.describe import Description
from specctl.replay.foreign.batches import simulate_batches
from specctl.replay.foreign.importer import Imported
from specctl.replay.foreign.schedules import Oracle
from specctl.replay.foreign.traces import ImportedTraces

Rows = tuple[tuple[str, ...], ...]


def describe_import(imported: Imported) -> tuple[Description, ...]:
    """One description, or one for each model of a scrape."""
    if imported.traces is not None:
        return (describe_traces(imported.traces),)
    summary = imported.summary or {}
    title = f"summary of {imported.format}"
    if "by_category" in summary:
        return (_answers(title, summary),)
    models = summary.get("models", {"": summary})
    return tuple(
        _counters(f"{title} {name}".strip(), figures, summary) for name, figures in models.items()
    )


def describe_traces(traces: ImportedTraces) -> Description:
    """An import folder that can be replayed."""
    header = traces.header
    facts = (
        ("source", f"{header.source_name}  {header.source_digest}"),
        (
            "requests",
            f"{header.num_requests} ({header.num_without_rounds} without rounds left out)",
        ),
        ("positions", f"{header.num_positions} ({header.num_cut_tokens} tokens cut off)"),
        ("entry i drafts", "token i" if header.entry_predicts == "same" else "token i + 1"),
    )
    columns = ("drafter", "offered depth", "τ at that depth", "censored", "misaligned entries")
    rows = tuple(_drafter(traces, name) for name in traces.drafters)
    return Description(f"imported traces {traces.digest}", facts, columns, rows)


def _drafter(traces: ImportedTraces, name: str) -> tuple[str, ...]:
    drafter = traces.header.drafters[name]
    inferred = " (inferred)" if drafter.offered_depth_inferred else ""
    share = sum(drafter.misaligned.values()) / max(drafter.num_entries, 1)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(drafter.misaligned.items()))
    return (
        name,
        f"{drafter.offered_depth}{inferred}",
        f"{simulate_batches(traces, name, Oracle()).mean_acceptance_length:.3f}",
        f"{drafter.num_censored / traces.positions.num_rows:.2%} of positions",
        f"{share:.2%}" + (f": {kinds}" if kinds else ""),
    )


def _answers(title: str, summary: dict[str, Any]) -> Description:
    columns = ("group", "questions", "rounds", "tokens", "τ pooled", "τ by question", "tokens/s")
    groups = {"all": summary["all"], **summary["by_category"]}
    rows = tuple(
        (
            name,
            str(figures["num_questions"]),
            str(figures["num_rounds"]),
            str(figures["num_tokens"]),
            f"{figures['mean_acceptance_length']:.3f}",
            f"{figures['mean_of_question_means']:.3f}",
            f"{figures['tokens_per_s']:.1f}",
        )
        for name, figures in groups.items()
    )
    return Description(title, (_not_replayed(summary),), columns, rows)


def _counters(title: str, figures: dict[str, Any], summary: dict[str, Any]) -> Description:
    plain = {k: v for k, v in figures.items() if isinstance(v, int | float) and k != "replayable"}
    facts = tuple((name.removeprefix("num_"), f"{value:.6g}") for name, value in plain.items())
    sweep = figures.get("fixed_length_sweep")
    basis = (("fixed-length τ", sweep["basis"]),) if sweep else ()
    columns = ("draft token", "marginal", "conditional", "τ if the chain ended here")
    rows = _positions(figures, sweep) if sweep else ()
    return Description(title, (*facts, *basis, _not_replayed(summary)), columns, rows)


def _positions(figures: dict[str, Any], sweep: dict[str, Any]) -> Rows:
    return tuple(
        (
            str(index),
            f"{marginal:.4f}",
            "-" if conditional is None else f"{conditional:.4f}",
            f"{chain['mean_acceptance_length']:.3f}",
        )
        for index, (marginal, conditional, chain) in enumerate(
            zip(
                figures["marginal_prob"],
                figures["conditional_prob"],
                sweep["chains"],
                strict=True,
            ),
            start=1,
        )
    )


def _not_replayed(summary: dict[str, Any]) -> tuple[str, str]:
    return ("not replayed", summary["why_not_replayed"])
