"""The first load of an artifact, in a process that may die of it.

The child gets the bytes that the parent has checked, over a pipe, so that both see the same; it
opens no file of the artifact. It imports first and then gives up what it could harm with: memory,
CPU time, new files. The parent waits, and turns whatever happens into one typed refusal.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from specctl.errors import ArtifactError

READY, PASSED = b"ready\n", b"passed"
START_LIMIT_S = 120.0
"""For the child's imports: our own code, on a disk that may be slow."""
WALL_LIMIT_S = 20.0
"""For everything that depends on the artifact. What it costs is bounded by CPU time (`isolated`);
a machine that is busy must not refuse what is sound."""
MAX_ANSWER_BYTES = 1 << 16
"""A refusal is a line."""
TOLD = ("code", "field", "expected", "found", "fix")
"""What a refusal consists of; the parent knows which artifact it is."""
FIELD = "isolated first load"
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
"""Of the environment: no credentials reach the child."""
CODE = "import sys; sys.path[:] = {path!r}; from specctl.artifacts.isolated import main; main()"


def load_isolated(contents: Mapping[str, bytes]) -> None:
    """Runs the whole loader over the files in a child with limits.

    Raises:
        ArtifactError: what the child refused; E_COST if it took too long or too much memory,
            E_ONNX_LOAD if it died.
    """
    with _start() as child:
        try:
            _await_ready(child)
            answer = _ask(child, frame(contents))
        finally:
            child.kill()
    if answer != PASSED:
        raise _refusal(answer, child.returncode)


def frame(contents: Mapping[str, bytes]) -> bytes:
    """Files as one message: a line of sizes by name, then the bytes in that order."""
    sizes = {name: len(data) for name, data in contents.items()}
    return json.dumps(sizes).encode() + b"\n" + b"".join(contents.values())


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    path = [root, *(place for place in sys.path if place and place != root)]
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    try:
        return _spawn(CODE.format(path=path), kept)
    except (OSError, ValueError) as error:
        raise _cannot_start(str(error)) from None


def _spawn(code: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **environment,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd="/",
        bufsize=0,
        start_new_session=True,  # Ctrl-C is for the parent to judge
    )


def _await_ready(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    end, said, out = time.monotonic() + START_LIMIT_S, b"", child.stdout.fileno()
    while len(said) < len(READY):
        if not _ready({out: select.POLLIN}, end):
            raise _cannot_start(f"nothing within {START_LIMIT_S:g} s")
        part = os.read(out, len(READY) - len(said))
        if not part:
            break
        said += part
    if said != READY:
        raise _cannot_start(f"one that says {said!r} first" if said else "one that says nothing")


def _ready(wanted: Mapping[int, int], end: float) -> list[int]:
    """Those of some handles that can be used; none once the time is over.

    By poll, and not by select, which knows no handle above 1023: servers have them.
    """
    poll = select.poll()
    for handle, events in wanted.items():
        poll.register(handle, events)
    left = end - time.monotonic()
    return [handle for handle, _ in poll.poll(left * 1000)] if left > 0 else []


def _ask(child: subprocess.Popen[bytes], message: bytes) -> bytes:
    """What the child says to a message; it may say little, and not take long."""
    assert child.stdin is not None
    assert child.stdout is not None
    end, answer, unsent = time.monotonic() + WALL_LIMIT_S, b"", memoryview(message)
    into, out = child.stdin.fileno(), child.stdout.fileno()
    os.set_blocking(into, False)
    while len(answer) <= MAX_ANSWER_BYTES:
        wanted = {out: select.POLLIN, **({into: select.POLLOUT} if unsent else {})}
        ready = _ready(wanted, end)
        if not ready:
            raise _too_slow()
        if into in ready:
            unsent = unsent[_sent(into, unsent) :]
            if not unsent:
                child.stdin.close()
        if out in ready:
            part = os.read(out, MAX_ANSWER_BYTES)
            if not part:
                return _ended(child, end, answer)
            answer += part
    raise ArtifactError(
        "E_COST",
        FIELD,
        expected=f"an answer of at most {MAX_ANSWER_BYTES} bytes",
        found="more",
    )


def _sent(into: int, unsent: memoryview) -> int:
    """How many bytes the child took; all, where it will take no more: its answer tells why."""
    try:
        return os.write(into, unsent)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(unsent)


def _ended(child: subprocess.Popen[bytes], end: float, answer: bytes) -> bytes:
    try:
        child.wait(max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        raise _too_slow() from None
    return answer


def _too_slow() -> ArtifactError:
    return ArtifactError(
        "E_COST",
        FIELD,
        expected=f"an answer within {WALL_LIMIT_S:g} s",
        found="none",
    )


def _refusal(answer: bytes, exit_status: int) -> ArtifactError:
    """What the child said; where it could not say anything, how it ended."""
    try:
        told = json.loads(answer)
        facts = {key: str(told[key]) for key in TOLD}
    except (ValueError, KeyError, TypeError, RecursionError):
        out_of_time = exit_status in (-signal.SIGXCPU, -signal.SIGPROF)
        return ArtifactError(
            "E_COST" if out_of_time else "E_ONNX_LOAD",
            FIELD,
            expected="a process that loads it and ends",
            found="one that ran out of CPU time"
            if out_of_time
            else f"one that died with status {exit_status}",
        )
    return ArtifactError(**facts)


def _cannot_start(found: str) -> ArtifactError:
    return ArtifactError(
        "E_ONNX_LOAD",
        FIELD,
        expected="a child process of this Python that can import specctl",
        found=found,
        fix=f"check that {sys.executable} -c 'import specctl.artifacts' works",
    )
