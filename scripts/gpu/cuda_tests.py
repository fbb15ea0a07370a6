"""The CUDA tests in several processes, with what is known when the time is up.

    python scripts/gpu/cuda_tests.py --seconds 140 [--only WORDS] [--skip WORDS]
    python scripts/gpu/cuda_tests.py --list     what would run, and what is left out here

A failed launch ends the tests of its process, so every file has one of its own, and long files
several. Files come in the order in which they say most. Tests that need a library which is not
here are left out and named. Whole logs are in $OUT/tests.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HAS_CUDA = re.compile(r"mark\.cuda|def test_\w+\([^)]*\bdevice: torch\.device")
"""A mark, or a test over all backends (tests/kernels/conftest.py)."""
FIRST = ("kernels/test_commit_kv", "kernels/test_tree_attention", "runtime/test_cuda", "kernels/")
PARTS = {
    "runtime/test_cuda": (
        "not greedy_text and not seeded",
        "greedy_text and (hetero or budget)",
        "greedy_text and (echo and not budget or threshold)",
        "greedy_text and joint",
        "greedy_text and (ar or chain or eagle2) and not joint and not hetero and not threshold",
        "seeded",
    ),
    "kernels/test_tree_attention": ("equals_float64", "not equals_float64"),
    "kernels/test_laws": ("twins", "graph", "thousand"),
}
"""Long files and what `-k` splits them by: each part compiles its kernels beside the others."""
ON_CPU = "tests/kernels/test_commit_kv.py"
"""The file whose other tests try this script on a CPU."""
LEAST_S = 8.0
"""A process that would have less is not begun: torch alone takes as long."""
STOP_S = 4.0
"""For a process that is stopped, to print its failures."""
OUTCOMES = ("passed", "failed", "skipped", "error")


class Job(NamedTuple):
    """A test file, and words for `-k` where it is one of several parts."""

    file: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.file} [{self.words}]" if self.words else self.file


@dataclass
class Report:
    """Outcomes of all jobs so far.

    Attributes:
        bad: names of failed tests and their reasons. left_out, unfinished: jobs and why.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)
    left_out: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def add(self, job: Job, status: int, log: str) -> None:
        """Adds a job by pytest's exit status (124: stopped) and its verbose log."""
        lacks = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", log)
        if status == 2 and lacks:
            self.left_out.append(f"{job}: no {lacks.group(1)} here")
            return
        self.counts += outcomes(log)
        reasons = dict(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", log, re.M))
        # A process that was stopped has no summary, but its lines.
        failed = re.findall(r"^(tests/\S+::.*?) (?:FAILED|ERROR)\b", log, re.M)
        names = dict.fromkeys([*failed, *reasons])
        self.bad += [f"{name}  {reasons.get(name, '')[:200]}".rstrip() for name in names]
        if status == 124:
            self.unfinished.append(f"{job}, at {last_begun(log)}")
        elif status not in (0, 1, 5):  # 5: no test of that name
            last = (log.strip().splitlines() or [""])[-1]
            self.bad.append(f"{job}  pytest ended with status {status}: {last}")

    def __str__(self) -> str:
        lines = ["CUDA tests: " + ", ".join(f"{self.counts[word]} {word}" for word in OUTCOMES)]
        lines += [f"  left out: {line}" for line in self.left_out]
        lines += [f"  not finished: {line}" for line in self.unfinished]
        return "\n".join([*lines, *(f"  FAILED {line}" for line in self.bad)])


def outcomes(log: str) -> Counter[str]:
    """Counts of a verbose log, as far as it goes."""
    found = re.findall(rf"^tests/\S+::.* ({'|'.join(OUTCOMES)})\b", log, re.M | re.I)
    return Counter(word.lower() for word in found)


def last_begun(log: str) -> str:
    """The last test that a verbose log names."""
    found = re.findall(r"^(tests/\S+::\S+)", log, re.M)
    return found[-1] if found else "its beginning"


def jobs(only: str = "") -> list[Job]:
    """All files with CUDA tests, long ones in parts.

    With `only`: the files that have a test function with one of its words in its name.
    """
    found, wanted = [], set(re.findall(r"[a-z_]\w*", only)) - {"and", "or", "not"}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        text, parts = path.read_text("utf-8"), PARTS.get(name, ("",))
        if wanted:
            functions = " ".join(re.findall(r"def (test_\w+)", text))
            text, parts = text if any(word in functions for word in wanted) else "", ("",)
        if HAS_CUDA.search(text):
            place = next((i for i, word in enumerate(FIRST) if name.startswith(word)), len(FIRST))
            file = path.relative_to(ROOT).as_posix()
            found += [(place, Job(file, words)) for words in parts]
    return [job for _, job in sorted(found, key=lambda each: each[0])]


def run(job: Job, given: argparse.Namespace, until: float, report: Report) -> None:
    """Runs a job within the time that is left, and adds what came out."""
    left = until - time.time()
    if job.words and job.words == given.skip:
        return
    if left < LEAST_S:
        with report.lock:
            report.unfinished.append(f"{job}, not begun")
        return
    mark = "cuda" if given.device == "cuda" else "not cuda and not nightly"
    words = [word for word in (job.words, given.skip and f"not {given.skip}", given.only) if word]
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", mark, job.file]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-k",
        " and ".join(f"({word})" for word in words),
    ]
    path = Path(os.environ.get("OUT", ".")) / "tests" / (re.sub(r"\W+", "-", str(job)) + ".txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with path.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            status = 124
            stop(process)
    text = path.read_text("utf-8", errors="replace")
    with report.lock:
        report.add(job, status, text)
    counts = ", ".join(f"{number} {word}" for word, number in outcomes(text).items())
    print(f"{time.time() - began:5.0f} s  {job}: {counts or f'status {status}'}", flush=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Has pytest say what has failed so far, and ends it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    given = _options()
    found = jobs(given.only)
    if given.small:
        found, given.only, given.skip = [Job(ON_CPU)], "", ""
    if given.list:
        print(*found, sep="\n")
        return 0
    # The step that this runs in may have less: reports take a few seconds.
    seconds = min(given.seconds, float(os.environ.get("STEP_S", "inf")) - 2 * STOP_S)
    until, report = time.time() + seconds, Report()
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda job: run(job, given, until, report), found))
    print(report)
    return 1 if report.bad or report.unfinished or not report.counts["passed"] else 0


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda", help="cuda; cpu runs what needs none")
    options.add_argument("--small", action="store_true", help="one file")
    options.add_argument("--seconds", type=float, default=140.0, help="for all processes")
    options.add_argument("--jobs", type=int, default=8, help="processes side by side")
    options.add_argument("--only", default="", help="words of test names")
    options.add_argument("--skip", default="", help="words of test names to leave out")
    options.add_argument("--list", action="store_true", help="print the jobs only")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
