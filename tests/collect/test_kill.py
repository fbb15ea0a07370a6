"""kill -9 at random moments, then resume: nothing acknowledged is lost, nothing is doubled.

What must be there is known only to this process, from the acknowledgements that came through the
pipe, never from the folder itself.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from specctl.collect.commits import read_commits
from specctl.collect.reader import TraceSet
from tests.collect.killed_writer import NUM_ROUNDS, PLANNED, collect

NUM_KILLS = 10


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kill_at_random_moments_loses_and_doubles_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.collect.killed_writer", "pyarrow.parquet"])
    chance, acked, mid_commit = random.Random(0), set(), 0
    for attempt in range(NUM_KILLS):
        acked |= run_and_kill(context, tmp_path / "traces", chance.uniform(0.0, 0.3), attempt > 0)
        if (tmp_path / "traces" / "trace.json").exists():
            mid_commit += check_set(tmp_path / "traces", acked)
    assert len(acked) > 50
    assert mid_commit >= NUM_KILLS // 3, "too few kills hit a commit: the test shows nothing"


def run_and_kill(context: object, root: Path, delay_s: float, warm: bool) -> set[str]:  # noqa: FBT001
    """Starts a writer, kills it, and returns the prompts that it acknowledged."""
    receiver, sender = context.Pipe(duplex=False)  # type: ignore[attr-defined]
    process = context.Process(target=collect, args=(root, sender))  # type: ignore[attr-defined]
    process.start()
    sender.close()
    acked: set[str] = set(receiver.recv()) if warm else set()  # the first may die while starting
    time.sleep(delay_s)
    process.kill()
    process.join()
    while True:
        try:
            acked |= set(receiver.recv())
        except (EOFError, OSError):
            return acked


def check_set(root: Path, acked: set[str]) -> bool:
    """The laws of the folder after a kill; returns whether the kill hit a commit."""
    traces = TraceSet.open(root)
    committed = traces.prompt_ids
    assert len(set(committed)) == len(committed)
    assert acked <= set(committed) <= set(PLANNED)
    counts = traces.scan("rounds").group_by("prompt_id").len().collect()
    assert dict(counts.iter_rows()) == dict.fromkeys(committed, NUM_ROUNDS)
    assert traces.scan("nodes").collect().height == len(committed) * NUM_ROUNDS * 22
    files = set((root / "data").iterdir())
    orphans = files - {segment.path(root) for segment in read_commits(root).segments}
    for path in files:
        pq.read_table(path)  # orphans are whole too: published files always are
    return bool(orphans) or any((root / "tmp").iterdir())
