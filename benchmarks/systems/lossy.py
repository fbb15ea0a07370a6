"""MARS and AdaSD: their text is their own, so their rows come from paired live runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHES = {"MARS": "mars-cpu.json", "AdaSD": "adasd-cpu.json"}


def lossy_results(folder: Path) -> dict[str, Any]:
    """What the benchmarks of the lossy systems wrote; None where one has not run."""
    return {
        name: json.loads(path.read_text("utf-8")) if (path := folder / file).exists() else None
        for name, file in BENCHES.items()
    }


def lossy_rows(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Speed beside quality; the gain of AdaSD is in the costs of its bench."""
    for row in (found["MARS"] or {"rows": []})["rows"]:
        if row["system"] == "greedy ratio" and row["prompts"] == "all":
            yield {
                "system": f"MARS, theta {row['theta']:g}",
                "drafter": "EAGLE-3 head",
                "num_prompts": row["n"],
                "gain": f"x {row['over_strict']} tokens a call over strict",
                "changed": f"{row['texts_changed']:.1%}",
                "accuracy": f"{row['accuracy']:.1%} ({row['strict_accuracy']:.1%})",
                "lost": f"{row['lost']} / {row['gained']}",
                "certified": row["certified"],
            }
    adasd = found["AdaSD"] or {"rows": [], "note": ""}
    counted = re.search(r"(\d+) held-out prompts", adasd["note"])
    problems = int(counted[1]) if counted else None
    for row in adasd["rows"]:
        yield {
            "system": row["system"],
            "drafter": row["drafter"],
            "num_prompts": problems,
            "gain": f"x {row['x chain 5']:.3f} speed of chain 5, {row['tokens/call']:.2f} a call",
            "changed": f"{row['changed']:.1%}",
            "accuracy": f"{row['accuracy']:.1%} ({row['difference']})",
            "lost": f"{row['lost']} / {row['gained']}",
            "certified": None,
        }
