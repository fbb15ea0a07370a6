"""Files that others made, read by a child process before this one opens them.

A file is blamed only for what a fresh child did after it said that it begins with that file. What
else goes wrong, e.g. a child that cannot start or that was killed from outside, is the machine's
fault and an error of its own: it must never put a sound file into quarantine.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from specctl.collect.commits import Commit, Segment
from specctl.collect.places import Place
from specctl.errors import OutputError, TraceCorruptError
from specctl.plain_text import shown

CODE = "import sys; sys.path[:] = {path!r}; from specctl.collect.inspection import main; main()"
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
"""Of the environment: no credentials reach the child."""
MAX_WAIT_S = 1800.0
"""For one file, or for the start; the child's own limit on a file is on its CPU time."""


class File(NamedTuple):
    """A file, and what it must hold.

    Attributes:
        name: in messages.
        commit: the record that it is held against; None: it is judged alone.
        rounds: the file with the rounds of that commit, which is judged before this one.
    """

    path: Path
    segment: Segment
    name: str
    commit: Commit | None = None
    rounds: File | None = None


class RefusedFile(NamedTuple):
    """A file that cannot be read, and why."""

    segment: Segment
    name: str
    reason: str


class InspectionError(OutputError):
    """Files could not be inspected on this machine; nothing is known about them."""


@dataclass(frozen=True)
class Told:
    """What became of a child.

    Attributes:
        lines: of its standard output. ending: how it ended, for a person.
        is_own_fault: it ended by itself, or by a limit of ours.
        last_words: the last line of its standard error.
    """

    lines: list[str]
    ending: str
    is_own_fault: bool
    last_words: str


def files_of(place: Place, commit: Commit, paths: Mapping[str, Path]) -> list[File]:
    """Files of a commit, rounds first, to be held against its record.

    Args:
        paths: local files by key; what has none is left out.
    """
    told = commit if all(segment.key in paths for segment in commit.files) else None
    files: list[File] = []
    for segment in sorted(commit.files, key=lambda segment: segment.table != "rounds"):
        if segment.key in paths:
            rounds = files[0] if files and files[0].segment.table == "rounds" else None
            files.append(File(paths[segment.key], segment, place.at(segment.key), told, rounds))
    return files


def inspect_files(files: Iterable[File]) -> None:
    """Has a child process read files.

    Raises:
        TraceCorruptError: naming the first one that cannot be read, or that the child died of.
        InspectionError: no child can read files on this machine.
    """
    for _, name, reason in refusals(files):
        raise unreadable(name, reason)


def unreadable(name: str, reason: str) -> TraceCorruptError:
    """The error of a file that was refused."""
    return TraceCorruptError(
        name,
        expected="a Parquet file that can be read, with the columns and rows of its record",
        found=reason,
        fix="do not use it; collect or fetch it again",
    )


def refusals(files: Iterable[File]) -> list[RefusedFile]:
    """Those of the files that cannot be read.

    Raises:
        InspectionError: no child can read files on this machine.
    """
    left = list(files)
    found: list[RefusedFile] = []
    while left:
        told = _run([_parted(file, found) for file in left])
        begun, judged = _judged(left, told.lines, found)
        if judged < len(left):
            if begun == judged or not told.is_own_fault:
                raise _not_inspected(left[judged].name if begun > judged else None, told)
            if not judged:  # a fresh child that read nothing before
                found.append(_refused(left[0], f"one that its reader died of ({told.ending})"))
                judged = 1
        left = left[judged:]  # begins with the file in doubt, alone in a child that is new
    return found


def _refused(file: File, reason: str) -> RefusedFile:
    return RefusedFile(file.segment, file.name, reason)


def _parted(file: File, refused: Iterable[RefusedFile]) -> File:
    """Without its commit where the commit's rounds were refused: no child opens those again."""
    if file.rounds is None or all(file.rounds.segment != one.segment for one in refused):
        return file
    return file._replace(commit=None, rounds=None)


def _judged(
    files: Sequence[File], lines: Iterable[str], found: list[RefusedFile]
) -> tuple[int, int]:
    """Notes what was refused; returns how many files were begun, and how many were judged."""
    begun = judged = 0
    for line in lines:
        word, _, rest = line.partition(" ")
        begun += word == "begin"
        if word == "refused":
            found.append(_refused(files[judged], shown(rest.partition(" ")[2])))
        judged += word in ("ok", "refused")
    return begun, judged


def _not_inspected(name: str | None, told: Told) -> InspectionError:
    return InspectionError(
        "inspection of trace files" if name is None else f"inspection of {name}",
        expected="a child process that starts, and that nothing but a file ends",
        found=f"one that ended ({told.ending}): {told.last_words}",
        fix="check this machine's memory and `ulimit -a`, then try again; no file was judged by it",
    )


def command() -> list[str]:
    """Our own code from where this process has it, and nothing from the working directory."""
    root = str(Path(__file__).parents[2])
    path = [root, *(place for place in sys.path if os.path.isabs(place))]
    return [sys.executable, "-I", "-c", CODE.format(path=path)]


def _run(files: Sequence[File]) -> Told:
    try:
        return _ask(files)
    except OSError as error:  # no process, no temporary file
        raise _not_inspected(None, Told([], "before it began", False, str(error))) from error


def _ask(files: Sequence[File]) -> Told:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as errors:
        asked.write(b"".join(map(_question, files)))
        asked.seek(0)
        with subprocess.Popen(
            command(),
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**kept, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
            cwd="/",
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent to judge
        ) as child:
            try:
                lines, timed_out = _listen(child)
            finally:
                child.kill()
        return _told(lines, child.returncode, timed_out=timed_out, errors=errors)


def _question(file: File) -> bytes:
    asked = {
        "path": str(file.path.absolute()),
        "table": file.segment.table,
        "num_rows": file.segment.num_rows,
        "prompt_ids": None if file.commit is None else file.commit.prompt_ids,
        "rounds": None if file.rounds is None else str(file.rounds.path.absolute()),
    }
    return json.dumps(asked).encode() + b"\n"


def _listen(child: subprocess.Popen[bytes]) -> tuple[list[str], bool]:
    """What it says until it ends, or until it says nothing for too long."""
    assert child.stdout is not None
    said, deadline = b"", time.monotonic() + MAX_WAIT_S
    while True:
        left = max(deadline - time.monotonic(), 0)
        if not select.select([child.stdout], [], [], left)[0]:
            return said.decode().splitlines(), True
        part = child.stdout.read(1 << 16)
        if not part:
            child.wait()
            return said.decode().splitlines(), False
        said, deadline = said + part, time.monotonic() + MAX_WAIT_S


def _told(lines: list[str], status: int, *, timed_out: bool, errors: IO[bytes]) -> Told:
    errors.seek(0)
    words = errors.read().decode(errors="replace").strip().splitlines()
    if timed_out:
        ending = f"nothing within {MAX_WAIT_S:g} s"
    elif status < 0:
        ending = f"killed by {signal.Signals(-status).name}"
    else:
        ending = f"status {status}"
    # Native code short of memory aborts; under our own limit that is the file's doing.
    starved = any(line.startswith("starved ") for line in lines) or (
        "lean" in lines and status == -signal.SIGABRT
    )
    # Nothing of ours sends SIGKILL, nor can a file: that is the system short of memory.
    from_outside = not timed_out and status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    last_words = words[-1][-300:] if words else "it said nothing"
    return Told(lines, ending, not (starved or from_outside), last_words)
