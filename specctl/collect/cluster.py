"""A Ray cluster to collect on: started here or joined, and refused before the first prompt.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specctl.errors import ClusterError, UsageError, one_line
from specctl.formatting import count

STORE_BYTES = 128 << 20
"""Of memory for the store of objects of a cluster of ours: prompts and counts are small."""
OWN: Any = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
"""Of a cluster of ours, whose workers have the priority of a process; Ray's own is nice 15."""
CONNECT_S = 5.0
"""The address of a cluster that has not answered by then is refused."""


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
        needs: of each worker. num_workers: that were asked for, or that it has room for.
    """

    ray: Any
    needs: Needs
    num_workers: int

    def check_alive(self) -> None:
        """Refuses a cluster whose nodes are gone (ClusterError)."""
        if not any(node["Alive"] for node in self.ray.nodes()):
            fix = "see Ray's logs; then go on with --resume"
            raise ClusterError("no node of Ray's cluster is alive", hint=fix)


@contextmanager
def cluster(
    num_workers: int | None, address: str | None, *, threads: int, gpus: float | None, device: str
) -> Iterator[Cluster]:
    """Starts or joins a cluster, for as long as the block takes.

    A process that is connected already, as a program of Ray is, stays so.

    Args:
        num_workers: None: as many as there is room for.
        address: `auto` or `HOST:PORT`; None starts one on this machine.
        threads: CPUs of a worker. gpus: of a worker; None: one where the cluster has any and
            `device` is not `cpu`.

    Raises:
        UsageError: no Ray is installed, or options that contradict each other.
        ClusterError: it cannot be started or reached, or has no room for the workers.
    """
    if address is not None and address != "auto" and not address.rpartition(":")[2].isdigit():
        expected, fix = "auto or HOST:PORT", "name the address that `ray start` printed"
        raise UsageError(f"--ray: expected {expected}, found {address!r}", hint=fix)
    if device not in ("auto", "cpu", "cuda"):
        fix = "leave the numbers out: Ray gives each worker its own GPUs, see --gpus-per-worker"
        raise UsageError(f"--device: expected auto, cpu or cuda, found {device}", hint=fix)
    if gpus is not None and gpus > 1 and gpus % 1:
        expected, fix = "at most 1, or a whole number", "round it"
        raise UsageError(f"--gpus-per-worker: expected {expected}, found {gpus:g}", hint=fix)
    if device == "cpu" and gpus:
        fix = "leave one of them out"
        raise UsageError(f"--gpus-per-worker: expected 0 on the CPU, found {gpus:g}", hint=fix)
    with _undisturbed():
        ray = _imported()
        connected = ray.is_initialized()
        if not connected:
            _connect(ray, address)
    try:
        if gpus is None:
            has_some = bool(ray.cluster_resources().get("GPU", 0)) and device == "auto"
            gpus = 1.0 if has_some or device == "cuda" else 0.0
        needs = Needs(threads, gpus)
        found = Cluster(ray, needs, _num_workers(ray, needs, num_workers))
        with redirect_stdout(io.StringIO()):  # where Ray says that a worker has died
            yield found
    finally:
        if not connected:
            ray.shutdown()


def _num_workers(ray: Any, needs: Needs, asked: int | None) -> int:
    """The number of workers that was asked for, or that others leave room for; ClusterError for
    more than all nodes together have room for, whoever else works there."""
    there = ray.cluster_resources()
    room = sum(needs.room(node["Resources"]) for node in ray.nodes() if node["Alive"])
    if room < (asked or 1):
        raise ClusterError(
            f"{'--ray' if asked is None else f'--workers {asked}'}: a worker takes {needs} of one "
            f"node, and there is room for {room} in all: {there.get('CPU', 0):g} CPUs and "
            f"{there.get('GPU', 0):g} GPUs",
            hint="lower --workers, --threads or --gpus-per-worker, or use --device cpu",
        )
    return asked or max(1, min(room, needs.room(ray.available_resources())))


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
        raise UsageError("--workers and --ray need the package ray", hint=fix) from None
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
    except Exception as error:  # Ray raises plain ones: where its raylet dies as it begins, too
        where, fix = "Ray on this machine", "see the logs in /tmp/ray/session_latest/logs"
        if address is not None:
            where, fix = (
                f"--ray {address}",
                "start one with `ray start --head`, or see `ray status`",
            )
        reason = one_line(str(error)) or type(error).__name__
        raise ClusterError(f"{where}: no cluster answers: {reason}", hint=fix) from error


def _named(address: str) -> str:
    """An address; of `auto` the one that Ray takes: of the environment, or of the last `ray start`,
    whose cluster may have ended."""
    if address != "auto":
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    left = Path(folder) / "ray" / "ray_current_cluster"
    return os.environ.get("RAY_ADDRESS") or (left.read_text().strip() if left.exists() else address)
