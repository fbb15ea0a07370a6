"""Dense collection: prompts and responses to a durable trace set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.collect.dense.answers import Answered, answered, generate
from specctl.collect.dense.drafting import DenseDrafting
from specctl.collect.formats import Prompt
from specctl.collect.live import header_of
from specctl.collect.responses import Responses
from specctl.collect.shards import WHOLE, Shard
from specctl.collect.tokens import KEEP, TokenTreatment
from specctl.collect.trace_writer import FLUSH_BYTES, FLUSH_S, TraceWriter, finishing, join_tables
from specctl.logs.trace_files import Segment, TraceHeader
from specctl.logs.trace_set import Tables
from specctl.policy import FullTree, Policy
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair

OnCommit = Callable[[Segment], None]


@dataclass
class DenseSummary:
    """What a dense collection did in this sitting.

    Attributes:
        num_skipped: prompts that an earlier sitting had finished.
        num_committed: prompts made durable. num_cut: conversations that outgrew the context.
        num_shortened: given responses that were cut to `max_new_tokens` or to the context.
        num_tokens: of the responses. num_trees, num_nodes: rows written.
        seconds: wall time of drafting and writing, without generating the texts.
    """

    out: str
    num_planned: int
    num_skipped: int
    num_committed: int = 0
    num_cut: int = 0
    num_shortened: int = 0
    num_tokens: int = 0
    num_trees: int = 0
    num_nodes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return vars(self).copy()

    def render(self) -> str:
        """For a person."""
        rate = self.num_trees / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.num_committed} prompts committed to {self.out}"
            f" ({self.num_skipped} were there before, {self.num_planned} planned)",
            f"{self.num_trees} trees of {self.num_nodes} nodes along {self.num_tokens} tokens, "
            f"{rate:.0f} trees/s",
        ]
        if self.num_cut:
            lines.append(f"{self.num_cut} conversations outgrew the context and were cut")
        if self.num_shortened:
            lines.append(f"{self.num_shortened} responses were cut to the limit of new tokens")
        return "\n".join(lines)


def collect_dense(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    out: str | Path,
    shape: FullTree,
    *,
    responses: Responses | None = None,
    batch_size: int = 1,
    resume: bool = False,
    shard: Shard = WHOLE,
    tokens: TokenTreatment = KEEP,
    workload: str | None = None,
    on_commit: OnCommit | None = None,
) -> DenseSummary:
    """Drafts the full tree from every position of every response and writes dense traces.

    Ctrl-C keeps every finished prompt; `resume` goes on with the others. The rows of a prompt
    stay in memory until it is finished, about 100 bytes a node.

    Args:
        settings: limit of new tokens, also for given responses, and the sampling whose law the
            texts follow and the labels are stated in.
        responses: texts to draft along; None lets the target generate them.
        batch_size: prompts generated together.
        out, shard, tokens: as in `collect_live`.
        workload: what the prompts are, in the user's word; goes into artifacts.

    Raises:
        UsageError: a pair that cannot draft the shape.
        PromptError, PromptTooLongError: responses that do not fit; see `collect.responses`.
        TraceError, OutputError: see `specctl.errors`.
    """
    drafting = DenseDrafting(pair, shape)
    if responses is not None:
        responses.check_cover(prompts)
    header = dense_header(pair, shape, settings, responses, workload, tokens)
    joins = resume or shard.count > 1
    with TraceWriter.open(out, header, resume=joins, tokens=tokens) as writer:
        planned = [prompt for prompt in prompts if shard.holds(prompt.prompt_id)]
        left = writer.plan(planned)
        summary = DenseSummary(str(out), len(planned), len(planned) - len(left))
        texts = _texts(pair, left, settings, responses, batch_size)
        _collect(drafting, texts, FinishedPrompts(writer, summary, on_commit), summary)
    return summary


def dense_header(
    pair: Pair,
    shape: FullTree,
    settings: DecodeSettings,
    responses: Responses | None,
    workload: str | None = None,
    tokens: TokenTreatment = KEEP,
) -> TraceHeader:
    """Identity of dense traces: what live ones have, the support of the log, and its texts."""
    support = {
        "top_k": shape.top_k,
        "width": shape.width or shape.top_k,
        "depth": shape.depth,
        "nested": shape.nested,
    }
    texts = None if responses is None else responses.digest
    more = {"dense": support, "responses_digest": texts}
    policy = Policy(shape=shape)
    return header_of(pair, policy, settings, workload=workload, tokens=tokens, more=more)


def _texts(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    responses: Responses | None,
    batch_size: int,
) -> Iterator[Answered]:
    """The answers to all prompts; given ones are all checked before the first is used."""
    if responses is None:
        return generate(pair, prompts, settings, batch_size)
    by_prompt = responses.by_prompt
    for prompt in prompts:
        answered(pair.target, prompt, by_prompt[prompt.prompt_id], settings)
    return (answered(pair.target, p, by_prompt[p.prompt_id], settings) for p in prompts)


@dataclass
class FinishedPrompts:
    """Rows of finished prompts on their way into the next commit.

    Attributes:
        waiting: prompts with all their tables, which no interrupt may part.
        size_bytes: of the rows that wait.
    """

    writer: TraceWriter
    summary: DenseSummary
    on_commit: OnCommit | None
    waiting: list[tuple[str, list[Tables]]] = field(default_factory=list)
    size_bytes: int = 0
    committed_at: float = field(default_factory=time.monotonic)

    def add(self, prompt_id: str, tables: list[Tables]) -> None:
        """Takes a whole prompt, and commits where that is due."""
        self.waiting.append((prompt_id, tables))
        self.size_bytes += sum(rows.nbytes for table in tables for rows in table.values())
        waited_s = time.monotonic() - self.committed_at
        if waited_s >= FLUSH_S or self.size_bytes >= FLUSH_BYTES:
            self.commit()

    def commit(self) -> None:
        """Makes what waits durable; what a commit failed with is not tried again."""
        with finishing():
            waiting, self.waiting, self.size_bytes = self.waiting, [], 0
            if waiting:
                self._write(waiting)

    def _write(self, waiting: list[tuple[str, list[Tables]]]) -> None:
        rows = join_tables([part for _, tables in waiting for part in tables])
        commit = self.writer.commit([prompt_id for prompt_id, _ in waiting], rows)
        self.summary.num_committed += len(waiting)
        self.committed_at = time.monotonic()
        if self.on_commit is not None:
            self.on_commit(commit)


def _collect(
    drafting: DenseDrafting,
    texts: Iterator[Answered],
    finished: FinishedPrompts,
    summary: DenseSummary,
) -> None:
    try:
        for text in texts:
            start = time.perf_counter()
            finished.add(text.prompt_id, _draft(drafting, text, summary))
            summary.seconds += time.perf_counter() - start
    finally:  # behind Ctrl-C, and behind an error of a later prompt
        finished.commit()


def _draft(drafting: DenseDrafting, text: Answered, summary: DenseSummary) -> list[Tables]:
    tables = [
        rows
        for answer in text.answers
        for rows in drafting.tables(answer.request, answer.response_ids)
    ]
    summary.num_cut += text.is_cut
    summary.num_shortened += text.num_shortened
    summary.num_tokens += sum(len(answer.response_ids) for answer in text.answers)
    summary.num_trees += sum(rows["rounds"].num_rows for rows in tables)
    summary.num_nodes += sum(rows["nodes"].num_rows for rows in tables)
    return tables
