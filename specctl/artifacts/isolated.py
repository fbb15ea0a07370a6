"""The child of `isolation`: imports, gives up its rights, loads once, says how it went."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from importlib.util import find_spec
from typing import BinaryIO

import numpy as np

from specctl.artifacts.isolation import FIELD, PASSED, READY, TOLD
from specctl.artifacts.loading import Artifact, LoadRequest, checked
from specctl.artifacts.manifest import SELFTEST, TWIN
from specctl.artifacts.onnx_twin import twin_decisions, twin_log_odds, twin_stops
from specctl.artifacts.selftest.rows import tolerance
from specctl.artifacts.tensors import read_tensors
from specctl.errors import ArtifactError
from specctl.policy.records import EntropyBins, ScoredTree, SparseGates

MORE_MEMORY_BYTES = 256 << 20
"""Beyond what the imports took. The largest lawful trees take 210 MiB."""
MORE_ADDRESS_BYTES = 2 * MORE_MEMORY_BYTES
"""The same where only that can be limited; some of it lies idle."""
CPU_LIMIT_S = 2
MORE_FILES = 8
STATM = "/proc/self/statm"
DATA_PAGES = 5
"""Place there of the pages that a process may write to, as `RLIMIT_DATA` counts them."""


def main() -> None:
    """Answers one question on standard output: `passed`, or a refusal in JSON."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    import torch

    torch.set_num_threads(1)
    if find_spec("onnxruntime"):
        import onnxruntime  # noqa: F401, before the limits: it is ours to import
    os.write(answers, READY)
    limit()
    os.write(answers, _answer(sys.stdin.buffer))


def limit() -> None:
    """Gives up, for good, what loading an artifact does not need."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # exact, where the limit is of whole seconds
    used = os.times()
    cpu = int(used.user + used.system) + 1 + CPU_LIMIT_S
    limits = {resource.RLIMIT_CPU: cpu, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    if os.path.isdir("/proc/self"):  # elsewhere nothing tells how much is in use
        kind, most = _memory_limit()
        limits[kind] = most
        limits[resource.RLIMIT_NOFILE] = len(os.listdir("/proc/self/fd")) + MORE_FILES
    for what, most in limits.items():
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # The signal of the soft limit on CPU time says why; that of the hard one only kills.
        spare = int(what == resource.RLIMIT_CPU and most != hard)
        resource.setrlimit(what, (most, most + spare))


def _memory_limit() -> tuple[int, int]:
    """The limit to set, and its bytes. Some sandboxes (gVisor) tell the address space alone."""
    with open(STATM) as file:
        pages = [int(word) for word in file.read().split()]
    if pages[DATA_PAGES]:
        own = pages[DATA_PAGES] * resource.getpagesize()
        return resource.RLIMIT_DATA, own + MORE_MEMORY_BYTES
    return resource.RLIMIT_AS, pages[0] * resource.getpagesize() + MORE_ADDRESS_BYTES


def _answer(message: BinaryIO) -> bytes:
    try:
        files = _files(message)
        run_twin(checked(files, LoadRequest()), files)
    except ArtifactError as error:
        return json.dumps({key: getattr(error, key) for key in TOLD}).encode()
    except MemoryError:
        return json.dumps(_too_much()).encode()
    return PASSED


def _too_much() -> dict[str, str]:
    return {
        "code": "E_COST",
        "field": FIELD,
        "expected": f"at most {MORE_MEMORY_BYTES >> 20} MiB more memory",
        "found": "a demand for more",
        "fix": "do not load it",
    }


def _files(message: BinaryIO) -> dict[str, bytes]:
    """What `isolation.frame` put together, each of it held once."""
    sizes = json.loads(message.readline())
    return {name: message.read(size) for name, size in sizes.items()}


def run_twin(artifact: Artifact, files: dict[str, bytes]) -> None:
    """Holds the twin, run by onnxruntime, against the self-test; nothing where neither is there.

    Raises:
        ArtifactError: E_ONNX_LOAD if onnxruntime refuses it, E_SELFTEST if it decides otherwise.
    """
    if TWIN not in files or SELFTEST not in files or not find_spec("onnxruntime"):
        return
    vectors = read_tensors(files[SELFTEST], SELFTEST)
    rows = {n.removeprefix("rows."): a for n, a in vectors.items() if n.startswith("rows.")}
    try:
        same = _decides_alike(artifact, files[TWIN], rows)
    except (RuntimeError, ValueError) as error:  # what onnxruntime raises for a graph
        raise ArtifactError(
            "E_ONNX_LOAD", TWIN, expected="a graph that onnxruntime runs", found=str(error)[:200]
        ) from None
    if not same:
        raise ArtifactError(
            "E_SELFTEST", TWIN, expected="the decisions of the self-test", found="others"
        )


def _decides_alike(artifact: Artifact, twin: bytes, rows: dict[str, np.ndarray]) -> bool:
    shape, inputs = artifact.policy.shape, rows["inputs"]
    if isinstance(shape, EntropyBins):
        names = ("bin", "depth", "num_tokens")
        found = zip(names, twin_decisions(twin, inputs), strict=True)
        return all(np.array_equal(table, rows[name]) for name, table in found)
    if isinstance(shape, SparseGates):
        return np.array_equal(twin_stops(twin, inputs), rows["stopped_at"])
    assert isinstance(shape, ScoredTree)
    apart = np.abs(twin_log_odds(twin, inputs).astype(np.float64) - rows["scores"])
    return bool((apart <= tolerance(shape.scorer, inputs)).all())
