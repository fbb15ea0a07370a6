"""The model card of a trained head: how it was made, and what was measured of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .own_text import Row


def card(folder: Path, name: str, title: str, rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The Markdown text of a head's `README.md`.

    Args:
        folder: work folder of the training, with its log and the evaluated heads.
        name: of the head's checkpoint. title: of the target. rows: text that was trained on.
        facts: settings to name, in order.
    """
    lines = map(json.loads, (folder / f"{name}.jsonl").read_text("utf-8").splitlines())
    log = {row["step"]: row for row in lines}
    last, checks = log[max(log)], [row for row in log.values() if "validation" in row]
    found = evaluations(folder, name)
    final = found.pop(max(found))
    policies = [policy for policy in final if isinstance(final[policy], dict)]
    curve = [
        (
            step,
            f"{log[step - step % 10]['cpu_s'] / 3600:.1f}" if step in log else "",
            *(f"{one[policy]['all']:.2f}" for policy in policies),
        )
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
    return "\n".join(
        [
            f"# An EAGLE-3 head for {title}",
            "",
            *table(("fact", "value"), facts.items()),
            "",
            "## Acceptance length",
            "",
            f"τ, greedy, on {final['num_prompts']} Spec-Bench prompts that no head was trained on, "
            f"{final['max_new_tokens']} new tokens each, in specctl's own loop (float32).",
            "",
            *table(("category", *policies), categories),
            "",
            "Along the training:",
            "",
            *table(("steps", "CPU hours", *policies), curve),
            "",
            "## Agreement on held-out answers",
            "",
            "Top-1 agreement with the target by unrolled step, and the loss in nats.",
            "",
            *table(("steps", "loss", *steps), agreement),
            "",
            "## Text",
            "",
            f"{len(rows):,} answers of the target, {sum(tokens.values()):,} tokens, to prompts of:",
            "",
            *table(("source", "answers", "tokens"), sources),
            "",
            f"Training took {last['cpu_s'] / 3600:.1f} CPU hours.",
            "",
        ]
    )


def evaluations(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """What was measured of the heads that were kept, by the number of steps."""
    found = {}
    for path in folder.glob(f"{name}-*/evaluation.json"):
        if steps := re.fullmatch(r"\d+", path.parent.name.removeprefix(f"{name}-")):
            found[int(steps[0])] = json.loads(path.read_text("utf-8"))
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]
