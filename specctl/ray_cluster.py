"""A Ray cluster to work on: started here or joined, and refused before the first prompt.

--workers N            a cluster of this machine, which ends with the command
--ray HOST:PORT|auto   one that runs already
"""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specctl.durable import make_folder, output_errors
from specctl.errors import ClusterError, UsageError, one_line
from specctl.formatting import count
from specctl.stores import TEMPORARY

T = TypeVar("T")
STORE_BYTES = 128 << 20
"""Of memory for the store of objects of a cluster of ours: prompts and reports are small."""
OWN: Any = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
"""Of a cluster of ours, whose workers have the priority of a process; Ray's own is nice 15."""
ANSWER_S, CONNECT_S = 60.0, 5.0
"""A node, or the address of a cluster, that has not answered by then is refused."""

CLOCKS_S = 60.0
"""Clocks that are further apart are refused: a writer clears files that are a day old."""
Sight = tuple[dict[str, str], float, bool]
"""What a node has: versions of packages, the time, and the folder of the set."""


class Needs(NamedTuple):
    """The resources of one worker, as Ray counts them."""

    cpus: int = 1
    gpus: float = 0.0

    def __str__(self) -> str:
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus:g} GPUs"
        return count(self.cpus, "CPU") + (f" and {gpus}" if self.gpus else "")

    @property
    def device(self) -> str:
        """The device of the models in a worker, which sees its own GPUs alone."""
        if self.gpus > 1:
            return ",".join(f"cuda:{index}" for index in range(int(self.gpus)))
        return "cuda" if self.gpus else "cpu"

    def room(self, resources: Mapping[str, float]) -> int:
        """Workers that fit into the resources of a node."""
        room = int(resources.get("CPU", 0) / self.cpus)
        return min(room, int(resources.get("GPU", 0) / self.gpus)) if self.gpus else room


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        is_own: started for this command. needs: of each worker.
    """

    ray: Any
    is_own: bool
    needs: Needs

    def nodes(self) -> list[dict[str, Any]]:
        """Those that are alive, as Ray describes them."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def room(self) -> int:
        """Workers that all nodes together have room for, whoever else works there."""
        return sum(self.needs.room(node["Resources"]) for node in self.nodes())

    def check_room(self, num_workers: int | None) -> None:
        """Refuses what no node can run and, in a cluster of our own, more workers than fit.

        Raises:
            ClusterError: naming what there is.
        """
        room, there = self.room(), self.ray.cluster_resources()
        if room < (num_workers if self.is_own and num_workers else 1):
            raise ClusterError(
                "--ray" if num_workers is None else f"--workers {num_workers}",
                expected=f"{self.needs} for each worker, on one node",
                found=f"room for {room} in all: {there.get('CPU', 0):g} CPUs and "
                f"{there.get('GPU', 0):g} GPUs",
                fix="lower --workers, --threads or --gpus-per-worker, or use --device cpu",
            )

    def check_nodes(self, out: Path | None) -> None:
        """Refuses nodes with other software, another time, or that do not share the folder; asks
        each of them.

        Raises:
            ClusterError: naming such a node.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        look = self.ray.remote(num_cpus=0)(looker())
        with _marked(out) as mark:
            hosts, begun = {}, time.time()
            for node in self.nodes():
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                answer = look.options(scheduling_strategy=there).remote(mark)
                hosts[answer] = node["NodeManagerHostname"]
            for answer, host in hosts.items():
                try:
                    found = self.ray.get(answer, timeout=ANSWER_S)
                except self.ray.exceptions.RayError as error:
                    raise ClusterError(
                        f"node {host}",
                        expected="an answer",
                        found=type(error).__name__,
                        fix="see to the node, or take it out of the cluster",
                    ) from error
                check_sight(host, found, begun, out)


@dataclass(frozen=True)
class Spread:
    """Pure functions that run as tasks of a cluster.

    Attributes:
        num_tasks: at a time.
        sets: trace sets that other machines open by their names; none where all tasks see the
            files of this process.
    """

    cluster: Cluster
    num_tasks: int
    sets: tuple[str, ...] = ()

    def map(
        self, work: Callable[[Any, Any], T], shared: object, items: Iterable[object]
    ) -> Iterator[T]:
        """`work(shared, item)` of every item, in order, holding few results at a time.

        A task that is lost with its process or its node runs again on another.

        Raises:
            ClusterError: a task is lost again and again. What `work` raises.
        """
        ray = self.cluster.ray
        task = ray.remote(work).options(num_cpus=self.cluster.needs.cpus, max_retries=3)
        there, running = ray.put(shared), deque[Any]()
        try:
            for item in items:
                running.append(task.remote(there, item))
                if len(running) > self.num_tasks:
                    yield self._found(running.popleft())
            while running:
                yield self._found(running.popleft())
        finally:
            for ref in running:
                ray.cancel(ref, force=True)

    def _found(self, ref: Any) -> Any:
        errors = self.cluster.ray.exceptions
        try:
            return self.cluster.ray.get(ref)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            raise ClusterError(
                "a task on the cluster",
                expected="an answer",
                found=one_line(str(error)),
                fix="see the memory of the nodes and Ray's logs, or lower --workers",
            ) from error


@contextmanager
def spread_over(
    num_workers: int | None, address: str | None, sets: Sequence[str]
) -> Iterator[Spread | None]:
    """Tasks of `--workers` and `--ray`, a CPU each, for as long as the block takes; None without.

    Raises:
        UsageError, ClusterError: see `cluster`; nothing was read.
    """
    if num_workers is None and address is None:
        yield None
        return
    with cluster(num_workers, address, threads=1, gpus=None, device="cpu") as found:
        if not found.is_own:
            found.check_nodes(None)
        names = () if found.is_own else tuple(sets)
        yield Spread(found, num_workers or found.room(), names)


def check_versions(host: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Refuses a node with other software.

    Raises:
        ClusterError: naming a package.
    """
    for name, version in expected.items():
        if found[name] != version:
            raise ClusterError(
                f"node {host}",
                expected=f"{name} {version}, as here",
                found=found[name],
                fix="install that version on every node",
            )


def check_sight(host: str, sight: Sight, begun: float, out: Path | None) -> None:
    """Refuses a node by what a `looker` found there since `begun`, by the clock of this machine.

    Raises:
        ClusterError: other software, another time, or a folder that it does not share.
    """
    versions, now, sees_folder = sight
    check_versions(host, versions, looker()(None)[0])
    late_s = max(begun - now, now - time.time())
    if late_s > CLOCKS_S:
        raise ClusterError(
            f"node {host}",
            expected="a clock that agrees with this machine's: names of segments have times",
            found=f"one that is {late_s:.0f} s apart",
            fix="set it, e.g. by NTP",
        )
    if not sees_folder:
        raise ClusterError(
            f"folder {out}, node {host}",
            expected="a folder that all nodes share",
            found="one of this machine alone",
            fix="mount it there too, or collect into s3://bucket/prefix",
        )


def looker() -> Callable[[str | None], Sight]:
    """A question to a node. It is a local function, which travels by value: there may be another
    version of us, or none."""

    def look(mark: str | None) -> Sight:
        import os
        import time
        from importlib import metadata

        versions = {}
        for name in ("torch", "transformers"):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "none"
        try:
            from specctl.version import __version__

            versions["specctl"] = __version__
        except ImportError:
            versions["specctl"] = "none"
        return versions, time.time(), mark is None or os.path.exists(mark)

    return look


@contextmanager
def _marked(out: Path | None) -> Iterator[str | None]:
    """A file below the folder of a set, for other machines to look for; None for a bucket."""
    if out is None:
        yield None
        return
    is_new, mark = not out.exists(), out / TEMPORARY / f"{uuid.uuid4().hex}.ray"
    with output_errors(out, "trace folder"):
        make_folder(mark.parent)
        mark.touch()
    try:
        yield str(mark)
    finally:
        with suppress(OSError):
            mark.unlink()
            for folder in (mark.parent, out) if is_new else ():
                folder.rmdir()


@contextmanager
def cluster(
    num_workers: int | None, address: str | None, *, threads: int, gpus: float | None, device: str
) -> Iterator[Cluster]:
    """Starts or joins a cluster, for as long as the block takes.

    A process that is connected already, as a program of Ray is, stays so.

    Args:
        address: `auto` or `HOST:PORT`; None starts one on this machine.
        threads: CPUs of a worker. gpus: of a worker; None: one where the cluster has any and
            `device` is not `cpu`.

    Raises:
        UsageError: no Ray is installed, or options that contradict each other.
        ClusterError: it cannot be started or reached, or has no room for the workers.
    """
    if address is not None and address != "auto" and not address.rpartition(":")[2].isdigit():
        expected, fix = "auto or HOST:PORT", "name the address that `ray start` printed"
        raise UsageError("--ray", expected=expected, found=repr(address), fix=fix)
    if device not in ("auto", "cpu", "cuda"):
        fix = "leave the numbers out: Ray gives each worker its own GPUs, see --gpus-per-worker"
        raise UsageError("--device", expected="auto, cpu or cuda", found=device, fix=fix)
    if gpus is not None and gpus > 1 and gpus % 1:
        expected, fix = "at most 1, or a whole number", "round it"
        raise UsageError("--gpus-per-worker", expected=expected, found=f"{gpus:g}", fix=fix)
    if device == "cpu" and gpus:
        fix = "leave one of them out"
        raise UsageError("--gpus-per-worker", expected="0 on the CPU", found=f"{gpus:g}", fix=fix)
    with _undisturbed():
        ray = _imported()
        connected = ray.is_initialized()
        if not connected:
            _connect(ray, address)
    try:
        if gpus is None:
            has_some = bool(ray.cluster_resources().get("GPU", 0)) and device == "auto"
            gpus = 1.0 if has_some or device == "cuda" else 0.0
        found = Cluster(ray, not connected and address is None, Needs(threads, gpus))
        found.check_room(num_workers)
        with redirect_stdout(io.StringIO()):  # where Ray says that a worker has died
            yield found
    finally:
        if not connected:
            ray.shutdown()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Gives SIGTERM back its handler, which Ray replaces, where it is imported and again where it
    begins."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    try:
        import ray
    except ImportError:
        fix = "pip install 'specctl[ray]'"
        raise UsageError("--workers and --ray", expected="Ray", found="none", fix=fix) from None
    return ray


def _connect(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address is None:
            ray.init("local", object_store_memory=STORE_BYTES, **OWN, **quiet)
            return
        named = _named(address)
        host, _, port = named.rpartition(":")
        if port.isdigit() and "/" not in host:  # Ray itself tries for minutes
            try:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            except OSError as error:
                raise OSError(f"{named}: {error}") from error
        ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:  # another version of Ray or Python, too
        raise ClusterError(
            "Ray on this machine" if address is None else f"--ray {address}",
            expected="a cluster that runs and answers",
            found=one_line(str(error)) or type(error).__name__,
            fix="start one with `ray start --head`, or see `ray status`"
            if address
            else "see the logs in /tmp/ray/session_latest/logs",
        ) from error


def _named(address: str) -> str:
    """An address; of `auto` the one that Ray takes: of the environment, or of the last `ray start`,
    whose cluster may have ended."""
    if address != "auto":
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    left = Path(folder) / "ray" / "ray_current_cluster"
    return os.environ.get("RAY_ADDRESS") or (left.read_text().strip() if left.exists() else address)
