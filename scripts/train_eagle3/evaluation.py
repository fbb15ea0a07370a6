"""How well a head drafts: agreement on held-out answers, acceptance length on held-out prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specctl.answers import is_correct
from specctl.runtime.api import Decoder
from specctl.runtime.requests import Metrics, pooled

from .features import FeatureRows
from .head import HeadLoss, agreement, choose_slots
from .own_text import Row, number_of
from .prompts import chat_ids, read_lines

HELD_OUT_FRAC, HELD_OUT_BENCH_FRAC = 0.02, 0.5
POLICIES = ("chain:num_draft_tokens=4", "eagle2:depth=8:num_tokens=60:top_k=10")
MAX_NEW_TOKENS = 96


def is_held_out(row: Row) -> bool:
    """Whether no head trains on the row: one in 50, of Spec-Bench's every second one."""
    frac = HELD_OUT_BENCH_FRAC if row.source.startswith("spec_bench") else HELD_OUT_FRAC
    return number_of(("held out", row.prompt_ids)) < frac


@torch.no_grad()
def validation(loss_of: HeadLoss, rows: FeatureRows, device: str) -> dict[str, Any]:
    """Mean loss in nats and top-1 agreement by step over at most 256 held-out answers, if any."""
    if not rows.places:
        return {}
    generator, found = torch.Generator().manual_seed(5), []
    places = sorted(rows.places[:256], key=lambda place: place[2] - place[3])
    for first in range(0, len(places), 16):
        example = rows.example(places[first : first + 16]).to(device)
        found.append(loss_of(example, choose_slots(example, 1.0, generator)))
    by_step = zip(*(counts for _, counts in found), strict=True)
    return {
        "loss": round(sum(float(loss) for loss, _ in found) / len(found), 4),
        "agreement": agreement(tuple(map(sum, zip(*step, strict=True))) for step in by_step),
    }


def bench_rows(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """First turns of Spec-Bench's held-out questions: `category` and `prompt`."""
    rows = [{"category": r["category"], "prompt": r["turns"][0]} for r in read_lines(path)]
    prompts = [Row("spec_bench", chat_ids(tokenizer, row["prompt"])) for row in rows]
    return [row for row, prompt in zip(rows, prompts, strict=True) if is_held_out(prompt)]


def acceptance(target: Path, drafter: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance length of specctl's own runtime, greedy, by policy and category; the share of
    right answers where there are any to compare with.

    Args:
        rows: `category` and `prompt`, with `raw` one that goes without the chat template, and
            perhaps an `answer`, as in the embedded pair's prompts.
    """
    asked = [
        row["prompt"] if row.get("raw") else [{"role": "user", "content": row["prompt"]}]
        for row in rows
    ]
    found: dict[str, Any] = {"num_prompts": len(rows), "max_new_tokens": MAX_NEW_TOKENS}
    for policy in POLICIES:
        decoder = Decoder.from_pretrained(
            str(target), str(drafter), policy=policy, dtype="float32", batch_size=8
        )
        done = list(decoder.generate(asked, max_new_tokens=MAX_NEW_TOKENS))
        groups: dict[str, list[Metrics]] = defaultdict(list)
        for row, completion in zip(rows, done, strict=True):
            for name in (row["category"], "all"):
                groups[name].append(completion.metrics)
        found[policy] = {
            name: round(pooled(group).mean_acceptance_length, 3)
            for name, group in sorted(groups.items())
        }
    pairs = zip(rows, done, strict=True)
    right = [is_correct(one.text, row["answer"]) for row, one in pairs if "answer" in row]
    return found | ({"right_frac": round(sum(right) / len(right), 3)} if right else {})
