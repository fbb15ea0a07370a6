"""How well a head drafts: agreement on held-out answers, acceptance length on held-out prompts."""

from __future__ import annotations

import json
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from specctl.runtime.api import Decoder

from .features import FeatureRows
from .head import HeadLoss, choose_slots
from .own_text import Prompt
from .prompts import chat_ids

HELD_OUT_FRAC, HELD_OUT_BENCH_FRAC = 0.02, 0.5
POLICIES = ("chain:num_draft_tokens=4", "eagle2:depth=8:num_tokens=60:top_k=10")
MAX_NEW_TOKENS = 96


def is_held_out(row: Prompt) -> bool:
    """Whether no head trains on the row: one in 50, of Spec-Bench's every second one."""
    frac = HELD_OUT_BENCH_FRAC if row.source.startswith("spec_bench") else HELD_OUT_FRAC
    digest = sha256(repr(("held out", row.prompt_ids)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < frac


@torch.no_grad()
def agreement(loss_of: HeadLoss, rows: FeatureRows, device: str) -> dict[str, Any]:
    """Mean loss in nats and top-1 agreement by step over at most 256 held-out answers, if any."""
    if not rows.places:
        return {}
    generator, found = torch.Generator().manual_seed(5), []
    places = sorted(rows.places[:256], key=lambda place: place[2] - place[3])
    for first in range(0, len(places), 16):
        example = rows.example(places[first : first + 16]).to(device)
        found.append(loss_of(example, choose_slots(example, 1.0, generator)))
    columns = zip(*(agreements for _, agreements in found), strict=True)
    return {
        "loss": round(sum(float(loss) for loss, _ in found) / len(found), 4),
        "agreement": [round(sum(column) / len(found), 3) for column in columns],
    }


def acceptance(
    target: Path, drafter: Path, prompts: Path, tokenizer: Any, num_prompts: int
) -> dict[str, Any]:
    """Acceptance length of specctl's own runtime, greedy, by policy and category.

    Args:
        prompts: in Spec-Bench's format, of which the held-out ones are used, first turns alone.
    """
    rows = [json.loads(line) for line in prompts.read_text("utf-8").splitlines()]
    chosen = [
        row
        for row in rows
        if is_held_out(Prompt("spec_bench", chat_ids(tokenizer, row["turns"][0])))
    ][:num_prompts]
    asked = [[{"role": "user", "content": row["turns"][0]}] for row in chosen]
    found: dict[str, Any] = {"num_prompts": len(chosen), "max_new_tokens": MAX_NEW_TOKENS}
    for policy in POLICIES:
        decoder = Decoder.from_pretrained(
            str(target), str(drafter), policy=policy, dtype="float32", batch_size=8
        )
        done = list(decoder.generate(asked, max_new_tokens=MAX_NEW_TOKENS))
        groups: dict[str, list[Any]] = defaultdict(list)
        for row, completion in zip(chosen, done, strict=True):
            for name in (row["category"], "all"):
                groups[name].append(completion.metrics)
        found[policy] = {name: _length(metrics) for name, metrics in sorted(groups.items())}
    return found


def _length(metrics: list[Any]) -> float:
    accepted, calls = (sum(getattr(m, name) for m in metrics) for name in ("num_accepted", "calls"))
    return float(round(1 + accepted / calls, 3))
