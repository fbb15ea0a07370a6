"""Text that a target writes itself, greedy and sampled, as rows of a JSON lines file."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAMPLED_FRAC = 0.4
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
BATCH = 64
WINDOW = 16 * BATCH  # prompts that are sorted by length before they are cut into batches


@dataclass(frozen=True)
class Prompt:
    """Token ids that a target continues, and the data set that they come from."""

    source: str
    prompt_ids: tuple[int, ...]

    @property
    def draw(self) -> float:
        """A number in [0, 1) that depends on the token ids alone: order, split, sampled or not."""
        digest = hashlib.sha256(repr(self.prompt_ids).encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    @property
    def is_sampled(self) -> bool:
        """Whether the answer is sampled and not greedy."""
        return self.draw * 997 % 1 < SAMPLED_FRAC


@dataclass(frozen=True)
class Row(Prompt):
    """A prompt and its answer, the end of text included where the target reached it."""

    answer_ids: tuple[int, ...]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a line that a killed run left half-written is not read."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    found = (json.loads(line) for line in lines if line.endswith("\n"))
    return [Row(r["source"], tuple(r["prompt_ids"]), tuple(r["answer_ids"])) for r in found]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Adds the rows that the file does not hold yet, and drops a half-written line."""
    old = {row.prompt_ids + row.answer_ids: row for row in read_rows(path)}
    new = {row.prompt_ids + row.answer_ids: row for row in rows}
    lines = [json.dumps(asdict(row)) + "\n" for row in (old | new).values()]
    path.with_suffix(".tmp").write_text("".join(lines), "utf-8")
    path.with_suffix(".tmp").replace(path)


def write_rows(
    target: Any, prompts: Sequence[Prompt], path: Path, max_new_tokens: int, num_tokens: int
) -> None:
    """Appends answers to prompts that the file does not hold yet, until it holds `num_tokens`.

    Args:
        target: a causal LM of transformers, on any device.
        max_new_tokens: an answer's length limit, the end of text included.
        num_tokens: of answers in the file, at which the run ends.
    """
    append_rows(path, ())
    rows = read_rows(path)
    seen, num_found = {row.prompt_ids for row in rows}, sum(len(row.answer_ids) for row in rows)
    left = sorted((p for p in prompts if p.prompt_ids not in seen), key=lambda p: p.draw)
    start, num_start = time.monotonic(), num_found
    with path.open("a", encoding="utf-8") as file:
        for batch in _batches(left):
            if num_found >= num_tokens:
                return
            for prompt, ids in zip(batch, _continued(target, batch, max_new_tokens), strict=True):
                row = Row(prompt.source, prompt.prompt_ids, tuple(ids))
                file.write(json.dumps(asdict(row)) + "\n")
                num_found += len(ids)
            file.flush()
            os.fsync(file.fileno())
            rate = (num_found - num_start) / (time.monotonic() - start)
            print(f"{num_found:,} tokens, {rate:.0f} tokens/s", flush=True)


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Batches of prompts of similar length that are all greedy or all sampled."""
    for first in range(0, len(prompts), WINDOW):
        window = sorted(prompts[first : first + WINDOW], key=lambda p: len(p.prompt_ids))
        for is_sampled in (False, True):
            chosen = [p for p in window if p.is_sampled == is_sampled]
            yield from (chosen[i : i + BATCH] for i in range(0, len(chosen), BATCH))


@torch.inference_mode()
def _continued(target: Any, batch: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
    width, eos = max(len(p.prompt_ids) for p in batch), target.config.eos_token_id
    ids = torch.tensor([[eos] * (width - len(p.prompt_ids)) + [*p.prompt_ids] for p in batch])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in (len(p.prompt_ids) for p in batch)])
    torch.manual_seed(int(batch[0].draw * 2**32))
    output = target.generate(
        ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=eos,
        **(SAMPLING if batch[0].is_sampled else {"do_sample": False}),
    )
    answers = output[:, width:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in answers]


def draft_ids(rows: Sequence[Row], vocab_size: int, size: int) -> Tensor:
    """Sorted ids of the most frequent tokens of the answers; prompts' tokens break ties."""
    answers, prompts = (
        torch.tensor([0, *chain.from_iterable(ids)])
        for ids in ((row.answer_ids for row in rows), (row.prompt_ids for row in rows))
    )
    counts, ties = (torch.bincount(ids, minlength=vocab_size) for ids in (answers, prompts))
    return (counts + 1e-6 * ties).argsort(descending=True)[:size].sort().values
