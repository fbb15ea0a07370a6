"""The prompt file of the package: held-out problems and prompts of our own."""

from __future__ import annotations

import json
from pathlib import Path

from .corpus import HELD_OUT_SEED, Document
from .own_prompts import CHAT, CODE, PROSE
from .problems import generate

RAW = ("code", "prose")  # continued as text, not answered
NUM_PROBLEMS = {"arithmetic": 70, "strings": 50}


def prompt_rows() -> list[dict[str, str | bool]]:
    """`id`, `category`, `prompt`; `answer` where it can be checked; `raw` where it is no chat."""
    rows = [
        (c, p.prompt, p.answer)
        for c, n in NUM_PROBLEMS.items()
        for p in generate(c, HELD_OUT_SEED, n)
    ]
    own = {"code": CODE, "prose": PROSE, "chat": CHAT}
    rows += [(category, prompt, "") for category, prompts in own.items() for prompt in prompts]
    seen: dict[str, int] = {}
    out: list[dict[str, str | bool]] = []
    for category, prompt, answer in rows:
        seen[category] = number = seen.get(category, 0) + 1
        row = {"id": f"{category}-{number:03d}", "category": category, "prompt": prompt}
        answered = {"answer": answer} if answer else {}
        out.append(row | answered | ({"raw": True} if category in RAW else {}))
    return out


def write_prompts(path: Path, train: list[Document]) -> int:
    """Writes the file; refuses a prompt that a training document holds."""
    questions = {q for d in train for q, _ in d.turns}
    corpus = "\n".join(d.text for d in train)
    rows = prompt_rows()
    known = [r["prompt"] for r in rows if r["prompt"] in questions or r["prompt"] in corpus]
    if known:
        raise ValueError(f"prompts that training saw: {known}")
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(rows)
