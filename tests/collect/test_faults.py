"""Kills, full disks, lies and lost power: acknowledged rows are never lost, never doubled."""

from __future__ import annotations

import functools
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specctl.collect import reader
from specctl.collect.logs import CommitLog
from specctl.collect.reader import TraceSet
from specctl.collect.store import TraceWriter
from specctl.errors import OutputError, TraceError
from tests.collect.faults import (
    Campaign,
    check_acked,
    check_damage_is_named,
    check_set,
    fail_everywhere,
    finish,
    flip_records,
    flipped,
    forkserver,
    run_life,
    simulated_life,
    small_set,
    truncations,
)
from tests.collect.power import Recorder, states
from tests.collect.rounds import header
from tests.collect.shim import Mode
from tests.collect.small_rows import tables_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
NUM_KILLS = 20


@pytest.mark.parametrize(("mode", "step"), [("simulated death", 1), ("EIO", 4), ("ENOSPC", 5)])
def test_trouble_at_any_operation_loses_and_doubles_nothing(
    tmp_path: Path, mode: Mode, step: int
) -> None:
    """Death at every one; scripts/inject_faults.py does all of it to real processes."""
    life = functools.partial(simulated_life, mode=mode)
    assert fail_everywhere(tmp_path, lambda root, at: life(root, at=at), step) > 60


def test_real_processes_die_as_simulated_ones_do(tmp_path: Path) -> None:
    context = forkserver()
    for mode, at in (("die", 20), ("die", 60), ("die in write", 45), ("EINTR", 50)):
        root = tmp_path / f"{mode}-{at}"
        life = run_life(context, root, mode, at)  # type: ignore[arg-type]
        assert (life.count is None) == mode.startswith("die")
        check_acked(root, set(life.acked))
        finish(root)


def test_random_kills_of_four_writers(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "traces", num_writers=4, seed=0)
    campaign.run(NUM_KILLS, check_every=5)
    assert campaign.num_kills == NUM_KILLS
    assert len(campaign.acked) > 15
    assert campaign.num_within >= 0.3 * NUM_KILLS, "too few kills hit a commit: nothing is shown"


FULL = """
import resource, signal, sys
from specctl.collect.store import TraceWriter
from specctl.errors import OutputError
from tests.collect.rounds import header
from tests.collect.shim import Mode
from tests.collect.small_rows import tables_of
tables = tables_of(["b"])
with TraceWriter.open(sys.argv[1], header(), resume=True) as writer:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        writer.commit(["b"], tables)
    except OutputError as error:
        sys.exit(str(error))
"""


def test_no_room_is_told_and_room_again_is_enough(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk: writes come short, then fail."""
    with TraceWriter.open(tmp_path / "set", header()) as writer:
        writer.commit(["a"], tables_of(["a"]))
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "set")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert "free space" in ended.stderr
    assert ended.stderr.count("\n") == 1
    check_set(tmp_path / "set", {"a"}, {"a"})
    finish(tmp_path / "set")
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


# --------------------------------------------------------------------------- damaged bytes


def test_every_truncation_and_flip_is_named(tmp_path: Path) -> None:
    """Some of each here; scripts/inject_faults.py takes every byte and 10,000 flips."""
    path, draw = small_set(tmp_path / "set"), random.Random(0)
    whole = path.read_bytes()
    for content in draw.sample(list(truncations(whole)), 60):
        check_damage_is_named(tmp_path / "set", path, content)
    for _ in range(60):
        check_damage_is_named(tmp_path / "set", path, flipped(whole, draw))
    path.write_bytes(whole)
    assert TraceSet.open(tmp_path / "set").prompt_ids == ("a", "b")


def test_every_bit_of_header_records_and_notes_counts(tmp_path: Path) -> None:
    """Each 13th here, so that all eight bits of a byte have their turn."""
    told = flip_records(tmp_path, step=13)
    assert min(told.values()) > 30
    assert TraceSet.open(tmp_path / "flips", damaged="skip").prompt_ids == ("b",)


# --------------------------------------------------------------------------- lost power


def survives(tmp_path: Path, lies: str = "") -> int:
    """Records a writer's life, and opens every state that a power loss may leave of it.

    Returns their number; fails where an acknowledged prompt is gone or the set cannot be read.
    """
    recorder = Recorder(tmp_path / "set", lies)
    (tmp_path / "set").mkdir()
    with recorder.installed(), TraceWriter.open(tmp_path / "set", header()) as writer:
        for prompt in ("a", "b"):
            writer.commit([prompt], tables_of([prompt]))
            recorder.ack(prompt)
    count, seen = 0, set()
    for state in states(recorder.events):
        key = (state.acked, state.folders, tuple(sorted(state.files.items())))
        if key in seen:
            continue
        seen.add(key)
        count += 1
        root = tmp_path / "after"
        state.write(root)
        check_set(root, set(state.acked), {"a", "b"})
        shutil.rmtree(root)
    return count


def test_power_loss_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    assert survives(tmp_path) > 10


@pytest.mark.parametrize("lies", ["file", "folder"])
def test_mutants_that_do_not_sync_are_caught(tmp_path: Path, lies: str) -> None:
    with pytest.raises((TraceError, AssertionError, OutputError)):
        survives(tmp_path, lies)


def test_mutant_that_lists_the_data_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that takes every file in data/ counts rows that nobody acknowledged."""

    def listed(self: TraceSet, table: str) -> list[Path]:
        [log] = self.logs
        assert isinstance(log, CommitLog)
        return sorted((log.place.root / "data").glob(f"{table}-*"))  # type: ignore[operator]

    monkeypatch.setattr(reader.TraceSet, "_paths", listed)
    with pytest.raises((TraceError, AssertionError)):
        survives(tmp_path)
