"""The model card of a trained head: how it was made, and what was measured of it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .own_text import Row
from .prompts import read_lines


def card(folder: Path, name: str, title: str, rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The Markdown text of a head's `README.md`.

    Args:
        folder: work folder of the training, with its log and the evaluated heads.
        name: of the head's checkpoint. title: of the target. rows: text that was trained on.
        facts: settings to name, in order.
    """
    log: dict[int, dict[str, Any]] = defaultdict(dict)  # a step that was checked has two lines
    for row in read_lines(folder / f"{name}.jsonl"):
        log[row["step"]] |= row
    checks = [row for row in log.values() if "validation" in row]
    paths = folder.glob(f"{name}-[0-9]*/evaluation.json")
    steps_of = {int(p.parent.name.removeprefix(f"{name}-")): p for p in paths}
    found = {steps: json.loads(p.read_text("utf-8")) for steps, p in steps_of.items()}
    final = found.pop(max(found))
    policies = [policy for policy in final if isinstance(final[policy], dict)]
    curve = [
        (step, f"{log[step]['cpu_s'] / 3600:.1f}", *(f"{one[p]['all']:.2f}" for p in policies))
        for step, one in sorted(found.items())
    ]
    categories = [
        (category, *(f"{final[policy][category]:.2f}" for policy in policies))
        for category in final[policies[0]]
    ]
    counts, tokens = Counter(row.source for row in rows), Counter[str]()
    for row in rows:
        tokens[row.source] += len(row.answer_ids)
    sources = [(source, f"{num:,}", f"{tokens[source]:,}") for source, num in counts.most_common()]
    steps = [f"step {number + 1}" for number in range(len(checks[-1]["validation"]["agreement"]))]
    agreement = [
        (row["step"], row["validation"]["loss"], *row["validation"]["agreement"]) for row in checks
    ]
    template = Path(__file__).with_name("card.md").read_text("utf-8")
    return template.format(
        **{name: final[name] for name in ("num_prompts", "max_new_tokens")},
        title=title,
        facts=table(("fact", "value"), facts.items()),
        categories=table(("category", *policies), categories),
        curve=table(("steps", "CPU hours", *policies), curve),
        agreement=table(("steps", "loss", *steps), agreement),
        sources=table(("source", "answers", "tokens"), sources),
        num_rows=len(rows),
        num_tokens=sum(tokens.values()),
        cpu_hours=log[max(log)]["cpu_s"] / 3600,
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
