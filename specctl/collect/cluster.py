"""A Ray cluster to collect on: started here or joined, and checked before the first prompt.

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
"""Memory for the object store of a cluster that starts here; it holds prompts and counts."""
OWN: Any = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
"""Options of a cluster that starts here. Ray's default runs workers at nice 15."""
CONNECT_S = 5.0
"""Time that a cluster has to answer at its address."""


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

    def check_alive(self) -> None:
        """Raises `ClusterError` if no node is left."""
        if not any(node["Alive"] for node in self.ray.nodes()):
            fix = "see Ray's logs; then go on with --resume"
            raise ClusterError("no node of Ray's cluster is alive", hint=fix)


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
    with _own_sigterm():
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


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces both on import and on start."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
        if port.isdigit() and "/" not in host:  # Ray itself would try for minutes
            try:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            except OSError as error:
                raise OSError(f"{named}: {error}") from error
        ray.init(address, **quiet)
    except Exception as error:  # Ray raises plain ones, also if its raylet dies at start
        where, fix = "Ray on this machine", "see the logs in /tmp/ray/session_latest/logs"
        if address is not None:
            where, fix = (
                f"--ray {address}",
                "start one with `ray start --head`, or see `ray status`",
            )
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
