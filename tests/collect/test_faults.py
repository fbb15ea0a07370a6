"""Kills, full disks, lies and lost power: acknowledged rows are never lost, never doubled.

A little of each campaign; the marker `nightly`, and scripts/inject_faults.py, run them at length.
"""

from __future__ import annotations

import functools
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from scripts import inject_faults
from specctl.collect import trace_writer
from specctl.collect.trace_writer import TraceWriter
from specctl.errors import OutputError, SpecctlError
from specctl.logs import trace_set
from specctl.stores import ObjectStore
from tests.collect.faults import (
    PLANNED,
    Campaign,
    check_set,
    damage_everywhere,
    fail_everywhere,
    finish,
    forkserver,
    run_life,
    simulated_life,
    survive_power_loss,
)
from tests.collect.rounds import header
from tests.collect.sets import collect, tables_of
from tests.collect.shim import Mode

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
NUM_KILLS = 20


@pytest.mark.parametrize(("mode", "step"), [("simulated death", 5), ("EIO", 7), ("ENOSPC", 8)])
def test_trouble_at_any_operation_loses_and_doubles_nothing(
    tmp_path: Path, mode: Mode, step: int
) -> None:
    """At some of them; scripts/inject_faults.py does all of it to real processes."""
    life = functools.partial(simulated_life, mode=mode)
    assert fail_everywhere(tmp_path, lambda root, at: life(root, at=at), step) > 60


def test_real_processes_die_as_simulated_ones_do(tmp_path: Path) -> None:
    context = forkserver()
    for mode, at in (("die", 20), ("die in write", 45), ("EINTR", 50)):
        root = tmp_path / f"{mode}-{at}"
        life = run_life(context, root, mode, at)  # type: ignore[arg-type]
        assert (life.count is None) == mode.startswith("die")
        check_set(root, set(life.acked), set(PLANNED))
        finish(root)


def test_random_kills_of_four_writers(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "traces", num_writers=4, seed=0)
    campaign.run(NUM_KILLS, check_every=5)
    assert campaign.num_kills == NUM_KILLS
    assert len(campaign.acked) > 15
    assert campaign.num_repeats, "no two writers took the same prompt: nothing is shown"
    assert campaign.num_within >= 0.3 * NUM_KILLS, "too few kills hit a commit: nothing is shown"


def test_every_truncation_and_flip_is_named(tmp_path: Path) -> None:
    told = damage_everywhere(collect(tmp_path / "set", "a", "b"), random.Random(0), 8, 8)
    assert told.keys() == {"trace.json", "rounds", "nodes", "snapshots"}
    assert min(told.values()) >= 14


def test_power_loss_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    assert survive_power_loss(tmp_path) > 10


@pytest.mark.nightly
@pytest.mark.parametrize("name", inject_faults.CAMPAIGNS)
def test_campaigns_at_length(tmp_path: Path, name: str) -> None:
    figures = inject_faults.CAMPAIGNS[name](tmp_path)  # raises where a row is lost or doubled
    assert figures.get("num_lost", figures.get("num_unnoticed", 0)) == 0
    assert "skipped" not in figures, figures["skipped"]


# --------------------------------------------------------------------------- mutants


@pytest.mark.parametrize("lies", ["file", "folder"])
def test_mutants_that_do_not_sync_are_caught(tmp_path: Path, lies: str) -> None:
    with pytest.raises((SpecctlError, AssertionError)):
        survive_power_loss(tmp_path, lies)


@pytest.fixture
def nodes_after_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[str, bytes]] = []

    def late(store: ObjectStore, key: str, content: bytes | Path) -> None:
        if key.startswith("nodes/"):
            assert isinstance(content, Path)
            held.append((key, content.read_bytes()))
            return
        real(store, key, content)
        while held:
            store.put_new(*held.pop())

    real = trace_writer.create
    monkeypatch.setattr(trace_writer, "create", late)


@pytest.mark.usefixtures("nodes_after_rounds")
def test_mutant_with_nodes_after_rounds_is_caught(tmp_path: Path) -> None:
    life = functools.partial(simulated_life, mode="simulated death")
    with pytest.raises((SpecctlError, AssertionError)):
        survive_power_loss(tmp_path)
    with pytest.raises((SpecctlError, AssertionError)):
        fail_everywhere(tmp_path / "lives", lambda root, at: life(root, at=at), step=4)


def two_writers_of_the_same(root: Path | str, names: tuple[str, str]) -> int:
    """Both open the set before either has finished anything, and take the same prompts.

    Args:
        names: of the writers, in their records; segments of equal bytes are one file if they are
            published in the same millisecond.

    Returns:
        The number of repeats, of six prompts.
    """
    prompts = [f"p{number}" for number in range(6)]
    both = [TraceWriter.open(root, header(), resume=True) for _ in names]

    def write(writer: TraceWriter, name: str) -> None:
        with writer:
            for prompt in prompts:
                writer.commit([prompt], tables_of([prompt]), policy={"writer": name})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, both, names))
    check_set(root, set(prompts), set(prompts))
    return trace_set.read_listing(root).num_repeats


def test_two_writers_that_take_the_same_prompts_double_nothing(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for root in (tmp_path / "set", s3_url):
        assert two_writers_of_the_same(root, ("one", "other")) == 6


def test_two_writers_of_equal_bytes_in_one_millisecond_publish_one_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 1, 31, 12, tzinfo=tz)

    monkeypatch.setattr(trace_writer, "datetime", Stopped)
    assert two_writers_of_the_same(tmp_path / "set", ("same", "same")) == 0


def test_a_writer_that_failed_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does one that was closed."""
    with TraceWriter.open(tmp_path / "set", header()) as writer:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(trace_writer, "create", full)
            with pytest.raises(OutputError, match="no space left"):
                writer.commit(["a"], tables_of(["a"]))
        with pytest.raises(OutputError, match="an earlier segment failed"):
            writer.commit(["a"], tables_of(["a"]))
    with pytest.raises(OutputError, match="its writer was closed"):
        writer.commit(["a"], tables_of(["a"]))
    check_set(tmp_path / "set", set(), set())
