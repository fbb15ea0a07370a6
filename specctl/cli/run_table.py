"""The table of `specctl run`, its title and the line below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specctl.runtime.conversations import DecodeSettings
    from specctl.runtime.load import Pair


def comparison_table(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """The table of `specctl run`: one row a policy."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for name in (
        "tokens/s",
        "× ar",
        "τ",
        "calls",
        "verified",
        "draft",
        "verify",
        "policy",
        "other",
    ):
        table.add_column(name, justify="right")
    base = next((row["tokens_per_s"] for row in rows if row["policy"] == "ar"), None)
    for row in rows:
        table.add_row(*_cells(row, base))
    return table


def _cells(row: dict[str, Any], base: float | None) -> list[str]:
    wall = row["wall_us"] or 1.0
    shares = [f"{row[f'{phase}_us'] / wall:.0%}" for phase in ("draft", "verify", "policy")]
    other = f"{(row['other_us'] + row['prefill_us']) / wall:.0%}"
    speedup = "-" if base is None else f"{row['tokens_per_s'] / base:.2f}"
    return [
        row["policy"],
        f"{row['tokens_per_s']:.0f}",
        speedup,
        f"{row['mean_acceptance_length']:.2f}",
        str(row["calls"]),
        str(row["verified_tokens"]),
        *shares,
        other,
    ]


def equality_line(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence on whether the texts are plain decoding's."""
    checked = [row for row in rows if row["equal_to_ar"] is not None]
    if not checked:
        return "Equality with ar was not checked: ar is not among the policies."
    wrong = [row for row in checked if not row["equal_to_ar"]]
    if not wrong:
        return "All outputs equal ar's, token for token."
    parts = [f"{row['policy']}: {_explain(row['divergences'])}" for row in wrong]
    return "Outputs that differ from ar's: " + "; ".join(parts)


def _explain(divergences: Sequence[dict[str, Any]]) -> str:
    gaps = [divergence["top2_gap"] for divergence in divergences]
    if None in gaps:
        return f"{len(gaps)} texts (sampling follows the rounding of --dtype; float32 has least)"
    return f"{len(gaps)} texts, top-2 logit gap at most {max(gaps):.2g}"


def run_title(pair: Pair, num_prompts: int, settings: DecodeSettings) -> str:
    """What a table of figures must say of itself: pair, machine, prompts, settings."""
    import torch

    from specctl.runtime.hardware import hardware_name

    device = pair.target.model.device
    machine = hardware_name(device)
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    sampling = settings.sampling
    law = "greedy" if sampling.greedy else f"temperature {sampling.temperature}"
    dtype = str(pair.target.model.dtype).removeprefix("torch.")
    note = " (the embedded pair is a fixture, no claim about large models)"
    return (
        f"{pair.target.name} + {pair.drafter_name}, {dtype}, {machine}{threads}, "
        f"{num_prompts} prompts, {settings.max_new_tokens} new tokens, {law}"
        f"{note if pair.target.name.startswith('embedded') else ''}"
    )
