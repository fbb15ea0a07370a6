"""Collection by this process, or by Ray actors that write one trace set.

    driver: queue of prompts ──a batch──► worker: loads the pair once; collects the batch
            held by whom     ◄──counts──          and commits it, as one process would

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
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, NamedTuple

from specctl.collect.config import CollectConfig
from specctl.collect.dense import collect_dense
from specctl.collect.dense.collection import DenseSummary, answered, plain_decoder
from specctl.collect.live import CollectSummary, collect_live
from specctl.collect.prompts import Prompt
from specctl.collect.responses import Responses
from specctl.collect.tokens import TokenTreatment
from specctl.collect.trace_writer import TraceWriter, finishing
from specctl.errors import ClusterError, SpecctlError, one_line
from specctl.formatting import Table, count, listed
from specctl.logs.trace_files import open_place
from specctl.logs.trace_set import read_listing
from specctl.ray_cluster import Cluster, check_versions, cluster, looker
from specctl.runtime.api import Decoder
from specctl.runtime.config import DecodingConfig
from specctl.runtime.load import Pair
from specctl.runtime.policy_spec import NamedPolicy, check_policies

BATCH_S = 15.0
"""Work that a worker takes at a time: what its death costs, and what Ctrl-C waits for."""
LOOK_S = 2.0
"""Between two looks at the nodes of a cluster, for room of further workers."""
STOP_S = 25.0
"""For the batches of all workers, after Ctrl-C or an error."""
WAIT_S = 120.0
"""Without any worker, until it is said that the cluster is busy."""
MAX_LOSSES = 3
"""Workers lost one after the other, for each that was asked for, without a batch finished."""
SLOW = 0.5
"""A straggler's rate is below this share of the workers' median."""
Summary = CollectSummary | DenseSummary


@dataclass(frozen=True)
class Work:
    """What a collection does, here or on other machines.

    Attributes:
        out: a folder, absolute for other processes, or `s3://bucket/prefix`.
        tokens: without the size of the vocabulary, which the pair has.
        policy: None with `settings.dense`.
        folder: where relative names of models begin. software: versions that a worker must have.
    """

    settings: CollectConfig
    models: DecodingConfig
    out: str
    tokens: TokenTreatment
    policy: NamedPolicy | None = None
    folder: str = field(default_factory=os.getcwd)
    software: dict[str, str] = field(default_factory=lambda: looker()(None)[0])

    def decoder(self, pair: Pair) -> Decoder:
        """The decoder of `collect`.

        Raises:
            UsageError, ArtifactError: a policy that this pair cannot run.
        """
        if self.policy is None:
            return plain_decoder(pair, self.models.batch_size)
        check_policies([self.policy], pair.fingerprint)
        return Decoder(pair, self.policy.policy, batch_size=self.models.batch_size)

    def collect(
        self,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        responses: Responses | None = None,
        **more: Any,
    ) -> Summary:
        """Collects prompts that fit into the context.

        Args:
            more: as of `collect_live` and `collect_dense`, what is not an option.

        Raises:
            As those two.
        """
        pair, settings, decoding = decoder.pair, self.settings, self.models.settings
        more |= {
            "batch_size": self.models.batch_size,
            "tokens": replace(self.tokens, vocab_size=pair.target.model.vocab_size),
            "workload": settings.workload,
            "decoder": decoder,
        }
        if self.policy is None:
            shape, more["responses"] = settings.dense_shape(), responses
            return collect_dense(pair, prompts, decoding, self.out, shape, **more)
        policy, when_full = self.policy.policy, settings.when_full or "block"
        return collect_live(pair, prompts, policy, decoding, self.out, when_full=when_full, **more)


class Plan(NamedTuple):
    """Ids of the prompts that fit and are not finished, and the number of those that fit."""

    left: list[str]
    num_planned: int
    warnings: list[str]


class Worker:
    """One process, a Ray actor: loads the pair and joins the set (`open`), then collects."""

    def open(self, work: Work, responses: Responses | None) -> tuple[str, int]:
        """Loads the pair and joins the set; the name of the machine and of the process.

        Raises:
            As `check_versions`, `load_pair` and the collections.
        """
        host = os.uname().nodename
        check_versions(host, looker()(None)[0], work.software)
        with suppress(OSError):
            os.chdir(work.folder)
        self._work, self._decoder = work, work.decoder(work.models.load_pair())
        self.collect([], responses)
        return host, os.getpid()

    def plan(self, prompts: Sequence[Prompt], responses: Responses | None) -> Plan:
        """Looks which of all prompts are left; one worker does it for all.

        Raises:
            As `DecodingConfig.with_room`, `TraceWriter.plan` and `answered`.
        """
        work, warnings = self._work, list[str]()
        pair = self._decoder.pair
        fitting = work.models.with_room(pair, prompts, warnings.append)
        listing = read_listing(work.out, verify=False)
        writer = TraceWriter(listing.place, listing, work.tokens, listing.header.policy)
        left = writer.plan(fitting)
        writer.close()
        if responses is not None:
            for prompt in left:
                response = responses.by_prompt[prompt.prompt_id]
                answered(pair.target, prompt, response, work.models.settings)
        return Plan([prompt.prompt_id for prompt in left], len(fitting), warnings)

    def collect(
        self, prompts: Sequence[Prompt], responses: Responses | None
    ) -> tuple[Summary, float]:
        """Collects a batch, which is durable afterwards; its counts, and seconds."""
        begun = time.perf_counter()
        joins: Any = {"resume": True, "own_prompts": True}
        summary = self._work.collect(self._decoder, prompts, responses, **joins)
        return summary, time.perf_counter() - begun


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
    needs: Any = {"gpus": settings.gpus_per_worker, "device": models.device}
    with cluster(settings.workers, settings.ray, threads=threads, **needs) as found:
        root = None if place.root is None else place.root.absolute()
        if not found.is_own:
            found.check_nodes(root)
        models = models.model_copy(update={"threads": threads, "device": found.needs.device})
        there = replace(work, models=models, out=work.out if root is None else str(root))
        summary = Crew(found, there, prompts, responses, on_commit, warn).run()
        summary.counts.out = work.out
        return summary


Doing = Literal["open", "plan", "collect", "nothing"]


@dataclass
class Hand:
    """A worker as the driver knows it.

    Attributes:
        ref: of the call that it is in. doing: which one.
        batch: the prompts that it collects. num_prompts, seconds: of those before.
    """

    number: int
    actor: Any
    ref: Any
    doing: Doing = "open"
    host: str = ""
    pid: int = 0
    batch: Sequence[Prompt] = ()
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
        num_requeued: prompts that a lost worker left to others.
        seconds: of the whole crew. loading_s: of them until the first batch. tail_s: of them from
            when the first worker had nothing left to do.
    """

    counts: Summary
    hands: list[Hand] = field(default_factory=list)
    num_requeued: int = 0
    seconds: float = 0.0
    loading_s: float = 0.0
    tail_s: float = 0.0

    @property
    def stragglers(self) -> list[int]:
        """Numbers of the workers that were slow."""
        rates = {hand.number: hand.rate for hand in self.hands if hand.rate}
        return [n for n, rate in rates.items() if rate < SLOW * median(rates.values())]

    def to_json(self) -> dict[str, Any]:
        names = ("number", "host", "num_prompts", "seconds", "rate", "is_lost")
        return self.counts.to_json() | {
            "workers": [{name: getattr(hand, name) for name in names} for hand in self.hands],
            "stragglers": self.stragglers,
            "num_requeued": self.num_requeued,
            "crew_seconds": self.seconds,
            "loading_s": self.loading_s,
            "tail_s": self.tail_s,
        }

    def parts(self) -> list[Any]:
        """For a person: the counts, and a table of the workers."""
        lines, lost = [self.counts.render()], sum(hand.is_lost for hand in self.hands)
        if lost:
            given = count(self.num_requeued, "prompt")
            lines.append(f"{count(lost, 'worker')} lost; {given} given to others")
        if self.stragglers:
            lines.append(f"stragglers: {listed(map(str, self.stragglers))}")
        rows = [
            (f"{one.number}{' (lost)' * one.is_lost}", one.host, f"{one.num_prompts:,}", rate)
            for one in self.hands
            for rate in [f"{one.rate:.2f}"]
        ]
        legend = f"{self.seconds:.1f} s in all, {self.loading_s:.1f} s of them until the first "
        legend += f"batch and {self.tail_s:.1f} s since the first worker had nothing left to do"
        table = Table("", ("worker", "host", "prompts", "prompts/s"), rows, legend, 2)
        return ["\n".join(lines), table]


class Crew:
    """Spreads prompts over workers until each of them is finished once.

    Without a number of workers, there are as many as the cluster has room for, again and again.

    Args:
        on_commit: called with the number of prompts that have become durable.
        warn: takes a line.
    """

    def __init__(
        self,
        cluster: Cluster,
        work: Work,
        prompts: Sequence[Prompt],
        responses: Responses | None,
        on_commit: Callable[[int], None],
        warn: Callable[[str], None],
    ) -> None:
        kind = DenseSummary if work.policy is None else CollectSummary
        self.summary = CrewSummary(kind(work.out, len(prompts), 0))
        self._cluster, self._ray, self._work = cluster, cluster.ray, work
        self._prompts, self._responses = list(prompts), responses
        self._on_commit, self._warn = on_commit, warn
        self._queue: deque[Prompt] | None = None  # before it is planned
        self._hands = self.summary.hands
        self._num_left_out, self._num_losses = 0, 0
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
                self._ray.kill(hand.actor)
        found, end = self.summary, time.monotonic()
        if isinstance(found.counts, DenseSummary):  # of workers that draft at one time
            found.counts.seconds /= max(1, sum(hand.seconds > 0 for hand in self._hands))
        idle = [hand.idle_since for hand in self._alive if hand.idle_since is not None]
        found.seconds, found.tail_s = end - self._begun, end - min(idle, default=end)
        found.hands = [hand for hand in self._hands if hand.pid]
        return found

    @property
    def _alive(self) -> list[Hand]:
        return [hand for hand in self._hands if not hand.is_lost]

    @property
    def _num_open(self) -> int:
        """Prompts that are not finished."""
        queued = self._prompts if self._queue is None else self._queue
        return len(queued) + sum(len(hand.batch) for hand in self._alive)

    # ----------------------------------------------------------------- workers

    def _hire(self) -> None:
        """Starts workers where some are missing; Ray places them as soon as there is room."""
        now, needs, asked = time.monotonic(), self._cluster.needs, self._work.settings.workers
        if now - self._looked_at > LOOK_S:
            self._looked_at, self._room = now, asked or self._cluster.room()
        while len(self._alive) < min(self._room - self._num_left_out, self._num_open):
            kind = self._ray.remote(Worker).options(num_cpus=needs.cpus, num_gpus=needs.gpus)
            hand = Hand(len(self._hands) + 1, kind.remote(), None)
            self._hands.append(hand)
            self._call(hand, "open", self._work, self._responses_of([]))
        if now - self._begun > WAIT_S and not (self._has_waited or any(h.pid for h in self._hands)):
            self._has_waited = True
            self._warn(f"no worker runs yet; others may use the cluster ({needs} are needed)")

    def _hear(self) -> None:
        """Waits for a worker, and takes what it says."""
        refs = {hand.ref: hand for hand in self._alive if hand.ref is not None}
        if not refs:
            time.sleep(LOOK_S)  # all nodes have left; others may come
            return
        for ref in self._ray.wait(list(refs), timeout=LOOK_S)[0]:
            hand, refs[ref].ref = refs[ref], None
            try:
                found = self._ray.get(ref)
            except self._ray.exceptions.RayTaskError as error:
                self._take_refusal(hand, error.cause)
            except self._ray.exceptions.RayError as error:
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
            left, self.summary.loading_s = set(found.left), time.monotonic() - self._begun
            self._queue = deque(p for p in self._prompts if p.prompt_id in left)
            self.summary.counts.num_planned = found.num_planned
            self.summary.counts.num_skipped = found.num_planned - len(left)
        else:
            part, seconds = found
            hand.seconds += seconds
            hand.num_prompts += len(hand.batch)
            hand.batch, self._num_losses = (), 0
            self.summary.counts.add(part)
            self._on_commit(part.num_committed)

    def _take_loss(self, hand: Hand, error: Exception) -> None:
        """What it held and did not commit goes to others; the set says which."""
        self._ray.kill(hand.actor)  # where it was only out of reach
        hand.is_lost = True
        if hand.batch and self._queue is not None:
            finished = set(read_listing(self._work.out, verify=False).prompt_ids)
            left = [prompt for prompt in hand.batch if prompt.prompt_id not in finished]
            self.summary.counts.num_committed += len(hand.batch) - len(left)
            self._on_commit(len(hand.batch) - len(left))
            self.summary.num_requeued += len(left)
            self._queue.extendleft(reversed(left))
            hand.batch = ()
        self._num_losses += 1
        if self._num_losses > MAX_LOSSES * max(1, self._room):
            raise ClusterError(
                f"worker {hand.number} on {hand.host or 'a node'}",
                expected="workers that live",
                found=f"{self._num_losses} lost without a batch finished; the last: "
                f"{one_line(str(error))}",
                fix="see the memory of the nodes and Ray's logs; then go on with --resume",
            )

    def _take_refusal(self, hand: Hand, error: Exception) -> None:
        """A worker that cannot join others' work is left out; any other refusal ends the run."""
        hand.is_lost = True
        self._ray.kill(hand.actor)
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
            hand.batch = [self._queue.popleft() for _ in range(self._batch_size(hand))]
            self._call(hand, "collect", hand.batch, self._responses_of(hand.batch))
        elif hand.idle_since is None:
            hand.idle_since = time.monotonic()

    def _call(self, hand: Hand, doing: Doing, *arguments: Any) -> None:
        hand.doing, hand.ref = doing, getattr(hand.actor, doing).remote(*arguments)

    def _responses_of(self, prompts: Sequence[Prompt]) -> Responses | None:
        if self._responses is None:
            return None
        by_prompt = self._responses.by_prompt
        chosen = {prompt.prompt_id: by_prompt[prompt.prompt_id] for prompt in prompts}
        return replace(self._responses, by_prompt=chosen)

    def _batch_size(self, hand: Hand) -> int:
        """Prompts of `BATCH_S`, fewer near the end, so that all workers end together."""
        assert self._queue is not None
        together = self._work.models.batch_size
        least = 1 if together == 1 else 4 * together
        fair = math.ceil(len(self._queue) / (2 * len(self._alive)))
        return min(len(self._queue), max(least, min(int(hand.rate * BATCH_S), fair)))

    def _let_finish(self) -> None:
        """Batches end and are published, within `STOP_S`."""
        with finishing(), suppress(self._ray.exceptions.RayError):
            refs = [hand.ref for hand in self._alive if hand.batch and hand.ref is not None]
            if refs:
                self._ray.wait(refs, num_returns=len(refs), timeout=STOP_S)
