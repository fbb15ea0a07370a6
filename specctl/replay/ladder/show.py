"""The ladder as a table, and the sentences that a reader needs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.replay.ladder.build import Ladder
from specctl.replay.ladder.result import LadderResult
from specctl.replay.ladder.rungs import Rung
from specctl.stats import Interval

COLUMNS = (
    "rung",
    "calls",
    "verified",
    "levels",
    "time (s)",
    "τ",
    "tokens/s",
    "× static",
    "gap closed",
)
BEYOND = ("plain", "clairvoyant", "ceiling")
"""Rungs below or above the gap, of which no share is told."""
WORTHWHILE = 0.03
"""Headroom under which tuning policies is not worth the work (notes/state-of-the-art.md, 7)."""


def ladder_table(result: LadderResult) -> Any:
    """A rich renderable: one row a rung, from plain decoding to the ceiling."""
    from rich.table import Table

    table = Table(title=title(result), title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "rung" else "right", overflow="fold")
    for rung in result.ladder.rungs:
        table.add_row(*_cells(rung))
    return table


def title(result: LadderResult) -> str:
    """What the figures hold for."""
    facts, ladder = result.facts, result.ladder
    law = facts["sampling"]["temperature"]
    note = ""
    if str(facts["target"]).startswith("embedded"):
        note = "; the embedded pair is a fixture, no claim about large models"
    return (
        f"{facts['target']} + {facts['drafter']}, batch {ladder.batch_size}, "
        f"{f'temperature {law}' if law else 'greedy'}: {ladder.rungs[0].num_tokens} tokens of "
        f"{ladder.num_prompts['held_out']} held-out prompts, 95% intervals by prompt{note}"
    )


def _cells(rung: Rung) -> list[str]:
    mark = "*" if rung.is_marked else ""
    return [
        rung.label + mark + (" (estimate)" if rung.is_estimate else ""),
        str(rung.calls),
        str(rung.verified_tokens),
        str(rung.drafted_levels),
        f"{rung.time_us / 1e6:.2f}",
        f"{rung.mean_acceptance_length.value:.2f}",
        _span(rung.tokens_per_s, ".0f"),
        _span(rung.against_static, ".2f"),
        _share(rung),
    ]


def _share(rung: Rung) -> str:
    """Gap closed; how many gaps a rung stands below the static one says nothing."""
    if rung.gap_closed is None or rung.kind in BEYOND:
        return "-"
    return "below static" if rung.gap_closed.high < 0 else _span(rung.gap_closed, ".0%")


def notes(result: LadderResult) -> list[str]:
    """What was tuned, what is lost where, what is an estimate, what the log does not tell."""
    ladder = result.ladder
    return [*_tuned(ladder), _headroom(ladder), _losses(ladder), _fits(ladder), *_marks(ladder)]


def _tuned(ladder: Ladder) -> Iterator[str]:
    yield (
        f"× static is relative to {ladder.best_static}, the faster static rung on the "
        f"{ladder.num_prompts['train']} training prompts."
    )
    for rung in ladder.rungs:
        if rung.kind not in ("plain", "policy"):
            yield f"{rung.label}: {rung.setting}."


def _headroom(ladder: Ladder) -> str:
    lead = ladder.split.headroom
    said = f"Headroom, R_prob over the best static rung: {_span(lead, '+.1%')}."
    if lead.low <= 0:
        return f"{said} The data do not show any, so no share of it is given."
    if lead.high < WORTHWHILE:
        return f"{said} Under {WORTHWHILE:.0%}: a better drafter is worth more than a policy."
    return said


def _losses(ladder: Ladder) -> str:
    parts = [
        f"irreducible {_span(ladder.split.irreducible, '.0f')}",
        f"drafter {_span(ladder.split.drafter, '.0f')}",
    ]
    parts += [
        f"policy regret of {rung.label} {_span(rung.policy_regret, '.0f')}"
        for rung in ladder.rungs
        if rung.policy_regret is not None and rung.kind != "plain"
    ]
    return f"Lost tokens/s: {'; '.join(parts)}."


def _fits(ladder: Ladder) -> str:
    parts = [
        f"{name} log-loss {q.log_loss:.4f} nats, ECE {q.calibration_error:.4f}"
        for name, q in ladder.calibration.items()
    ]
    law = (
        "the target's law at depth 1 and a cross-fitted estimate below"
        if ladder.is_sampled
        else "a cross-fitted estimate, since a greedy law is 0 or 1"
    )
    num_nodes = ladder.calibration["oracle"].num_nodes
    return f"On {num_nodes} held-out nodes: {'; '.join(parts)}. R_prob uses {law}."


def _marks(ladder: Ladder) -> Iterator[str]:
    for rung in ladder.rungs:
        if rung.is_marked:
            yield (
                f"* {rung.label}: the log tells {rung.support:.1%} of what it asks; "
                "specctl replay gives bounds."
            )


def _span(interval: Interval, form: str) -> str:
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
