"""The model card of a trained head: how it was made, and what was measured of it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.pages import table

from .own_text import Row
from .prompts import read_lines


def card(folder: Path, name: str, title: str, rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The Markdown text of a head's `README.md`.

    Args:
        folder: work folder of the training, with its log and the evaluated heads.
        name: of the head's checkpoint. title: of the target. rows: text that was trained on.
        facts: settings of the training, in order.
    """
    log: dict[int, dict[str, Any]] = defaultdict(dict)  # a step that was checked has two lines
    for row in read_lines(folder / f"{name}.jsonl"):
        log[row["step"]] |= row
    for path in folder.glob(f"{name}-[0-9]*/evaluation.json"):
        steps = int(path.parent.name.removeprefix(f"{name}-"))
        log[steps]["found"] = json.loads(path.read_text("utf-8"))
    last = log[max(log)]
    final, num_unrolled = last["found"], len(last["validation"]["agreement"])
    policies = [policy for policy in final if isinstance(final[policy], dict)]
    categories = [
        (category, *(f"{final[policy][category]:.2f}" for policy in policies))
        for category in final[policies[0]]
    ]
    curve = []
    for step, row in sorted(log.items()):
        if check := row.get("validation"):
            taus = (f"{row['found'][p]['all']:.2f}" if "found" in row else "" for p in policies)
            hours = f"{row['cpu_s'] / 3600:.1f}"
            curve.append((step, hours, check["loss"], *check["agreement"], *taus))
    steps_ahead = [f"step {number + 1}" for number in range(num_unrolled)]
    counts, tokens = Counter(row.source for row in rows), Counter[str]()
    for row in rows:
        tokens[row.source] += len(row.answer_ids)
    sources = [(source, f"{num:,}", f"{tokens[source]:,}") for source, num in counts.most_common()]
    template = Path(__file__).with_name("card.md").read_text("utf-8")
    return template.format(
        **{name: final[name] for name in ("num_prompts", "max_new_tokens")},
        title=title,
        facts=table(("setting", "value"), facts.items()),
        categories=table(("category", *policies), categories),
        curve=table(("updates", "CPU hours", "loss", *steps_ahead, *policies), curve),
        sources=table(("source", "answers", "tokens"), sources),
        num_rows=len(rows),
        num_tokens=sum(tokens.values()),
        steps=max(log),
        cpu_hours=last["cpu_s"] / 3600,
    )
