"""Steps of an engine as rows of a trace set: the rounds that ran, or a dense log of chains.

    engine's thread    Step: tensors on the device, a few numbers ──► queue
    writing thread     every `FLUSH_S`: rows of ended and running requests ──► a segment

The engine never waits for this and never fails by it. Where rows cannot be written, or too many
wait, tracing ends: that is logged once, and `Recorder.lost` counts what was not written.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specctl.collect.dense.labels import continuations, label_paths
from specctl.collect.dense.trees import slot_columns
from specctl.collect.dense.trees import to_tables as dense_tables
from specctl.collect.round_rows import LOGIT_TENSORS, RoundRows, join, to_tables
from specctl.collect.shipping import Event
from specctl.collect.trace_writer import TraceWriter
from specctl.engines.chains import DraftedLevel
from specctl.features import NODE_TENSORS
from specctl.logs.parquet import Tables, join_tables
from specctl.policy import FullTree, Policy, policy_digest
from specctl.policy.growing import Children, PoolBuffers, append_level, new_pool
from specctl.policy.rules import Frontier
from specctl.runtime.requests import Request

log = logging.getLogger("specctl.engines")
FLUSH_S = 0.7
"""Seconds between segments: with the writing of one, a kill costs at most a second of rows."""
MAX_WAITING = 4096
"""Steps that may wait for the writing thread."""
MAX_HELD = 4 << 20
"""Rows that may be held: about a gigabyte. A dense log holds those of unfinished requests."""


# --------------------------------------------------------------------------- what a step tells


@dataclass(frozen=True)
class Drafted:
    """Chains that a step drafted, a row for each of its B requests.

    Attributes:
        levels: L of them, of B tokens each. offered: `[B]` int64, levels that are a request's own.
        policy: that decided. digest: of it.
    """

    request_ids: list[str]
    levels: list[DraftedLevel]
    offered: Tensor
    policy: Policy
    digest: str


class TextEnd(NamedTuple):
    """Where a text ends: tokens that may still be emitted, and those that end it."""

    room: int
    stop_ids: Collection[int]

    def kept(self, token_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Of the tokens that a step gave, -1 padded, those that the text keeps; and whether it ends
        with them."""
        given = [one for one in token_ids if one >= 0]
        ends = (i + 1 for i, one in enumerate(given) if one in self.stop_ids)
        size = min(next(ends, self.room), self.room)
        return given[:size], size <= len(given)


class Answered(NamedTuple):
    """A request that a step gave tokens to.

    Attributes:
        request_id: its name in the set. root_id: token before the new ones.
        position: tokens emitted before. context: length of the text up to and with the root.
        draft_row: in the step's `Drafted`, -1 for none. num_drafted: draft tokens verified.
        prompt: ids, where the step read the end of the prompt; such a step is no round.
    """

    request_id: str
    root_id: int
    position: int
    context: int
    end: TextEnd
    draft_row: int
    num_drafted: int
    prompt: tuple[int, ...] | None = None


class Ranks(NamedTuple):
    """Drafted tokens in the target's eyes: T rows of logits, K tokens of each.

    Attributes:
        logp: `[T, K]` float32, of the distribution drawn from. rank: `[T, K]` int64, 1-based in
            the raw logits. top_two: `[T, 2]`, raw. entropy: `[T]` float32, nats, of the
            distribution drawn from; NaN in live logs, which lack it.
    """

    logp: Tensor
    rank: Tensor
    top_two: Tensor
    entropy: Tensor


@dataclass
class Step:
    """A step of the engine.

    Attributes:
        answered: its requests that are recorded, R of them; `sampled` `[R, S]` their new tokens,
            -1 padded.
        drafted: by the step before, and verified in this one.
        ranks: of a row of logits for each verified token, request by request, the root's first.
            A live log asks for the next draft token (K = 1); a dense one for those of all drafts
            that reach here, by their depth.
        mark: where the device has made all of these.
        columns: of the step, in each of its rows: `step_*`, `batch_size` and times.
        ended: names of requests that are known to have ended by now.
    """

    answered: list[Answered]
    sampled: Tensor
    drafted: Drafted
    ranks: Ranks | None
    mark: Event
    columns: dict[str, Any] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    def on_host(self) -> Step:
        """The same with its tensors on the host; waits for the device."""
        self.mark.synchronize()
        levels = [DraftedLevel(*(one.cpu() for one in level)) for level in self.drafted.levels]
        drafted = replace(self.drafted, levels=levels, offered=self.drafted.offered.cpu())
        ranks = None if self.ranks is None else Ranks(*(one.cpu() for one in self.ranks))
        return replace(self, sampled=self.sampled.cpu().long(), drafted=drafted, ranks=ranks)


class Publication(NamedTuple):
    """Rows to publish: of requests that have ended, and of those that go on."""

    finished: set[str]
    unfinished: set[str]
    tables: Tables
    policy: Policy


class Log(Protocol):
    """Rows of steps, held until they are published.

    Attributes:
        num_held: of them. num_left_out: requests that cannot be recorded.
    """

    num_held: int
    num_left_out: int

    def take(self, step: Step) -> None:
        """Adds what a step tells."""
        ...

    def publish(self) -> list[Publication]:
        """Everything that can be published now, which is held no longer."""
        ...


# --------------------------------------------------------------------------- rounds as they run


class LiveLog:
    """The rounds that the engine runs.

    Args:
        greedy: the target's tokens are its likeliest. Else nobody knows what it would have drawn
            behind a refused token.
    """

    def __init__(self, *, greedy: bool) -> None:
        self._greedy = greedy
        self._parts: list[tuple[Policy, RoundRows]] = []
        self._num_rounds: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._open: set[str] = set()
        self._policy: Policy | None = None
        self.num_held = self.num_left_out = 0

    def take(self, step: Step) -> None:
        self._ended.update(step.ended)
        tokens = step.sampled.tolist()
        kept = [one.end.kept(given) for one, given in zip(step.answered, tokens, strict=True)]
        pairs = zip(step.answered, kept, strict=True)
        self._ended.update(one.request_id for one, (_, is_end) in pairs if is_end)
        rows = [row for row, one in enumerate(step.answered) if one.prompt is None]
        if rows:
            num_emitted = torch.tensor([len(kept[row][0]) for row in rows])
            self._parts.append((step.drafted.policy, self._rows(step, rows, num_emitted)))
            self.num_held += len(rows)

    def publish(self) -> list[Publication]:
        parts, self._parts, self.num_held = self._parts, [], 0
        found: list[Publication] = []
        for _, group in groupby(parts, lambda part: id(part[0])):  # a segment has one policy
            run = list(group)
            policy, rows = run[0][0], join([one for _, one in run])
            names = {heading["request_id"] for heading in rows.headings}
            found.append(Publication(set(), names, to_tables(rows), policy))
            self._open, self._policy = self._open | names, policy
        finished, self._ended = self._ended & self._open, set()
        if finished and not found:  # they ended without another row
            assert self._policy is not None, "some rows were published"
            found.append(Publication(finished, set(), {}, self._policy))
        elif finished:
            last = found[-1]
            found[-1] = last._replace(finished=finished, unfinished=last.unfinished - finished)
        self._open -= finished
        for name in finished:
            self._num_rounds.pop(name, None)
        return found

    def _rows(self, step: Step, rows: list[int], num_emitted: Tensor) -> RoundRows:
        """The rows of R requests in the form of `collect`: a chain is a tree of width one."""
        drafted, answers = step.drafted, [step.answered[row] for row in rows]
        draft_row, num_drafted, root_ids = (
            torch.tensor([getattr(one, name) for one in answers])
            for name in ("draft_row", "num_drafted", "root_id")
        )
        has_draft, at = draft_row >= 0, draft_row.clamp(min=0)
        offered = drafted.offered[at] * has_draft if len(drafted.offered) else 0 * at
        pool = new_pool(root_ids, 1 + len(drafted.levels))
        for number, level in enumerate(drafted.levels, 1):
            parent = torch.full_like(at, pool.level_start)[:, None]
            add_level(pool, number, level, at, Frontier(parent, (offered >= number)[:, None]))
        view, sampled = pool.view(), step.sampled[rows]
        depth = view.tree.depth
        num_admitted = (sampled >= 0).sum(1) - 1
        slots = torch.arange(max(sampled.shape[1], int(num_drafted.max()) + 1))
        slots = slots.expand(len(rows), -1)
        target_ids = torch.full_like(slots, -1)
        target_ids[:, : sampled.shape[1]] = sampled
        # The node at depth d is judged by the request's row of logits number d, its parent's.
        seen = (depth >= 1) & (depth <= num_drafted[:, None] + 1) & has_draft[:, None]
        views = self._views(step, rows, depth)
        # Down to the first refused token the text says what was drawn; behind it the likeliest
        # token would have been, where there is one.
        is_drawn = depth <= num_admitted[:, None] + 1
        drawn = target_ids.gather(1, (depth - 1).clamp(0, target_ids.shape[1] - 1))
        is_best = views["target_rank"] == 1
        is_tied = is_best & (views["target_top1_logit"] == views["target_top2_logit"])
        names = [one.request_id for one in answers]
        round_idx = [self._num_rounds[name] for name in names]
        self._num_rounds.update(names)
        common = {
            "category": "",
            "turn": 0,
            "kind": "live",
            "offered_width": 1,
            "top_k": 1,
            "policy_digest": drafted.digest,
            **step.columns,
        }
        headings = [{"request_id": name, "prompt_id": name, **common} for name in names]
        tensors = {
            "round_idx": torch.tensor(round_idx),
            "position": torch.tensor([one.position for one in answers]),
            "context_tokens": torch.tensor([one.context for one in answers]),
            "offered_depth": offered,
            "num_emitted": num_emitted,
            "submitted": slots.masked_fill(slots > num_drafted[:, None], -1),
            "target_ids": target_ids,
            "path": slots.masked_fill(slots > num_admitted[:, None], -1),
            **vars(view.tree),
            **{name: getattr(view, name) for name in NODE_TENSORS},
            "target_seen": seen,
            "match_known": seen & (is_drawn | ~is_tied if self._greedy else is_drawn),
            "node_match": seen & torch.where(is_drawn, drawn == view.tree.token_ids, is_best),
            **views,
        }
        return RoundRows(headings, tensors)

    def _views(self, step: Step, rows: list[int], depth: Tensor) -> dict[str, Tensor]:
        """`LOGIT_TENSORS` of the nodes, `[R, P]`; of any value where the target saw nothing."""
        if step.ranks is None:
            zero = torch.zeros_like(depth)
            return {name: zero if name == "target_rank" else zero.float() for name in LOGIT_TENSORS}
        sizes = torch.tensor([one.num_drafted + 1 for one in step.answered])
        first = (sizes.cumsum(0) - sizes)[rows]
        at = (first[:, None] + depth - 1).clamp(0, len(step.ranks.logp) - 1)
        top1, top2 = step.ranks.top_two.unbind(-1)
        columns = (step.ranks.logp[:, 0], step.ranks.rank[:, 0], top1, top2)
        return {name: one[at] for name, one in zip(LOGIT_TENSORS, columns, strict=True)}


def add_level(
    pool: PoolBuffers, depth: int, level: DraftedLevel, rows: Tensor, frontier: Frontier
) -> None:
    """Appends a level to chains, of which each takes its row of the level."""
    ids, logp, entropy, topk_entropy = (one[rows][:, None] for one in level)
    children = Children(ids[..., None], logp[..., None], entropy, topk_entropy)
    append_level(pool, depth, frontier, children)


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
    drafts: dict[int, DraftedLevel] = field(default_factory=dict)
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
        self._ready: dict[str, list[Tables]] = {}
        self.num_held = self.num_left_out = 0

    def take(self, step: Step) -> None:
        columns = [torch.stack(one, 1) for one in zip(*step.drafted.levels, strict=True)]
        for row, (one, given) in enumerate(zip(step.answered, step.sampled.tolist(), strict=True)):
            if one.prompt is not None:
                self._texts[one.request_id] = DenseText(one.prompt)
            text = self._texts.get(one.request_id)
            if text is None:  # its beginning was not seen
                continue
            if one.draft_row >= 0 and len(columns):
                text.drafts[one.position] = DraftedLevel(*(c[one.draft_row] for c in columns))
            kept, is_end = one.end.kept(given)
            text.token_ids += kept
            if step.ranks is not None:
                text.ranks.append(Ranks(*(values[row] for values in step.ranks)))
            self.num_held += len(kept) * self.shape.depth
            if is_end:
                self._end(one.request_id)
        for name in step.ended:
            self._end(name)

    def publish(self) -> list[Publication]:
        ready, self._ready = self._ready, {}
        if not ready:
            return []
        tables = join_tables([part for parts in ready.values() for part in parts])
        return [Publication(set(ready), set(), tables, self.policy)]

    def _end(self, name: str) -> None:
        text = self._texts.pop(name, None)
        if text is None:
            return
        size = len(text.token_ids)
        self.num_held -= size * self.shape.depth
        depth = self.shape.depth
        if any(
            position not in text.drafts or len(text.drafts[position].logp) < depth
            for position in range(1, size)
        ):
            self.num_left_out += 1  # the engine stops drafting near its longest text
        else:
            self._ready[name] = [self._tables(name, text)] if size > 1 else []

    def _tables(self, name: str, text: DenseText) -> Tables:
        token_ids = torch.tensor([*text.prompt, *text.token_ids])
        size, prompt = len(text.token_ids), len(text.prompt)
        roots = range(prompt, prompt + size - 1)
        drafts = [text.drafts[position] for position in range(1, size)]
        levels = DraftedLevel(*(torch.stack(one) for one in zip(*drafts, strict=True)))
        pool = new_pool(token_ids[roots.start : roots.stop], 1 + self.shape.depth)
        rows, always = torch.arange(len(roots)), torch.ones(len(roots), 1, dtype=torch.bool)
        for depth in range(1, self.shape.depth + 1):
            level = DraftedLevel(*(one[:, depth - 1] for one in levels))
            parent = torch.full_like(rows, pool.level_start)[:, None]
            add_level(pool, depth, level, rows, Frontier(parent, always))
        view = pool.view()
        labels = label_paths(view.tree, continuations(token_ids, roots, self.shape.depth))
        # Behind the last token the engine does not run the target.
        labels = replace(labels, seen=labels.seen & (rows[:, None] + view.tree.depth < size))
        row, node = labels.seen.nonzero(as_tuple=True)
        above = view.tree.depth[row, node] - 1
        ranks = Ranks(*(torch.stack(one) for one in zip(*text.ranks, strict=True)))
        at = row + above + 1  # of the emitted token that this one would be
        top1, top2 = ranks.top_two[at].unbind(1)
        columns = {
            "text": token_ids,
            **slot_columns(view, labels),
            "target_logp": ranks.logp[at, above],
            "target_rank": ranks.rank[at, above],
            "target_top1_logit": top1,
            "target_top2_logit": top2,
            "target_ratio": top2 / top1,
            "target_margin": top1 - top2,
            "target_entropy": ranks.entropy[at],
        }
        request = Request(name, text.prompt, size, prompt_id=name)
        return dense_tables(request, roots, columns, self.shape, policy_digest(self.policy))


# --------------------------------------------------------------------------- the writing thread


class Recorder:
    """Writes what steps tell into a trace set, from a thread of its own.

    Args:
        open_writer: opens the set; called in the thread.
        max_bytes: of published segments together; None: no bound.

    Attributes:
        lost: rows and requests that were not written, by reason.
        num_bytes: published.
    """

    def __init__(
        self, log_: Log, open_writer: Callable[[], TraceWriter], max_bytes: int | None
    ) -> None:
        self._log, self._open_writer, self._max_bytes = log_, open_writer, max_bytes
        self._writer: TraceWriter | None = None
        self._steps: deque[Step] = deque()
        self._closing = threading.Event()
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
        else:
            self._steps.append(step)

    def close(self, wait_s: float = 10.0) -> None:
        """Publishes what is there and ends the thread; waits for it at most so long."""
        self._closing.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        is_last = False
        try:
            with torch.inference_mode():
                self._writer = self._open_writer()
                while self.is_on and not is_last:
                    is_last = self._closing.wait(FLUSH_S)
                    self._flush()
        except Exception as error:  # serving goes on whatever it is
            self.end(f"{type(error).__name__}: {error}")
        finally:
            if self._writer is not None:
                self._writer.close()

    def _flush(self) -> None:
        assert self._writer is not None
        while self._steps:
            self._log.take(self._steps.popleft().on_host())
        for finished, unfinished, tables, policy in self._log.publish():
            record = policy.model_dump(mode="json")
            names = sorted(unfinished)
            segment = self._writer.commit(finished, tables, open_ids=names, policy=record)
            self.num_bytes += segment.size_bytes
        if self._log.num_left_out:
            self.lost["requests with an undrafted position"] = self._log.num_left_out
        if self._max_bytes is not None and self.num_bytes >= self._max_bytes:
            self.end(f"{self.num_bytes} bytes are written, of at most {self._max_bytes}")
        elif self._log.num_held > MAX_HELD:
            self.end(f"{self._log.num_held} rows of unfinished requests wait")

    def end(self, reason: str) -> None:
        """Ends tracing for good, and says so once."""
        if self.is_on:
            self.is_on = False
            self.lost["steps that waited"] += len(self._steps)
            self._steps.clear()
            log.error("specctl: tracing ended, serving goes on: %s", reason)


def new_run_id() -> str:
    """The name of a run of an engine, in front of its requests' names."""
    return f"run-{secrets.token_hex(6)}"
