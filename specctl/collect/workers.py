"""Collection by this process, or by Ray actors that write one trace set.

    driver: prompts ──a batch──► ActorPool ──► worker: loads the pair once; collects the batch and
            counts  ◄────────────────────────          commits it, as one process would

A prompt is finished when a segment names it; there is no other record. Ray restarts a lost worker,
here or on another node, and repeats its batch; the new worker reads in the set what the lost one
had committed. If both commit a prompt, readers count the first segment (docs/trace-format.md).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, NamedTuple

from specctl.collect.cluster import Cluster, cluster
from specctl.collect.config import FINISHED, CollectConfig
from specctl.collect.dense import collect_dense
from specctl.collect.dense.collection import DenseSummary, answered, plain_decoder
from specctl.collect.live import LiveSummary, Summary, collect_live
from specctl.collect.prompts import Prompt
from specctl.collect.responses import Responses
from specctl.collect.trace_writer import TraceWriter, finishing
from specctl.errors import ClusterError, one_line
from specctl.formatting import count
from specctl.logs.trace_files import HEADER_NAME, open_place
from specctl.logs.trace_set import read_listing
from specctl.progress import advance
from specctl.runtime.api import Decoder
from specctl.runtime.config import DecodingConfig
from specctl.runtime.load import Pair
from specctl.runtime.words import NamedPolicy, check_policies
from specctl.version import __version__

log = logging.getLogger(__name__)
BATCHES, MOST_PROMPTS = 8, 64
"""Batches per worker, and the most prompts of one: the loss at a death, and the wait at Ctrl-C."""
RETRIES = 20
"""Times that Ray repeats a call of a lost worker. Calls fail until Ray has noticed a dead node."""
LOOK_S = 2.0
"""Time between checks of the cluster."""
STOP_S = 25.0
"""Time for all workers to finish their batches after Ctrl-C or an error."""
CLOCKS_S = 60.0
"""Largest difference of clocks; names of segments contain times."""


def versions_here() -> dict[str, str]:
    """Versions of the packages that determine a worker's rows."""
    return {"specctl": __version__} | {name: version(name) for name in ("torch", "transformers")}


@dataclass(frozen=True)
class Work:
    """A collection, for this or another process."""

    settings: CollectConfig
    models: DecodingConfig
    out: str  # a folder, absolute for other processes, or `s3://bucket/prefix`
    policy: NamedPolicy | None = None  # None: dense
    folder: str = field(default_factory=os.getcwd)  # relative names of models start here
    versions: dict[str, str] = field(default_factory=versions_here)  # required of workers

    def decoder(self, pair: Pair) -> Decoder:
        """The decoder of `collect`.

        Raises:
            UsageError, ArtifactError: a policy that this pair cannot run.
        """
        if self.policy is None:
            return plain_decoder(pair, self.models.batch_size)
        check_policies([self.policy], pair.fingerprint)
        return Decoder(pair, self.policy.policy, batch_size=self.models.batch_size)

    def counts(self, plan: Plan) -> Summary:
        """Counts of a plan of which nothing is done yet."""
        kind = DenseSummary if self.policy is None else LiveSummary
        return kind(self.out, plan.num_planned, plan.num_planned - len(plan.left))

    def collect(
        self,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        responses: Responses | None = None,
        **more: Any,
    ) -> Summary:
        """Collects prompts that fit into the context, by `collect_live` or `collect_dense`.

        Args:
            more: their parameters that are no options of the command.
        """
        pair, settings, decoding = decoder.pair, self.settings, self.models.settings
        more |= {
            "batch_size": self.models.batch_size,
            "tokens": settings.tokens,
            "workload": settings.workload,
            "decoder": decoder,
        }
        if self.policy is None:
            shape, more["responses"] = settings.dense_shape(), responses
            return collect_dense(pair, prompts, decoding, self.out, shape, **more)
        return collect_live(pair, prompts, self.policy.policy, decoding, self.out, **more)


class Plan(NamedTuple):
    """The prompts of a collection that are left."""

    left: list[str]  # ids of prompts that fit and are not finished
    num_planned: int  # prompts that fit
    warnings: list[str]


class Process(NamedTuple):
    """A worker's process, and its clock when it answered."""

    host: str
    pid: int
    time_s: float


class Worker:
    """A Ray actor. If it is lost, Ray restarts it and repeats the call."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._loaded: Decoder | None = None
        self._finished: set[str] | None = None  # by this process; None before the first batch

    def load(self) -> Process:
        """Loads the pair, once per process.

        Raises:
            ClusterError: other versions than the driver's. As `load_pair`.
        """
        _ = self._decoder
        return _this_process()

    @property
    def _decoder(self) -> Decoder:
        if self._loaded is None:
            work = self._work
            check_versions(work.versions, versions_here())
            with suppress(OSError):
                os.chdir(work.folder)
            self._loaded = work.decoder(work.models.load_pair())
        return self._loaded

    def plan(self, prompts: Sequence[Prompt], responses: Responses | None) -> Plan:
        """Starts or joins the set, and finds the prompts that are left; called on one worker.

        Raises:
            As `DecodingConfig.with_room`, `answered` and the collections.
        """
        work, warnings, pair = self._work, list[str](), self._decoder.pair
        begun = None if responses is None else responses.of([])
        work.collect(self._decoder, [], begun, resume=True, own_prompts=True)
        fitting = work.models.with_room(pair, prompts)
        if long := len(prompts) - len(fitting):
            warnings = [
                f"{long} of {len(prompts)} prompts skipped: longer than the model's context"
            ]
        listing = read_listing(work.out, verify=False)
        with TraceWriter(listing.place, listing, listing.header.policy) as writer:
            left = writer.plan(fitting)
        if responses is not None:
            for prompt in left:
                response = responses.by_prompt[prompt.prompt_id]
                answered(pair.target, prompt, response, work.models.settings)
        return Plan([prompt.prompt_id for prompt in left], len(fitting), warnings)

    def collect(
        self, prompts: Sequence[Prompt], responses: Responses | None
    ) -> tuple[Summary, Process]:
        """Collects a batch and commits it; returns its counts.

        Of a repeated batch, only the rest is collected: prompts that a lost process finished are
        found in the set, and this process remembers its own.

        Raises:
            ClusterError: a folder that is not shared with the planning worker. As the collections.
        """
        decoder, is_first = self._decoder, self._finished is None
        if is_first:
            check_shared(self._work.out)
        done = self._finished = self._finished or set()
        left = [prompt for prompt in prompts if prompt.prompt_id not in done]
        summary = self._work.collect(
            decoder, left, responses, resume=True, own_prompts=not is_first
        )
        summary.num_committed += len(prompts) - len(left) + summary.num_skipped
        done.update(prompt.prompt_id for prompt in prompts)
        return summary, _this_process()


def _this_process() -> Process:
    return Process(os.uname().nodename, os.getpid(), time.time())


def check_versions(wanted: dict[str, str], found: dict[str, str]) -> None:
    """Raises `ClusterError` on a machine with other versions than the driver's."""
    for name, number in wanted.items():
        if found[name] != number:
            raise ClusterError(
                f"node {os.uname().nodename} has {name} {found[name]}, and the driver has {number}",
                hint="install that version on every node",
            )


def check_shared(out: str) -> None:
    """Raises `ClusterError` on a machine that cannot see the set that another one began."""
    if not open_place(out).holds(HEADER_NAME):
        raise ClusterError(
            f"node {os.uname().nodename} does not share the folder {out}",
            hint="mount it there too, or collect into s3://bucket/prefix",
        )


def check_clock(process: Process, begun: float) -> None:
    """Raises `ClusterError` if a worker's clock differs by a minute or more from this machine's.

    Args:
        begun: time of the call, by this machine's clock.
    """
    late_s = max(begun - process.time_s, process.time_s - time.time())
    if late_s > CLOCKS_S:
        raise ClusterError(
            f"the clock of node {process.host} is {late_s:.0f} s from this machine's, and segments "
            "are ordered by time",
            hint="set it, e.g. by NTP",
        )


# --------------------------------------------------------------------------- the driver


def collect_on_ray(
    work: Work,
    prompts: Sequence[Prompt],
    responses: Responses | None = None,
) -> Summary:
    """Collects on Ray. Finished prompts are kept at any error, as at Ctrl-C.

    Raises:
        UsageError, ClusterError: see `cluster`; no worker was started.
        ClusterError: a batch lost its workers too often, or no node is left.
        SpecctlError: raised by a worker.
    """
    settings, models = work.settings, work.models
    place, threads = open_place(work.out), models.threads or 1
    needs: Any = {"gpus": settings.gpus_per_worker, "device": models.device}
    with cluster(settings.workers, settings.ray, threads=threads, **needs) as found:
        models = models.model_copy(update={"threads": threads, "device": found.needs.device})
        out = work.out if place.root is None else str(place.root.absolute())
        driver = Driver(found, replace(work, models=models, out=out))
        try:
            driver.load()
            plan = driver.plan(prompts, responses)
            summary, left = work.counts(plan), set(plan.left)
            prompts = [prompt for prompt in prompts if prompt.prompt_id in left]
            driver.collect(prompts, responses, summary)
        finally:
            driver.close()
    if isinstance(summary, DenseSummary):  # the workers drafted at the same time
        summary.seconds /= found.num_workers
    return summary


def batch_size(num_prompts: int, num_workers: int, together: int) -> int:
    """Prompts of a batch, for workers that decode `together` at a time."""
    share = math.ceil(num_prompts / (BATCHES * num_workers))
    return max(1 if together == 1 else 4 * together, min(MOST_PROMPTS, share))


class Driver:
    """Distributes calls over a pool of workers; see `collect_on_ray`."""

    def __init__(self, cluster: Cluster, work: Work) -> None:
        from ray.util import ActorPool

        needs = cluster.needs
        kind = cluster.ray.remote(Worker).options(
            num_cpus=needs.cpus, num_gpus=needs.gpus, max_restarts=-1, max_task_retries=RETRIES
        )
        self.processes = set[tuple[str, int]]()  # host and process id of those that answered
        self._cluster, self._work = cluster, work
        self._actors = [kind.remote(work) for _ in range(cluster.num_workers)]
        self._pool: Any = ActorPool(self._actors)
        self._given_out: list[Any] = []

    def load(self) -> None:
        """Loads the pair in every worker."""
        begun = time.time()
        for process in self._results("load", [()] * len(self._actors)):
            check_clock(process, begun)
            self.processes.add((process.host, process.pid))

    def plan(self, prompts: Sequence[Prompt], responses: Responses | None) -> Plan:
        """Plans in one worker."""
        plan: Plan = next(self._results("plan", [(prompts, responses)]))
        check_shared(self._work.out)
        for line in plan.warnings:
            log.warning("%s", line)
        return plan

    def collect(
        self, prompts: Sequence[Prompt], responses: Responses | None, summary: Summary
    ) -> None:
        """Collects all prompts and adds to the counts."""
        size = batch_size(len(prompts), len(self._actors), self._work.models.batch_size)
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        calls = [(batch, None if responses is None else responses.of(batch)) for batch in batches]
        try:
            for part, process in self._results("collect", calls):
                summary.add(part)
                advance(FINISHED, part.num_committed)
                self.processes.add((process.host, process.pid))
                while (idle := self._pool.pop_idle()) is not None:
                    self._cluster.ray.kill(idle)  # room for a worker that is restarted
        except BaseException:
            with finishing(), suppress(self._cluster.ray.exceptions.RayError):
                if refs := self._given_out:
                    self._cluster.ray.wait(refs, num_returns=len(refs), timeout=STOP_S)
            raise
        finally:
            if num_lost := len(self.processes) - len(self._actors):
                log.warning("%s lost; others collected their prompts", count(num_lost, "worker"))

    def _results(self, method: str, calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """The results of calls of a worker's method, as they arrive.

        Raises:
            ClusterError: a call lost its workers too often, or no node is left.
            SpecctlError: raised by the method.
        """

        def give_out(actor: Any, call: tuple[Any, ...]) -> Any:
            self._given_out.append(getattr(actor, method).remote(*call))
            return self._given_out[-1]

        errors, self._given_out = self._cluster.ray.exceptions, []
        for call in calls:
            self._pool.submit(give_out, call)
        while self._pool.has_next():
            try:
                found = self._pool.get_next_unordered(timeout=LOOK_S)
            except TimeoutError:
                self._cluster.check_alive()
                continue
            except errors.RayTaskError as error:
                raise error.cause from None
            except errors.RayError as error:
                raise ClusterError(
                    f"a worker on Ray was lost: {one_line(str(error))}",
                    hint="see the memory of the nodes and Ray's logs; then go on with --resume",
                ) from error
            yield found

    def close(self) -> None:
        """Ends the workers."""
        with suppress(self._cluster.ray.exceptions.RayError):
            for actor in self._actors:
                self._cluster.ray.kill(actor)
