"""Steps of an engine as rows of a trace set: the rounds that ran, or a dense log of chains.

    engine's thread    Step: the logits as they are, a few numbers ──► the recorder's queue
    recording thread   every `READ_BYTES` of logits or `STEPS_TOGETHER`: rows, held until their
                       request ends

Recording never delays the engine and never fails it. If rows cannot be written, or too many wait,
tracing ends: this is logged once, and `StepRecorder.lost` counts the rest. `collect.rows` makes the
tables, as for our own rounds.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specctl.collect.dense.labels import continuations, label_paths
from specctl.collect.dense.trees import labelled_columns
from specctl.collect.recorder import Publication, Recorder, RecorderConfig
from specctl.collect.rows import (
    LOGIT_TENSORS,
    HeldRows,
    RoundRows,
    dense_tables,
    join,
    round_tables,
    stacked,
)
from specctl.collect.trace_writer import TraceWriter
from specctl.engines.chains import DraftedTokens
from specctl.engines.steps import Ranks, ReadStep, Step
from specctl.errors import OutputError, SpecctlError
from specctl.logs.parquet import Tables, join_tables
from specctl.policy import FullTree, Policy, policy_digest
from specctl.policy.growing import Growth
from specctl.policy.rules import Frontier
from specctl.runtime.requests import Request
from specctl.tree import POOL_COLUMNS, Children, DraftPool

log = logging.getLogger("specctl.engines")
READ_BYTES = 16 << 20
"""Logits that are read together; a step with more is read alone."""
STEPS_TOGETHER = 64
"""Steps of small logits that become rows together."""
LIMITS = RecorderConfig(
    waits=False,
    max_items=4096,
    held_bytes=1 << 30,
    wake_s=1.0,
    wake_items=STEPS_TOGETHER,
    wake_bytes=READ_BYTES,
    poll_s=0.05,
)
"""Limits of the queue. At the bound of logits the engine's thread reads its own; at that of steps
tracing ends. The thread polls: woken by a step, it would take the interpreter lock at once."""
UNDRAFTED = "requests with an undrafted position"
OBJECT_BYTES = 1000
"""Approximate memory of the Python objects of a held round or position."""
Read = Callable[[Sequence[Step]], list[ReadStep]]
"""`read_steps` with an engine's sampling and lane."""


class StepSource:
    """The recorder's source of steps; base of the two logs."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.lost: Counter[str] = Counter()  # requests that were left out, by reason

    def take(self, items: list[Step | ReadStep]) -> None:
        """Takes steps and reads up to `READ_BYTES` of logits together."""
        together, size_bytes = list[Step](), 0
        for step in items:
            if isinstance(step, Step):
                together.append(step)
                size_bytes += step.size_bytes
            if isinstance(step, ReadStep) or size_bytes > READ_BYTES:
                self._read_and_add(together)
                together, size_bytes = [], 0
            if isinstance(step, ReadStep):
                self.add(step)
        self._read_and_add(together)

    def _read_and_add(self, steps: list[Step]) -> None:
        for step in self.read(steps) if steps else ():
            self.add(step)

    def add(self, step: ReadStep) -> None:
        raise NotImplementedError


# --------------------------------------------------------------------------- rounds as they run


class StepRounds(NamedTuple):
    """The rounds of a step."""

    step: ReadStep
    rows: list[int]  # of `step.answered`
    num_emitted: list[int]  # tokens that each text kept


class LiveSteps(StepSource):
    """Rows of the rounds that the engine runs.

    Args:
        greedy: the target's tokens are its likeliest. A sampling engine does not report its draw
            after a rejected token.
    """

    def __init__(self, read: Read, *, greedy: bool) -> None:
        super().__init__(read)
        self._greedy = greedy
        self._rounds: list[StepRounds] = []  # without rows yet
        self._held = HeldRows()
        self._num_rounds: Counter[str] = Counter()
        self._policies: dict[str, tuple[str, Policy]] = {}  # of their last rounds, with digests
        self._ended: set[str] = set()

    def unfinished(self) -> list[str]:
        return list(self._policies.keys() - self._ended)

    @property
    def has_ended(self) -> bool:
        return not self._ended.isdisjoint(self._policies)

    @property
    def held_bytes(self) -> int:
        num_rows = sum(len(part.headings) for part in self._held.parts)
        num_rows += sum(len(one.rows) for one in self._rounds)
        return self._held.size_bytes + num_rows * OBJECT_BYTES

    def add(self, step: ReadStep) -> None:
        self._ended.update(step.ended)
        kept = [one.end.kept(given) for one, given in zip(step.answered, step.tokens, strict=True)]
        pairs = zip(step.answered, kept, strict=True)
        self._ended.update(one.request_id for one, (_, is_end) in pairs if is_end)
        rows = [row for row, one in enumerate(step.answered) if one.prompt is None]
        if rows:
            self._rounds.append(StepRounds(step, rows, [len(kept[row][0]) for row in rows]))
            names = (step.answered[row].request_id for row in rows)
            self._policies.update(dict.fromkeys(names, (step.digest, step.policy)))
            if len(self._rounds) >= STEPS_TOGETHER:
                self._make_rows()

    def publish(self) -> list[Publication]:
        self._make_rows()
        ended, self._ended = self._ended & self._policies.keys(), set()
        policies, names = dict[str, Policy](), defaultdict[str, set[str]](set)
        for name in ended:
            digest, policies[digest] = self._policies.pop(name)
            names[digest].add(name)
            del self._num_rounds[name]
        found = []
        for digest, policy in policies.items():  # a segment has one policy
            rows = self._held.take(names[digest])
            size_bytes = sum(part.size_bytes for part in rows)
            tables = partial(lambda rows: round_tables(join(rows)), rows)
            found.append(Publication(names[digest], tables, size_bytes, policy))
        return found

    def _make_rows(self) -> None:
        run, self._rounds = self._rounds, []
        if run:
            self._held.parts.append(self._rows(run))

    def _rows(self, run: list[StepRounds]) -> RoundRows:
        """The rows of steps, with chains as trees of width one."""
        headings, columns, num_chains, num_logits = list[dict[str, Any]](), list[Any](), 0, 0
        for step, rows, kept in run:
            ends = list(accumulate(one.num_drafted + 1 for one in step.answered))
            common = {
                "category": "",
                "turn": 0,
                "kind": "live",
                "offered_width": 1,
                "top_k": 1,
                "policy_digest": step.digest,
                **step.columns,
            }
            for row, emitted in zip(rows, kept, strict=True):
                one = step.answered[row]
                name, begin = one.request_id, ends[row] - one.num_drafted - 1
                headings.append({"request_id": name, "prompt_id": name, **common})
                number, draft = self._num_rounds[name], one.draft_row
                self._num_rounds[name] += 1
                draft = num_chains + draft if draft >= 0 else -1
                at = (draft, num_logits + begin)
                counts = (number, one.position, one.context, emitted, one.num_drafted)
                columns.append((one.root_id, *counts, *at))
            num_chains, num_logits = num_chains + len(step.offered), num_logits + ends[-1]
        table = torch.tensor(columns).T.contiguous()
        root_ids, round_idx, position, context, num_emitted, num_drafted, draft_row, first = table
        steps = [one.step for one in run]
        all_chains = zip(*(step.chains for step in steps), strict=True)
        chains = DraftedTokens(*(stacked(column, 0) for column in all_chains))
        offered = torch.cat([step.offered for step in steps])

        has_draft, at = draft_row >= 0, draft_row.clamp(min=0)
        offered = offered[at] * has_draft if len(offered) else 0 * at
        pool = chain_pool(root_ids, chains, at, offered)
        sampled = stacked([torch.tensor(step.tokens)[rows] for step, rows, _ in run], -1)
        depth = pool.depth
        num_admitted = (sampled >= 0).sum(1) - 1
        slots = torch.arange(max(sampled.shape[1], int(num_drafted.max()) + 1))
        slots = slots.expand(len(sampled), -1)
        target_ids = torch.full_like(slots, -1)
        target_ids[:, : sampled.shape[1]] = sampled
        # Row d of a request's logits, its parent's, judges the node at depth d.
        judged = (depth >= 1) & (depth <= num_drafted[:, None] + 1) & has_draft[:, None]
        views = _views(steps, first[:, None] + depth - 1)
        # Up to the first rejected token the text shows the draw. After it, a greedy target would
        # have drawn its likeliest token, unless two are tied.
        is_drawn = depth <= num_admitted[:, None] + 1
        drawn = target_ids.gather(1, (depth - 1).clamp(0, target_ids.shape[1] - 1))
        is_best = views["target_rank"] == 1
        is_tied = is_best & (views["target_top1_logit"] == views["target_top2_logit"])
        tensors = {
            "round_idx": round_idx,
            "position": position,
            "context_tokens": context,
            "offered_depth": offered,
            "num_emitted": num_emitted,
            "submitted": slots.masked_fill(slots > num_drafted[:, None], -1),
            "target_ids": target_ids,
            "path": slots.masked_fill(slots > num_admitted[:, None], -1),
            **{name: getattr(pool, name) for name in POOL_COLUMNS},
            "judged": judged,
            "match_known": judged & (is_drawn | ~is_tied if self._greedy else is_drawn),
            "node_match": judged & torch.where(is_drawn, drawn == pool.token_ids, is_best),
            **views,
        }
        return RoundRows(headings, tensors)


def chain_pool(root_ids: Tensor, chains: DraftedTokens, rows: Tensor, offered: Tensor) -> DraftPool:
    """A pool of R chains.

    Args:
        root_ids: `[R]` int64.
        rows: `[R]` int64, row of `chains`.
        offered: `[R]` int64, levels of each.
    """
    levels = chains.token_ids.shape[1]
    growth = Growth(root_ids, 1 + levels)
    for depth in range(1, 1 + levels):
        ids, logp, entropy, topk_entropy = (one[rows, depth - 1, None] for one in chains)
        parent = torch.full_like(rows, growth.level.start)[:, None]
        children = Children(ids[..., None], logp[..., None], entropy, topk_entropy)
        growth.append(Frontier(parent, (offered >= depth)[:, None]), children)
    return growth.level.pool


def _views(steps: Sequence[ReadStep], at: Tensor) -> dict[str, Tensor]:
    """`LOGIT_TENSORS` of nodes, `[R, P]`; arbitrary where the target did not judge.

    Args:
        at: `[R, P]`, the row of logits of each node's parent.
    """
    ranks = [step.ranks for step in steps if step.ranks is not None]
    logp, rank, top_two, _ = map(torch.cat, zip(*ranks, strict=True))
    columns, at = (logp[:, 0], rank[:, 0], *top_two.unbind(-1)), at.clamp(0, len(logp) - 1)
    return {name: one[at] for name, one in zip(LOGIT_TENSORS, columns, strict=True)}


# --------------------------------------------------------------------------- every position


@dataclass
class DenseText:
    """A text while it grows."""

    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)  # emitted
    drafts: dict[int, DraftedTokens] = field(default_factory=dict)  # by position, `[K]`
    ranks: list[Ranks] = field(default_factory=list)  # of each emitted token


class DenseSteps(StepSource):
    """Rows of a dense log: a chain drafted after every token of a text, and never verified.

    Args:
        depth: K, tokens of each chain.
    """

    def __init__(self, read: Read, depth: int) -> None:
        super().__init__(read)
        self.shape = FullTree(depth=depth, top_k=1)
        self.policy = Policy(shape=self.shape)
        self._texts: dict[str, DenseText] = {}
        self._ready: dict[str, Tables] = {}

    def unfinished(self) -> list[str]:
        return list(self._texts)

    @property
    def has_ended(self) -> bool:
        return bool(self._ready)

    @property
    def held_bytes(self) -> int:
        held = sum(len(text.token_ids) for text in self._texts.values()) * OBJECT_BYTES
        return held + self._ready_bytes

    @property
    def _ready_bytes(self) -> int:
        ready = (rows.nbytes for tables in self._ready.values() for rows in tables.values())
        return sum(map(int, ready))

    def add(self, step: ReadStep) -> None:
        is_drafted = step.chains.logp.shape[1] == self.shape.depth
        for row, (one, given) in enumerate(zip(step.answered, step.tokens, strict=True)):
            if one.prompt is not None:
                self._texts[one.request_id] = DenseText(one.prompt)
            text = self._texts.get(one.request_id)
            if text is None:  # it began before tracing
                continue
            if one.draft_row >= 0 and is_drafted:
                text.drafts[one.position] = DraftedTokens(*(c[one.draft_row] for c in step.chains))
            kept, is_end = one.end.kept(given)
            text.token_ids += kept
            if step.ranks is not None:
                text.ranks.append(Ranks(*(values[row] for values in step.ranks)))
            if is_end:
                self._end(one.request_id)
        for name in step.ended:
            self._end(name)

    def publish(self) -> list[Publication]:
        size_bytes, ready, self._ready = self._ready_bytes, self._ready, {}
        tables = partial(join_tables, [*ready.values()])
        return [Publication(set(ready), tables, size_bytes, self.policy)] if ready else []

    def _end(self, name: str) -> None:
        text = self._texts.pop(name, None)
        if text is None:
            return
        size = len(text.token_ids)
        if any(position not in text.drafts for position in range(1, size)):
            if not self.lost[UNDRAFTED]:  # the engine stops drafting near its longest text
                log.warning("specctl: the log leaves out %s, and counts them", UNDRAFTED)
            self.lost[UNDRAFTED] += 1
        else:
            self._ready[name] = self._tables(name, text) if size > 1 else {}

    def _tables(self, name: str, text: DenseText) -> Tables:
        token_ids = torch.tensor([*text.prompt, *text.token_ids])
        size, prompt = len(text.token_ids), len(text.prompt)
        roots = range(prompt, prompt + size - 1)
        drafts = [text.drafts[position] for position in range(1, size)]
        chains = DraftedTokens(*map(torch.stack, zip(*drafts, strict=True)))
        rows = torch.arange(len(roots))
        always = torch.full_like(rows, self.shape.depth)
        pool = chain_pool(token_ids[roots.start : roots.stop], chains, rows, always)
        labels = label_paths(pool, continuations(token_ids, roots, self.shape.depth))
        # The engine does not run the target after the last token.
        labels = replace(labels, judged=labels.judged & (rows[:, None] + pool.depth < size))
        row, node = labels.judged.nonzero(as_tuple=True)
        above = pool.depth[row, node] - 1
        logp, rank, top_two, entropy = map(torch.stack, zip(*text.ranks, strict=True))
        at = row + above + 1  # the emitted token at the node's place
        top1, top2 = top_two[at].unbind(1)
        columns = {
            "text": token_ids,
            **labelled_columns(pool, labels),
            "target_logp": logp[at, above],
            "target_rank": rank[at, above],
            "target_top1_logit": top1,
            "target_top2_logit": top2,
            "target_entropy": entropy[at],
        }
        request = Request(name, text.prompt, size, prompt_id=name)
        return dense_tables(request, roots, columns, self.shape, policy_digest(self.policy))


# --------------------------------------------------------------------------- the recorder


class StepRecorder(Recorder[Step | ReadStep]):
    """Records the steps of an engine without delaying or failing it.

    Args:
        open_writer: opens the set; called in the recording thread.
        max_bytes: size of all published segments at which tracing ends.
    """

    source: LiveSteps | DenseSteps

    def __init__(
        self,
        source: LiveSteps | DenseSteps,
        open_writer: Callable[[], TraceWriter],
        max_bytes: int | None,
        config: RecorderConfig | None = None,
    ) -> None:
        self.is_on, self._max_bytes = True, max_bytes
        self._lost: Counter[str] = Counter()
        super().__init__(open_writer, source, config or LIMITS)

    @property
    def lost(self) -> Counter[str]:
        """Steps and requests that were not written, by reason."""
        return self._lost + self.source.lost

    def hand_over(self, step: Step) -> None:
        """Hands over a step; returns at once."""
        try:
            has_room = self.put(step, step.size_bytes)
            if not has_room and len(self._queue.sizes) < self.config.max_items:
                [read] = self.source.read([step])  # relieves the other thread
                has_room = self.put(read, 0)
        except OutputError:  # closed
            self._lost["steps after tracing ended"] += 1
        else:
            if not has_room:
                self.end(f"{self.config.max_items} steps wait for a slow disk or store")

    def close(self, wait_s: float = 10.0) -> None:
        """Publishes the requests that have ended, and ends the thread; waits at most `wait_s`."""
        self._queue.close()
        self._thread.join(wait_s)

    def end(self, reason: str) -> None:
        """Ends tracing for good, and logs the reason once."""
        if self.is_on:
            self.is_on = False
            self._queue.close()
            self._lost["steps that waited"] += self._queue.clear()
            log.error("specctl: tracing ended, serving goes on: %s", reason)

    def _failed(self, error: BaseException) -> None:
        self.end(
            error.line if isinstance(error, SpecctlError) else f"{type(error).__name__}: {error}"
        )

    def _run(self) -> None:
        super()._run()
        self._lost += Counter({"requests that had not ended": len(self.source.unfinished())})
        if self._writer is not None:
            self._writer.close()

    def _wait(self) -> None:
        super()._wait()
        if self._max_bytes is not None and self.num_bytes >= self._max_bytes:
            raise OutputError(f"{self.num_bytes} bytes are written, of at most {self._max_bytes}")
