"""Text that a target writes itself, greedy and sampled, as rows of a JSON lines file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from specctl import Decoder
from specctl.runtime.requests import Request, Sampling

SAMPLED_FRAC, TEMPERATURE = 0.4, 0.8
SHOW_EVERY = 5_000  # tokens


def number_of(value: object) -> float:
    """A number in [0, 1) that depends on the value alone: order, split, sampled or not."""
    return int.from_bytes(sha256(repr(value).encode()).digest()[:6], "big") / 2**48


@dataclass(frozen=True)
class Row:
    """Token ids that a target continues, the data set that they come from, and its answer, the end
    of text included where the target reached it."""

    source: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()

    @property
    def draw(self) -> float:
        return number_of(self.prompt_ids)

    @property
    def prompt_digest(self) -> str:
        return sha256(repr(self.prompt_ids).encode()).hexdigest()[:16]

    @property
    def sampling(self) -> Sampling:
        """Two of five answers are sampled, the others are greedy."""
        is_sampled = self.draw * 997 % 1 < SAMPLED_FRAC
        return Sampling(TEMPERATURE, seed=int(self.draw * 2**48)) if is_sampled else Sampling()


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


def write_answers(rows: Sequence[Row], path: Path) -> None:
    """Writes the answers as Parquet; a digest stands for a prompt, whose text is its maker's."""
    columns = {
        "prompt_digest": [row.prompt_digest for row in rows],
        "answer_ids": pa.array([row.answer_ids for row in rows], pa.list_(pa.int32())),
    }
    pq.write_table(pa.table(columns), path, compression="zstd", compression_level=19)


def read_answers(path: Path, prompts: Sequence[Row]) -> list[Row]:
    """The prompts that `write_answers` wrote an answer to, with it."""
    table = pq.read_table(path)
    answers = dict(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))
    known = (row for row in prompts if row.prompt_digest in answers)
    return [replace(row, answer_ids=tuple(answers[row.prompt_digest])) for row in known]


def write_rows(
    decoder: Decoder, prompts: Sequence[Row], path: Path, max_new_tokens: int, num_tokens: int
) -> None:
    """Appends answers to prompts that the file does not hold yet, until it holds `num_tokens`.

    Args:
        decoder: of the target, under plain decoding.
        max_new_tokens: an answer's length limit, the end of text included.
        num_tokens: of answers in the file, at which the run ends.
    """
    append_rows(path, ())
    rows = read_rows(path)
    seen, num_found = {row.prompt_ids for row in rows}, sum(len(row.answer_ids) for row in rows)
    left = sorted((p for p in prompts if p.prompt_ids not in seen), key=lambda p: p.draw)
    requests = [
        Request(str(n), p.prompt_ids, max_new_tokens, sampling=p.sampling)
        for n, p in enumerate(left)
    ]
    start, num_start, num_shown = time.monotonic(), num_found, num_found
    with path.open("a", encoding="utf-8") as file:
        for done in decoder.loop(requests).run(requests):
            row = replace(left[int(done.request.request_id)], answer_ids=done.token_ids)
            file.write(json.dumps(asdict(row)) + "\n")
            num_found += len(done.token_ids)
            if num_found - num_shown >= SHOW_EVERY or num_found >= num_tokens:
                file.flush()
                os.fsync(file.fileno())
                rate, num_shown = (num_found - num_start) / (time.monotonic() - start), num_found
                print(f"{num_found:,} tokens, {rate:.0f} tokens/s", flush=True)
            if num_found >= num_tokens:
                return


def draft_ids(rows: Sequence[Row], vocab_size: int, size: int) -> Tensor:
    """Sorted ids of the most frequent tokens of the answers; prompts' tokens break ties."""
    answers, prompts = (
        torch.tensor([0, *chain.from_iterable(ids)])
        for ids in ((row.answer_ids for row in rows), (row.prompt_ids for row in rows))
    )
    counts, ties = (torch.bincount(ids, minlength=vocab_size) for ids in (answers, prompts))
    return (counts + 1e-6 * ties).argsort(descending=True)[:size].sort().values
