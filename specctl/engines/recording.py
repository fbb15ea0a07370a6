"""Steps of an engine as rows of a trace set: the rounds that ran, or a dense log of chains.

    engine's thread    Step: logits as they came, a few numbers ──► queue
    writing thread     every `READ_BYTES` of logits or `STEPS_TOGETHER`: rows, held until their
                       request ends
                       every `FLUSH_S` or `FLUSH_BYTES`: requests that have ended ──► a segment

The engine never waits for this and never fails by it. Where rows cannot be written, or too many
wait, tracing ends: that is logged once, and `Recorder.lost` counts what was not written.

Both threads share Python's interpreter lock, and an engine that waits for it at each of its calls
is slow. So no step wakes the thread, and logits and rows of many steps are taken at once, in few
calls: large ones do not hold the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.collect.dense.labels import continuations, label_paths
from specctl.collect.dense.trees import slot_columns
from specctl.collect.dense.trees import to_tables as dense_tables
from specctl.collect.round_rows import LOGIT_TENSORS, HeldRows, RoundRows, join, to_tables
from specctl.collect.trace_writer import FLUSH_BYTES, FLUSH_S, TraceWriter
from specctl.engines.steps import Chains, Ranks, ReadStep, Step
from specctl.logs.parquet import Tables, join_tables
from specctl.policy import FullTree, Policy, policy_digest
from specctl.policy.growing import Growth
from specctl.policy.rules import Frontier
from specctl.runtime.requests import Request
from specctl.tree import POOL_COLUMNS, Children, DraftPool

log = logging.getLogger("specctl.engines")
LOOK_S = 0.05
"""Seconds between looks at what waits. A thread that each step woke would take the lock at once."""
READ_BYTES = 16 << 20
"""Logits that are read together, or of one step where it has more."""
MAX_WAITING = 4096
"""Steps that may wait for the writing thread."""
MAX_LOGIT_BYTES = 256 << 20
"""Logits that may wait for it; beyond, the engine's thread reads its own."""
UNDRAFTED = "requests with an undrafted position"
MAX_HELD_BYTES = 1 << 30
"""Memory of rows that wait for the ends of their requests."""
STEPS_TOGETHER = 64
"""Steps that are read, and made rows of, at once where their logits are small."""
OBJECT_BYTES = 1000
"""Python's objects of a held round or position, about."""


class Publication(NamedTuple):
    """All rows of some requests that have ended, of which the policy decided the last rounds."""

    request_ids: set[str]
    tables: Tables
    policy: Policy


# --------------------------------------------------------------------------- rounds as they run


class Rounds(NamedTuple):
    """The rounds of a step: of some rows of `answered`, with the tokens that each text kept."""

    step: ReadStep
    rows: list[int]
    num_emitted: list[int]


class LiveLog:
    """The rounds that the engine runs.

    Args:
        greedy: the target's tokens are its likeliest. Else nobody knows what it would have drawn
            behind a refused token.
    """

    num_left_out = 0  # no request

    def __init__(self, *, greedy: bool) -> None:
        self._greedy = greedy
        self._rounds: list[Rounds] = []  # of which no rows were made yet
        self._held = HeldRows()
        self._num_rounds: Counter[str] = Counter()
        self._policies: dict[str, tuple[str, Policy]] = {}  # with digests, of the last rounds
        self._ended: set[str] = set()

    @property
    def num_running(self) -> int:
        """Requests with rounds that have not ended."""
        return len(self._policies.keys() - self._ended)

    @property
    def held_bytes(self) -> int:
        """Memory of rows, about."""
        num_rows = sum(len(part.headings) for part in self._held.parts)
        return self._held.size_bytes + num_rows * OBJECT_BYTES

    def take(self, step: ReadStep) -> None:
        """Adds the rounds of a step."""
        self._ended.update(step.ended)
        kept = [one.end.kept(given) for one, given in zip(step.answered, step.tokens, strict=True)]
        pairs = zip(step.answered, kept, strict=True)
        self._ended.update(one.request_id for one, (_, is_end) in pairs if is_end)
        rows = [row for row, one in enumerate(step.answered) if one.prompt is None]
        if rows:
            self._rounds.append(Rounds(step, rows, [len(kept[row][0]) for row in rows]))
            names = (step.answered[row].request_id for row in rows)
            self._policies.update(dict.fromkeys(names, (step.digest, step.policy)))
            if len(self._rounds) >= STEPS_TOGETHER:
                self._make_rows()

    def publish(self) -> list[Publication]:
        """The requests that have ended, which are held no longer."""
        self._make_rows()
        ended, self._ended = self._ended & self._policies.keys(), set()
        policies, names = dict[str, Policy](), defaultdict[str, set[str]](set)
        for name in ended:
            digest, policies[digest] = self._policies.pop(name)
            names[digest].add(name)
            del self._num_rounds[name]
        return [  # a segment has one policy
            Publication(names[digest], to_tables(join(self._held.take(names[digest]))), policy)
            for digest, policy in policies.items()
        ]

    def _make_rows(self) -> None:
        run, self._rounds = self._rounds, []
        if run:
            self._held.parts.append(self._rows(run))

    def _rows(self, run: list[Rounds]) -> RoundRows:
        """The rows of steps in the form of `collect`: a chain is a tree of width one."""
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
        all_chains = [step.chains for step in steps]
        chains = Chains(*(_joined(column, 0) for column in zip(*all_chains, strict=True)))
        offered = torch.from_numpy(np.concatenate([step.offered for step in steps]))
        tokens = [step.tokens[row] for step, rows, _ in run for row in rows]

        has_draft, at = draft_row >= 0, draft_row.clamp(min=0)
        offered = offered[at] * has_draft if len(offered) else 0 * at
        pool = chain_pool(root_ids, chains, at, offered)
        view = pool
        sampled = torch.from_numpy(_joined([np.array([one]) for one in tokens], -1))
        depth = view.depth
        num_admitted = (sampled >= 0).sum(1) - 1
        slots = torch.arange(max(sampled.shape[1], int(num_drafted.max()) + 1))
        slots = slots.expand(len(sampled), -1)
        target_ids = torch.full_like(slots, -1)
        target_ids[:, : sampled.shape[1]] = sampled
        # The node at depth d is judged by the request's row of logits number d, its parent's.
        seen = (depth >= 1) & (depth <= num_drafted[:, None] + 1) & has_draft[:, None]
        views = _views(steps, first[:, None] + depth - 1)
        # Down to the first refused token the text says what was drawn; behind it the likeliest
        # token would have been, where there is one.
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
            **{name: getattr(view, name) for name in POOL_COLUMNS},
            "target_seen": seen,
            "match_known": seen & (is_drawn | ~is_tied if self._greedy else is_drawn),
            "node_match": seen & torch.where(is_drawn, drawn == view.token_ids, is_best),
            **views,
        }
        return RoundRows(headings, tensors)


def _joined(parts: Sequence[NDArray[Any]], fill: int) -> NDArray[Any]:
    """`[R, W]`: the rows of all parts, filled up to the widest."""
    shape = sum(map(len, parts)), max(part.shape[1] for part in parts)
    whole, end = np.full(shape, fill, parts[0].dtype), 0
    for part in parts:
        whole[end : end + len(part), : part.shape[1]] = part
        end += len(part)
    return whole


def chain_pool(root_ids: Tensor, chains: Chains, rows: Tensor, offered: Tensor) -> DraftPool:
    """A pool of R chains.

    Args:
        root_ids: `[R]` int64. rows: `[R]` int64, of `chains`. offered: `[R]` int64, levels that
            each one has.
    """
    columns = [torch.from_numpy(one) for one in chains]
    levels = columns[0].shape[1]
    growth = Growth(root_ids, 1 + levels)
    for depth in range(1, 1 + levels):
        ids, logp, entropy, topk_entropy = (one[rows, depth - 1, None] for one in columns)
        parent = torch.full_like(rows, growth.level.start)[:, None]
        children = Children(ids[..., None], logp[..., None], entropy, topk_entropy)
        growth.append(Frontier(parent, (offered >= depth)[:, None]), children)
    return growth.level.pool


def _views(steps: Sequence[ReadStep], at: Tensor) -> dict[str, Tensor]:
    """`LOGIT_TENSORS` of nodes, `[R, P]`, of which `at` says the row of logits; of any value where
    the target saw nothing."""
    ranks = [step.ranks for step in steps if step.ranks is not None]
    logp, rank, top_two = (
        torch.from_numpy(np.concatenate(parts)) for parts in list(zip(*ranks, strict=True))[:3]
    )
    columns, at = (logp[:, 0], rank[:, 0], *top_two.unbind(-1)), at.clamp(0, len(logp) - 1)
    return {name: one[at] for name, one in zip(LOGIT_TENSORS, columns, strict=True)}


# --------------------------------------------------------------------------- every position


@dataclass
class DenseText:
    """A text while it grows.

    Attributes:
        token_ids: emitted. drafts: of each position, the columns of its chain, `[K]` each.
        ranks: of each emitted token, rows of `Ranks` where it was drawn.
    """

    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    drafts: dict[int, Chains] = field(default_factory=dict)
    ranks: list[Ranks] = field(default_factory=list)


class DenseLog:
    """The chain that would be drafted behind every token of a text, of which none is verified.

    Args:
        depth: K, tokens of each chain.
    """

    def __init__(self, depth: int) -> None:
        self.shape = FullTree(depth=depth, top_k=1)
        self.policy = Policy(shape=self.shape)
        self._texts: dict[str, DenseText] = {}
        self._ready: dict[str, Tables] = {}
        self.num_left_out = 0

    @property
    def num_running(self) -> int:
        return len(self._texts)

    @property
    def held_bytes(self) -> int:
        held = sum(len(text.token_ids) for text in self._texts.values()) * OBJECT_BYTES
        ready = (rows.nbytes for tables in self._ready.values() for rows in tables.values())
        return held + sum(map(int, ready))

    def take(self, step: ReadStep) -> None:
        is_drafted = step.chains.logp.shape[1] == self.shape.depth
        for row, (one, given) in enumerate(zip(step.answered, step.tokens, strict=True)):
            if one.prompt is not None:
                self._texts[one.request_id] = DenseText(one.prompt)
            text = self._texts.get(one.request_id)
            if text is None:  # its beginning was not seen
                continue
            if one.draft_row >= 0 and is_drafted:
                text.drafts[one.position] = Chains(*(c[one.draft_row] for c in step.chains))
            kept, is_end = one.end.kept(given)
            text.token_ids += kept
            if step.ranks is not None:
                text.ranks.append(Ranks(*(values[row] for values in step.ranks)))
            if is_end:
                self._end(one.request_id)
        for name in step.ended:
            self._end(name)

    def publish(self) -> list[Publication]:
        ready, self._ready = self._ready, {}
        tables = join_tables([*ready.values()])
        return [Publication(set(ready), tables, self.policy)] if ready else []

    def _end(self, name: str) -> None:
        text = self._texts.pop(name, None)
        if text is None:
            return
        size = len(text.token_ids)
        if any(position not in text.drafts for position in range(1, size)):
            self.num_left_out += 1  # the engine stops drafting near its longest text
        else:
            self._ready[name] = self._tables(name, text) if size > 1 else {}

    def _tables(self, name: str, text: DenseText) -> Tables:
        token_ids = torch.tensor([*text.prompt, *text.token_ids])
        size, prompt = len(text.token_ids), len(text.prompt)
        roots = range(prompt, prompt + size - 1)
        drafts = [text.drafts[position] for position in range(1, size)]
        chains, rows = Chains(*map(np.stack, zip(*drafts, strict=True))), torch.arange(len(roots))
        always = torch.full_like(rows, self.shape.depth)
        view = chain_pool(token_ids[roots.start : roots.stop], chains, rows, always)
        labels = label_paths(view, continuations(token_ids, roots, self.shape.depth))
        # Behind the last token the engine does not run the target.
        labels = replace(labels, seen=labels.seen & (rows[:, None] + view.depth < size))
        row, node = labels.seen.nonzero(as_tuple=True)
        above = view.depth[row, node] - 1
        logp, rank, top_two, entropy = (
            torch.from_numpy(np.stack(one)) for one in zip(*text.ranks, strict=True)
        )
        at = row + above + 1  # of the emitted token that this one would be
        top1, top2 = top_two[at].unbind(1)
        columns = {
            "text": token_ids,
            **slot_columns(view, labels),
            "target_logp": logp[at, above],
            "target_rank": rank[at, above],
            "target_top1_logit": top1,
            "target_top2_logit": top2,
            "target_ratio": top2 / top1,
            "target_margin": top1 - top2,
            "target_entropy": entropy[at],
        }
        request = Request(name, text.prompt, size, prompt_id=name)
        return dense_tables(request, roots, columns, self.shape, policy_digest(self.policy))


Log = LiveLog | DenseLog

# --------------------------------------------------------------------------- the writing thread


class Recorder:
    """Writes what steps tell into a trace set, from a thread of its own.

    Args:
        read: `read_steps` of this engine.
        open_writer: opens the set; called in the thread.
        max_bytes: of published segments together; None: no bound.

    Attributes:
        lost: rows and requests that were not written, by reason.
        num_bytes: published.
    """

    def __init__(
        self,
        log_: Log,
        read: Callable[[Sequence[Step]], list[ReadStep]],
        open_writer: Callable[[], TraceWriter],
        max_bytes: int | None,
    ) -> None:
        self._log, self._read, self._open_writer = log_, read, open_writer
        self._max_bytes = max_bytes
        self._writer: TraceWriter | None = None
        self._steps: deque[Step | ReadStep] = deque()
        self._closing = threading.Event()
        self._bytes_in = self._bytes_out = 0  # of logits; one is the engine's, one the thread's
        self._left_bytes = 0  # held behind the last segment
        self.lost: Counter[str] = Counter()
        self.num_bytes = 0
        self.is_on = True
        self._thread = threading.Thread(target=self._run, name="specctl-traces", daemon=True)
        self._thread.start()

    def put(self, step: Step) -> None:
        """Hands over a step; returns at once."""
        if not self.is_on:
            self.lost["steps after tracing ended"] += 1
        elif len(self._steps) >= MAX_WAITING:
            self.end(f"{MAX_WAITING} steps wait for a slow disk or store")
        elif self._bytes_in - self._bytes_out > MAX_LOGIT_BYTES:
            self._steps += self._read([step])
        else:
            self._bytes_in += step.size_bytes
            self._steps.append(step)

    def close(self, wait_s: float = 10.0) -> None:
        """Publishes the requests that have ended and ends the thread; waits at most so long."""
        self._closing.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        is_last = False
        try:
            with torch.inference_mode():
                self._writer = self._open_writer()
                while self.is_on and not is_last:
                    due = time.monotonic() + FLUSH_S
                    while self.is_on and not is_last and time.monotonic() < due:
                        is_last = self._closing.wait(LOOK_S)
                        num_bytes, num_steps = self._bytes_in - self._bytes_out, len(self._steps)
                        if num_bytes > READ_BYTES or num_steps >= STEPS_TOGETHER:
                            self._take()
                            if self._log.held_bytes - self._left_bytes > FLUSH_BYTES:
                                break
                    self._take()
                    self._publish()
                self.lost += Counter({"requests that had not ended": self._log.num_running})
        except Exception as error:  # serving goes on whatever it is
            self.end(f"{type(error).__name__}: {error}")
        finally:
            if self._writer is not None:
                self._writer.close()

    def _take(self) -> None:
        """Takes the steps that are there, as many together as `READ_BYTES` allow."""
        together: list[Step] = []
        size = 0
        while self._steps:
            try:
                step = self._steps.popleft()
            except IndexError:  # the engine's thread has ended tracing
                break
            if isinstance(step, Step):
                together.append(step)
                size += step.size_bytes
            if isinstance(step, ReadStep) or size > READ_BYTES:
                self._read_and_take(together)
                together, size = [], 0
            if isinstance(step, ReadStep):
                self._log.take(step)
        self._read_and_take(together)

    def _read_and_take(self, steps: list[Step]) -> None:
        for step in self._read(steps) if steps else ():
            self._log.take(step)
        self._bytes_out += sum(step.size_bytes for step in steps)

    def _publish(self) -> None:
        assert self._writer is not None
        for request_ids, tables, policy in self._log.publish():
            record = policy.model_dump(mode="json")
            self.num_bytes += self._writer.commit(request_ids, tables, policy=record).size_bytes
        self._left_bytes = self._log.held_bytes
        if self._log.num_left_out:
            if not self.lost[UNDRAFTED]:
                log.warning("specctl: the log leaves out %s, and counts them", UNDRAFTED)
            self.lost[UNDRAFTED] = self._log.num_left_out
        if self._max_bytes is not None and self.num_bytes >= self._max_bytes:
            self.end(f"{self.num_bytes} bytes are written, of at most {self._max_bytes}")
        elif self._left_bytes > MAX_HELD_BYTES:
            self.end(f"rows of running requests take {self._left_bytes} bytes")

    def end(self, reason: str) -> None:
        """Ends tracing for good, and says so once."""
        if self.is_on:
            self.is_on = False
            self.lost["steps that waited"] += len(self._steps)
            self._steps.clear()
            log.error("specctl: tracing ended, serving goes on: %s", reason)
