"""Collection by this process, or by Ray actors that write one trace set.

    driver: prompts ──a batch──► ActorPool ──► worker: loads the pair once; collects the batch and
            counts  ◄────────────────────────          commits it, as one process would

A prompt is finished when a segment names it; there is no other record. Ray restarts a lost worker,
here or on another node, and repeats its batch; the new worker reads in the set what the lost one
had committed. If both commit a prompt, readers count the first segment (docs/trace-format.md).

--workers N            a cluster of this machine, which ends with the command
--ray HOST:PORT|auto   one that runs already
"""

from __future__ import annotations

import io
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from specctl.collect.config import FINISHED, CollectConfig, Shard
from specctl.collect.dense import collect_dense
from specctl.collect.dense.collection import (
    DenseSummary,
    answerable,
    dense_facts,
    plain_decoder,
)
from specctl.collect.live import LiveSummary, SetOptions, Summary, collect_live
from specctl.collect.prompts import Prompt, with_room
from specctl.collect.responses import Responses
from specctl.collect.trace_writer import TraceWriter, finishing, make_header, token_header
from specctl.errors import ClusterError, UsageError, one_line
from specctl.formatting import count
from specctl.logs.trace_files import HEADER_NAME, RUN, check_equal, open_place, read_header
from specctl.logs.trace_set import read_listing
from specctl.policy import Policy
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
STORE_BYTES = 128 << 20
"""Memory for the object store of a cluster that starts here; it holds prompts and counts."""
OWN: Any = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
"""Options of a cluster that starts here. Ray's default runs workers at nice 15."""
CONNECT_S = 5.0
"""Time that a cluster has to answer at its address."""


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

    def finished(
        self, prompts: Sequence[Prompt], responses: Responses | None, shard: Shard
    ) -> Summary | None:
        """The counts of a run whose prompts an earlier one has finished; None of another.

        No model is loaded for it, and none to find that a set has other options.

        Raises:
            TraceMismatchError: the set there is of another run, as far as options tell.
        """
        place, settings = open_place(self.out), self.models.settings
        if not place.holds(HEADER_NAME):
            return None
        stored, facts = read_header(place), token_header(self.settings.tokens)
        if self.policy is None:
            shape = self.settings.dense_shape()
            policy, facts = Policy(shape=shape), facts | dense_facts(shape, responses)
        else:
            policy = self.policy.policy
        facts |= {name: getattr(self.models, name) for name in ("target", "drafter")}
        facts["max_new_tokens"] = settings.max_new_tokens
        facts = {name: value for name, value in stored.collect.items() if name != "tokens"} | facts
        names = {f"{name}_digest" for name in ("target", "drafter", "tokenizer")}
        digests = stored.model_dump(include=names)
        header = make_header(policy, settings.sampling, collect=facts, **digests)
        check_equal(place, stored, header, RUN, "use the same options, or another folder")
        listing = read_listing(self.out, verify=False)
        kind = DenseSummary if self.policy is None else LiveSummary
        with TraceWriter(place, listing, stored.policy) as writer:
            summary, left = kind.begin(writer, prompts, shard)
        return None if left else summary

    def collect(
        self,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        responses: Responses | None = None,
        **joining: Any,
    ) -> Summary:
        """Collects prompts that fit into the context, by `collect_live` or `collect_dense`.

        Args:
            joining: `resume`, `shard` and `own_prompts` of `SetOptions`.
        """
        pair, models, out = decoder.pair, self.models, self.out
        options = SetOptions(
            tokens=self.settings.tokens, workload=self.settings.workload, **joining
        )
        more: Any = {"options": options, "batch_size": models.batch_size, "decoder": decoder}
        if self.policy is not None:
            return collect_live(pair, prompts, self.policy.policy, models.settings, out, **more)
        shape = self.settings.dense_shape()
        more |= {"responses": responses, "strict": models.strict}
        return collect_dense(pair, prompts, models.settings, out, shape, **more)


# --------------------------------------------------------------------------- the cluster


class Needs(NamedTuple):
    """The resources of one worker, as Ray counts them."""

    cpus: int = 1
    gpus: float = 0.0

    def __str__(self) -> str:
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus:g} GPUs"
        return count(self.cpus, "CPU") + (f" and {gpus}" if self.gpus else "")

    @property
    def device(self) -> str:
        """The device of the models in a worker, which sees only its own GPUs."""
        if self.gpus > 1:
            return ",".join(f"cuda:{index}" for index in range(int(self.gpus)))
        return "cuda" if self.gpus else "cpu"

    def room(self, resources: Mapping[str, float]) -> int:
        """Workers that fit into the resources of a node."""
        room = int(resources.get("CPU", 0) / self.cpus)
        return min(room, int(resources.get("GPU", 0) / self.gpus)) if self.gpus else room


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to."""

    ray: Any
    needs: Needs  # of each worker
    num_workers: int


@contextmanager
def cluster(
    num_workers: int | None, address: str | None, *, threads: int, gpus: float | None, device: str
) -> Iterator[Cluster]:
    """Starts or joins a cluster, and leaves it after the block.

    A process that is already connected, such as a Ray program, stays connected.

    Args:
        num_workers: None uses all the room there is.
        address: `auto` or `HOST:PORT`; None starts a cluster on this machine.
        threads: CPUs of a worker.
        gpus: GPUs of a worker. None: one if the cluster has any and `device` is not `cpu`.

    Raises:
        UsageError: Ray is not installed, or options contradict each other.
        ClusterError: the cluster cannot be started or reached, or lacks room for the workers.
    """
    if address is not None and address != "auto" and not address.rpartition(":")[2].isdigit():
        fix = "give the address that `ray start` printed"
        raise UsageError(f"--ray takes auto or HOST:PORT, not {address!r}", hint=fix)
    if device not in ("auto", "cpu", "cuda"):
        fix = "leave the numbers out: Ray gives each worker its own GPUs, see --gpus-per-worker"
        raise UsageError(f"--device {device} cannot be used with Ray", hint=fix)
    if gpus is not None and gpus > 1 and gpus % 1:
        raise UsageError(f"--gpus-per-worker above 1 must be a whole number, not {gpus:g}")
    if device == "cpu" and gpus:
        raise UsageError("--gpus-per-worker cannot be used with --device cpu")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray: Any = import_module("ray")
        if not (connected := ray.is_initialized()):
            _connect(ray, address)
    except ImportError:
        fix = "pip install ray"
        raise UsageError("--workers and --ray need the package ray", hint=fix) from None
    finally:  # Ray replaces the handler, on import and on start
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    try:
        if gpus is None:
            has_some = bool(ray.cluster_resources().get("GPU", 0)) and device == "auto"
            gpus = 1.0 if has_some or device == "cuda" else 0.0
        needs = Needs(threads, gpus)
        found = Cluster(ray, needs, _num_workers(ray, needs, num_workers))
        with redirect_stdout(io.StringIO()):  # Ray prints deaths of workers there
            yield found
    finally:
        if not connected:
            ray.shutdown()


def _num_workers(ray: Any, needs: Needs, asked: int | None) -> int:
    """The number of workers: `asked`, or as many as other jobs leave room for.

    Raises:
        ClusterError: the whole cluster, empty, would be too small.
    """
    there = ray.cluster_resources()
    room = sum(needs.room(node["Resources"]) for node in ray.nodes() if node["Alive"])
    if room < (asked or 1):
        raise ClusterError(
            f"{'--ray' if asked is None else f'--workers {asked}'}: each worker needs {needs} on "
            f"one node, and the cluster has room for {room}: {there.get('CPU', 0):g} CPUs and "
            f"{there.get('GPU', 0):g} GPUs in all",
            hint="lower --workers, --threads or --gpus-per-worker, or use --device cpu",
        )
    return asked or max(1, min(room, needs.room(ray.available_resources())))


def _connect(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address is None:
            ray.init("local", object_store_memory=STORE_BYTES, **OWN, **quiet)
            return
        named = _named(address)
        host, _, port = named.rpartition(":")
        if port.isdigit() and "/" not in host:  # Ray itself would try for minutes
            try:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            except OSError as error:
                raise OSError(f"{named}: {error}") from error
        ray.init(address, **quiet)
    except Exception as error:  # Ray raises plain ones, also if its raylet dies at start
        where, fix = f"--ray {address}", "start one with `ray start --head`, or see `ray status`"
        if address is None:
            where, fix = "Ray on this machine", "see the logs in /tmp/ray/session_latest/logs"
        reason = one_line(str(error)) or type(error).__name__
        raise ClusterError(f"{where}: no cluster answers: {reason}", hint=fix) from error


def _named(address: str) -> str:
    """The address that Ray uses for `auto`: from the environment, or of the last `ray start`,
    whose cluster may have ended."""
    if address != "auto":
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    left = Path(folder) / "ray" / "ray_current_cluster"
    return os.environ.get("RAY_ADDRESS") or (left.read_text().strip() if left.exists() else address)


# --------------------------------------------------------------------------- a worker


class Worker:
    """A Ray actor. If it is lost, Ray restarts it and repeats the call."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._loaded: Decoder | None = None
        self._finished: set[str] | None = None  # by this process; None before the first batch

    def load(self) -> tuple[str, int]:
        """Loads the pair, once per process; returns the process, as `process_here`.

        Raises:
            ClusterError: other versions than the driver's. As `load_pair`.
        """
        _ = self._decoder
        return process_here()

    @property
    def _decoder(self) -> Decoder:
        if self._loaded is None:
            work = self._work
            check_versions(work.versions, versions_here())
            with suppress(OSError):
                os.chdir(work.folder)
            self._loaded = work.decoder(work.models.load_pair())
        return self._loaded

    def plan(
        self, prompts: Sequence[Prompt], responses: Responses | None
    ) -> tuple[Summary, list[str]]:
        """Starts or joins the set; returns counts of nothing yet, and ids of the prompts left.

        Raises:
            As `with_room`, `answerable` and the collections.
        """
        work, pair = self._work, self._decoder.pair
        summary = work.collect(self._decoder, [], responses, resume=True, own_prompts=True)
        fitting = with_room(prompts, pair, work.models)
        listing = read_listing(work.out, verify=False)
        with TraceWriter(listing.place, listing, listing.header.policy) as writer:
            left = writer.plan(fitting)
        num_skipped = len(fitting) - len(left)
        if responses is not None:
            options = {"strict": work.models.strict}
            left = answerable(pair.target, left, responses, work.models.settings, **options)
        summary.num_planned, summary.num_skipped = num_skipped + len(left), num_skipped
        return summary, [prompt.prompt_id for prompt in left]

    def collect(
        self, prompts: Sequence[Prompt], responses: Responses | None
    ) -> tuple[Summary, tuple[str, int]]:
        """Collects a batch and commits it; returns its counts, and the process.

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
        return summary, process_here()


def process_here() -> tuple[str, int]:
    """The machine and the id of this process."""
    return os.uname().nodename, os.getpid()


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
            summary, left = driver.plan(prompts, responses)
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
        self.processes.update(self._results("load", [()] * len(self._actors)))

    def plan(
        self, prompts: Sequence[Prompt], responses: Responses | None
    ) -> tuple[Summary, set[str]]:
        """Plans in one worker; see `Worker.plan`."""
        summary, left = next(self._results("plan", [(prompts, responses)]))
        check_shared(self._work.out)
        if long := len(prompts) - summary.num_planned:
            text = "%s of %s prompts skipped: too long for the model, or of unusable responses"
            log.warning(text, long, len(prompts))
        return summary, set(left)

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
                self.processes.add(process)
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
                if not any(node["Alive"] for node in self._cluster.ray.nodes()):
                    fix = "see Ray's logs; then go on with --resume"
                    raise ClusterError("no node of Ray's cluster is alive", hint=fix) from None
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
