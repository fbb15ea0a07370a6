"""Collection by many workers: Ray actors that load the pair once and write one trace set.

    driver: queue of prompts ──a small batch──► worker: collect, commit a segment when it is due
            held by whom     ◄─committed ids──          (as one process would)

A prompt is finished when a segment names it; there is no other record. What a lost worker held is
looked up there: what was committed counts, the rest goes back into the queue. Should a worker that
was taken for dead commit after all, readers count the first segment (docs/trace-format.md).
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any, Literal, NamedTuple

from specctl.collect.config import CollectConfig, WhenFull
from specctl.collect.dense.collection import DenseCollection, DenseSummary, answered, dense_header
from specctl.collect.dense.trees import DenseDrafting
from specctl.collect.live import CollectSummary, LiveCollection, header_of
from specctl.collect.prompts import Prompt
from specctl.collect.ray_cluster import Cluster, cluster
from specctl.collect.responses import Responses
from specctl.collect.tokens import TokenTreatment
from specctl.collect.trace_writer import TraceWriter, finishing
from specctl.errors import ClusterError, SpecctlError, one_line
from specctl.formatting import Table, count
from specctl.logs.trace_files import Segment, open_place
from specctl.logs.trace_set import read_listing
from specctl.runtime.config import DecodingConfig
from specctl.runtime.policy_spec import NamedPolicy, check_policies
from specctl.runtime.requests import Metrics, pooled

BATCH_S = 5.0
"""Work that a worker takes at a time: what it may still finish after Ctrl-C."""
LOOK_S = 2.0
"""Between two looks at the nodes of a cluster, for room of further workers."""
STOP_S = 25.0
"""For the batches and last segments of all workers, after Ctrl-C or an error."""
WAIT_S = 120.0
"""Without any worker, until it is said that the cluster is busy."""
MAX_LOSSES = 3
"""Workers lost one after the other, for each that was asked for, without a prompt finished."""
SLOW = 0.5
"""A straggler's rate is below this share of the workers' median."""
Summary = CollectSummary | DenseSummary


@dataclass(frozen=True)
class Work:
    """What every worker does; all of it travels to other machines.

    Attributes:
        out: absolute, or `s3://bucket/prefix`. folder: where relative names of models begin.
        tokens: without the size of the vocabulary, which the pair has.
        responses: without any response: a batch brings its own.
    """

    settings: CollectConfig
    models: DecodingConfig
    out: str
    folder: str
    tokens: TokenTreatment
    policy: NamedPolicy | None = None
    responses: Responses | None = None


class Plan(NamedTuple):
    """The prompts to collect.

    Attributes:
        left: ids of those that fit and are not finished. num_planned: those that fit.
    """

    left: list[str]
    num_planned: int
    warnings: list[str]


class Report(NamedTuple):
    """What a worker has done since its last report.

    Attributes:
        committed: ids. summary: counts of work, without them. seconds: of the batch.
    """

    committed: list[str]
    summary: Summary
    seconds: float


class Worker:
    """One process: loads the pair and joins the set (`open`), then collects batches.

    A Ray actor runs its methods one after the other, so `close` waits for a batch.
    """

    def open(self, work: Work) -> tuple[str, int]:
        """Loads the pair and joins the set; the name of the machine and of the process.

        Raises:
            As `load_pair`, `TraceWriter.open` and the collections.
        """
        with suppress(OSError):
            os.chdir(work.folder)
        self._work, self._pair, self._committed = work, work.models.load_pair(), deque[str]()
        settings, decoding, pair = work.settings, work.models.settings, self._pair
        self._tokens = replace(work.tokens, vocab_size=pair.target.model.vocab_size)
        named: Any = {"workload": settings.workload, "tokens": self._tokens}
        if work.policy is not None:
            check_policies([work.policy], pair.fingerprint)
            header = header_of(pair, work.policy.policy, decoding, **named)
        else:
            shape = settings.dense_shape()
            header = dense_header(pair, shape, decoding, responses=work.responses, **named)
        self._writer = TraceWriter.open(
            work.out, header, resume=True, tokens=self._tokens, own_prompts=True
        )
        self._header_policy = header.policy
        self._collection = self._begin(settings.when_full or "block")
        return os.uname().nodename, os.getpid()

    def _begin(self, when_full: WhenFull) -> LiveCollection | DenseCollection:
        writer, pair, models = self._writer, self._pair, self._work.models
        decoding, batch_size = models.settings, models.batch_size
        if self._work.policy is None:
            drafting = DenseDrafting(pair, self._work.settings.dense_shape())
            counts = DenseSummary("", 0, 0)
            return DenseCollection(writer, pair, drafting, decoding, counts, batch_size, self._note)
        policy, live = self._work.policy.policy, CollectSummary("", 0, 0)
        return LiveCollection(
            writer, pair, policy, decoding, live, batch_size, when_full, self._note
        )

    def plan(self, prompts: Sequence[Prompt], responses: Responses | None) -> Plan:
        """Looks which of all prompts are left; one worker does it for all.

        Raises:
            As `DecodingConfig.with_room`, `TraceWriter.plan` and `answered`.
        """
        warnings: list[str] = []
        fitting = self._work.models.with_room(self._pair, prompts, warnings.append)
        listing = read_listing(self._work.out, verify=False)
        left = TraceWriter(self._writer.place, listing, self._tokens, self._header_policy).plan(
            fitting
        )
        if responses is not None:
            for prompt in left:
                response = responses.by_prompt[prompt.prompt_id]
                answered(self._pair.target, prompt, response, self._work.models.settings)
        return Plan([prompt.prompt_id for prompt in left], len(fitting), warnings)

    def collect(self, prompts: Sequence[Prompt], responses: Responses | None) -> Report:
        """Collects a batch. It is durable when a report names it, this one or a later one."""
        begun = time.perf_counter()
        self._writer.plan(prompts)  # notes digests of their texts
        if isinstance(self._collection, DenseCollection):
            self._collection.collect(prompts, responses)
        else:
            self._collection.collect(prompts)
        return self._report(time.perf_counter() - begun)

    def close(self) -> Report:
        """Publishes what is finished; more may be collected afterwards."""
        self._collection.close()
        return self._report(0.0)

    def _note(self, segment: Segment) -> None:
        self._committed.extend(segment.prompt_ids)

    def _report(self, seconds: float) -> Report:
        committed = []
        while self._committed:  # a thread may add
            committed.append(self._committed.popleft())
        summary = self._collection.summary
        copy = replace(summary)
        for one in fields(summary):
            if one.name not in ("out", "num_planned", "num_skipped", "num_committed"):
                empty = Metrics() if one.name == "metrics" else 0
                setattr(summary, one.name, empty)
        return Report(committed, copy, seconds)


# --------------------------------------------------------------------------- the driver


def collect_on_ray(
    work: Work,
    prompts: Sequence[Prompt],
    responses: Responses | None = None,
    *,
    on_commit: Callable[[int], None],
    warn: Callable[[str], None],
) -> CrewSummary:
    """Collects with as many workers, and where, as the options say; see `Crew.run`.

    Raises:
        UsageError, ClusterError: see `ray_cluster.cluster`; no worker was started.
        SpecctlError: as `Crew.run`.
    """
    settings, models = work.settings, work.models
    place, threads = open_place(work.out), models.threads or 1
    with cluster(
        settings.workers,
        settings.ray,
        threads=threads,
        gpus=settings.gpus_per_worker,
        device=models.device,
    ) as found:
        root = None if place.root is None else place.root.absolute()
        if not found.is_own:
            found.check_nodes(root)
        changes = {"threads": threads} | ({} if found.needs.gpus else {"device": "cpu"})
        there = replace(
            work,
            models=models.model_copy(update=changes),
            out=work.out if root is None else str(root),
            responses=None if responses is None else replace(responses, by_prompt={}),
        )
        crew = Crew(
            found,
            there,
            prompts,
            num_workers=settings.workers,
            responses=responses,
            on_commit=on_commit,
            warn=warn,
        )
        summary = crew.run()
    summary.counts.out = work.out
    return summary


Doing = Literal["open", "plan", "collect", "close", "nothing"]


@dataclass
class Hand:
    """A worker as the driver knows it.

    Attributes:
        ref: of the call that it is in. doing: which one. since: when it began, of the clock
            `time.monotonic`.
        held: prompts given to it that no report named yet, by id. num_batch: of the last batch.
        num_prompts, seconds: collected in all.
    """

    number: int
    actor: Any
    ref: Any
    doing: Doing = "open"
    host: str = ""
    pid: int = 0
    held: dict[str, Prompt] = field(default_factory=dict)
    num_batch: int = 0
    num_prompts: int = 0
    seconds: float = 0.0
    idle_since: float | None = None
    is_lost: bool = False

    @property
    def rate(self) -> float:
        """Prompts a second, 0 before the first batch is through."""
        return self.num_prompts / self.seconds if self.seconds else 0.0


@dataclass
class CrewSummary:
    """The counts of all workers together, and each worker's own.

    Attributes:
        seconds: of the whole crew, loading included. tail_s: from when the first worker had nothing
            left to do, to the end.
    """

    counts: Summary
    hands: list[Hand]
    num_requeued: int
    seconds: float
    tail_s: float

    @property
    def stragglers(self) -> list[int]:
        """Numbers of the workers that were slow."""
        rates = {hand.number: hand.rate for hand in self.hands if hand.rate}
        return [n for n, rate in rates.items() if rate < SLOW * median(rates.values())]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.counts.to_json(),
            "workers": [
                {
                    "worker": hand.number,
                    "host": hand.host,
                    "num_prompts": hand.num_prompts,
                    "seconds": hand.seconds,
                    "prompts_per_s": hand.rate,
                    "is_lost": hand.is_lost,
                    "is_straggler": hand.number in self.stragglers,
                }
                for hand in self.hands
            ],
            "num_requeued": self.num_requeued,
            "crew_seconds": self.seconds,
            "tail_s": self.tail_s,
        }

    def parts(self) -> list[Any]:
        """For a person: the counts, and a table of the workers."""
        lost = sum(hand.is_lost for hand in self.hands)
        words = [self.counts.render()]
        if lost:
            words.append(
                f"{count(lost, 'worker')} lost; {self.num_requeued} prompts given to others"
            )
        if self.stragglers:
            words.append(f"stragglers: {', '.join(map(str, self.stragglers))}")
        rows = [
            (
                str(hand.number) + (" (lost)" if hand.is_lost else ""),
                hand.host,
                f"{hand.num_prompts:,}",
                f"{hand.rate:.2f}",
            )
            for hand in self.hands
        ]
        legend = f"{self.seconds:.1f} s in all, loading included"
        if self.tail_s >= 1:
            legend += f"; {self.tail_s:.1f} s from the first worker without work to the end"
        return [
            "\n".join(words),
            Table("", ("worker", "host", "prompts", "prompts/s"), rows, legend, 2),
        ]


class Crew:
    """Spreads prompts over workers until each of them is finished once.

    Args:
        num_workers: None: as many as the cluster has room for, again and again.
        on_commit: called with the number of prompts that have become durable.
        warn: takes a line.
    """

    def __init__(
        self,
        cluster: Cluster,
        work: Work,
        prompts: Sequence[Prompt],
        *,
        num_workers: int | None = None,
        responses: Responses | None = None,
        on_commit: Callable[[int], None] = lambda num_prompts: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.hands: list[Hand] = []
        self._cluster, self._work, self._prompts = cluster, work, list(prompts)
        self._num_workers, self._responses = num_workers, responses
        self._on_commit, self._warn = on_commit, warn
        self._queue: deque[Prompt] | None = None  # before it is planned
        kind = CollectSummary if work.policy is not None else DenseSummary
        self.counts: Summary = kind(work.out, len(prompts), 0)
        self._num_requeued, self._num_left_out, self._num_losses = 0, 0, 0
        self._begun = time.monotonic()
        self._looked_at, self._room, self._has_waited = -math.inf, 1, False

    def run(self) -> CrewSummary:
        """Collects all prompts.

        Raises:
            ClusterError: workers are lost one after the other.
            SpecctlError: what a worker refused; finished prompts are kept, as behind Ctrl-C.
        """
        try:
            while self._num_open:
                self._hire()
                self._hear()
                for hand in self._alive:
                    self._give(hand)
        except BaseException:
            self._let_finish()
            raise
        finally:
            for hand in self._alive:
                self._cluster.ray.kill(hand.actor)
        if isinstance(self.counts, DenseSummary):  # of workers that draft at one time
            self.counts.seconds /= max(1, sum(hand.seconds > 0 for hand in self.hands))
        end = time.monotonic()
        idle = [hand.idle_since for hand in self._alive if hand.idle_since is not None]
        hands = [hand for hand in self.hands if hand.pid]
        tail_s = end - min(idle, default=end)
        return CrewSummary(self.counts, hands, self._num_requeued, end - self._begun, tail_s)

    @property
    def _alive(self) -> list[Hand]:
        return [hand for hand in self.hands if not hand.is_lost]

    @property
    def _num_open(self) -> int:
        """Prompts that are not finished."""
        queued = self._prompts if self._queue is None else self._queue
        return len(queued) + sum(len(hand.held) for hand in self._alive)

    # ----------------------------------------------------------------- workers

    def _hire(self) -> None:
        """Starts workers where some are missing; Ray places them as soon as there is room."""
        now = time.monotonic()
        if self._num_workers is None and now - self._looked_at > LOOK_S:
            self._looked_at, self._room = now, self._cluster.room()
        wanted = (self._num_workers or self._room) - self._num_left_out
        needs = self._cluster.needs
        while len(self._alive) < min(wanted, self._num_open):
            kind = self._cluster.ray.remote(Worker)
            actor = kind.options(num_cpus=needs.cpus, num_gpus=needs.gpus).remote()
            self.hands.append(Hand(len(self.hands) + 1, actor, actor.open.remote(self._work)))
        if now - self._begun > WAIT_S and not (self._has_waited or any(h.pid for h in self.hands)):
            self._has_waited = True
            self._warn(f"no worker runs yet; others may use the cluster ({needs} are needed)")

    def _hear(self) -> None:
        """Waits for a worker, and takes what it says."""
        ray = self._cluster.ray
        refs = {hand.ref: hand for hand in self._alive if hand.ref is not None}
        if not refs:
            time.sleep(LOOK_S)  # all nodes have left; others may come
            return
        done, _ = ray.wait(list(refs), timeout=LOOK_S)
        for ref in done:
            hand, refs[ref].ref = refs[ref], None
            try:
                found = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                self._take_refusal(hand, error.cause)
            except ray.exceptions.RayError as error:
                self._take_loss(hand, error)
            else:
                self._take(hand, found)

    def _take(self, hand: Hand, found: Any) -> None:
        doing, hand.doing = hand.doing, "nothing"
        if doing == "open":
            hand.host, hand.pid = found
        elif doing == "plan":
            for line in found.warnings:
                self._warn(line)
            left = set(found.left)
            self._queue = deque(p for p in self._prompts if p.prompt_id in left)
            self.counts.num_planned = found.num_planned
            self.counts.num_skipped = found.num_planned - len(left)
        else:
            self._take_report(hand, found, is_last=doing == "close")

    def _take_report(self, hand: Hand, report: Report, *, is_last: bool) -> None:
        hand.seconds += report.seconds
        hand.num_prompts += hand.num_batch
        hand.num_batch = 0
        self._finish(hand, report.committed)
        add(self.counts, report.summary)
        if is_last:  # the others were dropped, and are counted
            assert not hand.held or self._work.settings.when_full == "drop"
            hand.held.clear()

    def _finish(self, hand: Hand, prompt_ids: Sequence[str]) -> None:
        for prompt_id in prompt_ids:
            del hand.held[prompt_id]
        if prompt_ids:
            self._num_losses = 0
            self.counts.num_committed += len(prompt_ids)
            self._on_commit(len(prompt_ids))

    def _take_loss(self, hand: Hand, error: Exception) -> None:
        """What it held and did not commit goes to others; the set says which."""
        ray = self._cluster.ray
        ray.kill(hand.actor)  # where it was only out of reach
        hand.is_lost = True
        if hand.held:
            finished = set(read_listing(self._work.out, verify=False).prompt_ids)
            self._finish(hand, [prompt for prompt in hand.held if prompt in finished])
            self._num_requeued += len(hand.held)
            assert self._queue is not None, "batches come from it"
            self._queue.extendleft(reversed(hand.held.values()))
        self._num_losses += 1
        if self._num_losses > MAX_LOSSES * max(1, self._num_workers or self._room):
            raise ClusterError(
                f"worker {hand.number} on {hand.host or 'a node'}",
                expected="workers that live",
                found=f"{self._num_losses} lost without a prompt finished; the last: "
                f"{one_line(str(error))}",
                fix="see the memory of the nodes and Ray's logs; then go on with --resume",
            )

    def _take_refusal(self, hand: Hand, error: Exception) -> None:
        """A worker that cannot join others' work is left out; any other refusal ends the run."""
        hand.is_lost = True
        self._cluster.ray.kill(hand.actor)
        others = any(one.pid for one in self._alive)
        if hand.doing != "open" or not others or not isinstance(error, SpecctlError):
            raise error from None
        self._num_left_out += 1
        self._warn(f"worker {hand.number} is left out: {error}")

    # ----------------------------------------------------------------- prompts

    def _give(self, hand: Hand) -> None:
        """The next call of a worker that waits."""
        if hand.ref is not None:
            return
        if self._queue is None:
            if all(one.doing != "plan" for one in self._alive):
                self._call(hand, "plan", self._prompts, self._responses)
        elif self._queue:
            hand.idle_since = None
            batch = [self._queue.popleft() for _ in range(self._batch_size(hand))]
            hand.held |= {prompt.prompt_id: prompt for prompt in batch}
            hand.num_batch = len(batch)
            self._call(hand, "collect", batch, self._responses_of(batch))
        elif hand.held:
            self._call(hand, "close")
        elif hand.idle_since is None:
            hand.idle_since = time.monotonic()

    def _call(self, hand: Hand, doing: Doing, *arguments: Any) -> None:
        hand.doing, hand.ref = doing, getattr(hand.actor, doing).remote(*arguments)

    def _batch_size(self, hand: Hand) -> int:
        """Prompts of `BATCH_S`, fewer near the end, so that all workers end together."""
        assert self._queue is not None
        together = self._work.models.batch_size
        least = 1 if together == 1 else 4 * together
        fair = math.ceil(len(self._queue) / (2 * len(self._alive)))
        return min(len(self._queue), max(least, min(int(hand.rate * BATCH_S), fair)))

    def _responses_of(self, prompts: Sequence[Prompt]) -> Responses | None:
        if self._responses is None:
            return None
        by_prompt = self._responses.by_prompt
        chosen = {prompt.prompt_id: by_prompt[prompt.prompt_id] for prompt in prompts}
        return replace(self._responses, by_prompt=chosen)

    def _let_finish(self) -> None:
        """Batches end and are published, within `STOP_S`."""
        ray = self._cluster.ray
        with finishing(), suppress(ray.exceptions.RayError):
            refs = [hand.actor.close.remote() for hand in self._alive if hand.held]
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=STOP_S)


def add(total: Summary, part: Summary) -> None:
    """Adds what a worker counted."""
    for one in fields(part):
        if one.name in ("out", "num_planned", "num_skipped", "num_committed"):
            continue
        ours, theirs = getattr(total, one.name), getattr(part, one.name)
        both = pooled([ours, theirs]) if one.name == "metrics" else ours + theirs
        setattr(total, one.name, both)
