"""Verbs killed, interrupted and terminated: what was finished is kept, nothing is doubled."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing.context import BaseContext
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from specctl import console
from specctl.collect.recorder import Recorder
from specctl.collect.rounds import TraceRecorder
from specctl.errors import SpecctlError
from specctl.logs.trace_set import TraceSet
from tests.cli.collecting import STARTED, collect
from tests.cli.command import Outcome, passes, refuses, specctl, write_lines
from tests.collect.faults import received
from tests.collect.sets import sorted_rows

NUM_PROMPTS = 32
OPTIONS = ("--policy", "chain", "--max-new-tokens", "8", "--device", "cpu", "--threads", "1")


def many_prompts(folder: Path, count: int) -> Path:
    return write_lines(folder / "prompts.txt", *(f"How much is {n} + 3?" for n in range(count)))


def arguments(folder: Path) -> list[str]:
    return [str(folder / "prompts.txt"), "-o", str(folder / "traces"), "--resume", *OPTIONS]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.nightly)])
def test_kills_lose_and_double_nothing(num_kills: int, tmp_path: Path) -> None:
    """A kill at a random moment of each of some runs; then the set equals an undisturbed one."""
    many_prompts(tmp_path, NUM_PROMPTS)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cli.collecting", "specctl.runtime.api"])
    chance, committed, hits = random.Random(0), 0, 0
    for _ in range(num_kills):
        moment = chance.randrange(3), chance.uniform(0.0, 0.3)
        acked, ran = run_and_kill(context, arguments(tmp_path), *moment)
        hits += ran
        if (tmp_path / "traces" / "trace.json").exists():
            found = check(tmp_path / "traces")
            assert found >= committed + acked, "an acknowledged prompt is gone"
            committed = found
    assert hits >= num_kills // 2, "too few kills hit a running collection: nothing is shown"
    assert committed > 0
    passes("collect", *arguments(tmp_path))
    assert check(tmp_path / "traces") == NUM_PROMPTS
    passes("collect", tmp_path / "prompts.txt", "-o", tmp_path / "again", *OPTIONS)
    found, wanted = (sorted_rows(tmp_path / name, "rounds") for name in ("traces", "again"))
    assert found.equals(wanted)


def run_and_kill(
    context: BaseContext, argv: list[str], num_commits: int, delay_s: float
) -> tuple[int, bool]:
    """Kills a collection some time after its n-th commit was acknowledged, before the second next.

    Returns the number of acknowledged prompts, and whether the collection still ran.
    """
    receiver, theirs = context.Pipe()
    process = context.Process(target=collect, args=(argv, theirs))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    assert receiver.recv() == STARTED
    acked = []
    for num_prompts in islice(received(receiver), num_commits):
        acked.append(num_prompts)
        receiver.send("go on")
    time.sleep(delay_s)
    ran = process.is_alive()
    process.kill()
    process.join()
    return sum([*acked, *received(receiver)]), ran


def check(folder: Path) -> int:
    """The laws of a trace folder after a kill; returns the number of finished prompts."""
    traces = TraceSet.open(folder)
    assert len(set(traces.prompt_ids)) == len(traces.prompt_ids)
    seen = traces.scan("rounds").select("prompt_id").collect().to_series().cast(pl.String)
    assert set(seen) <= set(traces.prompt_ids)
    for path in folder.rglob("*s/*.parquet"):
        pq.read_table(path)  # no published file is torn
    return len(traces.prompt_ids)


@pytest.mark.parametrize("is_written", [True, False])
def test_ctrl_c_keeps_the_policies_that_are_compared_and_promises_no_more(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_written: bool
) -> None:
    """In the middle of `run --compare`, when every policy has decoded the first prompt."""
    ticks = iter([None] * 4)  # the first prompt of three policies, the next of one

    @contextmanager
    def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
        def tick(count: int = 1) -> None:
            if next(ticks, "over") == "over":
                raise KeyboardInterrupt

        yield tick

    monkeypatch.setattr(console, "progress", progress)
    tmp_path.with_name(f"{tmp_path.name}.log").write_text("of the shell")
    compare = ("run", prompts, "--compare", "ar,chain,eagle2", *OPTIONS[2:])
    done = specctl(*compare, *(("-o", tmp_path) if is_written else ()))
    left = f"written so far: {tmp_path} (5 files)" if is_written else "nothing was written"
    assert (done.code, done.err) == (130, f"interrupted: {left}\n")
    assert "; 1 of " in done.out
    if is_written:
        rows = json.loads((tmp_path / "results.json").read_text())
        assert [row["policy"] for row in rows] == ["ar", "chain", "eagle2"]
        assert [row["num_requests"] for row in rows] == [1, 1, 1]


def terminate(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("mode", "number", "code", "word"),
    [("--live", signal.SIGTERM, 143, "terminated"), ("--dense", signal.SIGINT, 130, "interrupted")],
)
def test_a_collection_that_ends_early_keeps_what_is_finished(
    mode: str, number: int, code: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes behind the third prompt, while others are being decoded."""
    prompts = many_prompts(tmp_path, 12)
    shape = ("--depth", "2", "--children", "2") if mode == "--dense" else ("--policy", "chain")
    arguments = ("collect", prompts, "-o", tmp_path / "set", mode, *OPTIONS[2:], *shape)

    kind, name = (Recorder, "put") if mode == "--dense" else (TraceRecorder, "finish_prompt")
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, then_signal(getattr(kind, name), number, at=3))
        told = f"{word}: {tmp_path / 'set'} holds 3 finished prompts"
        told += "; the same command with --resume goes on\n"
        assert specctl(*arguments) == Outcome(code, "", told)
    assert check(tmp_path / "set") == 3
    assert "--resume" in refuses(6, *arguments)
    assert "3 were there before" in passes(*arguments, "--resume").out
    assert check(tmp_path / "set") == 12


def then_signal(method: Callable[..., None], number: int, at: int) -> Callable[..., None]:
    """The method, whose n-th call is followed by the signal."""
    calls = iter(range(1, at + 1))

    def called(*arguments: object) -> None:
        method(*arguments)
        if next(calls, None) == at:
            os.kill(os.getpid(), number)

    return called


def test_a_profile_that_ends_early_has_written_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes one file, at its end: what stood there before is no result of it."""
    out = tmp_path / "cost_model.json"
    out.write_text("old")
    os.utime(out, (1, 1))
    monkeypatch.setattr("specctl.replay.cost.profile.profile", terminate)
    found = specctl("profile", "--quick", "-o", out, *OPTIONS[-4:])
    assert found == Outcome(143, "", "terminated: nothing was written\n")
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(out, "old")]


@pytest.fixture
def verify_ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Lets `traces verify` end in something else."""

    def ends(act: Callable[[], None]) -> None:
        @contextmanager
        def progress(*_: object) -> Iterator[None]:
            act()
            yield

        monkeypatch.setattr(console, "progress", progress)

    return ends


def test_the_handler_is_restored_and_ctrl_c_is_told_apart(
    verify_ends: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    verify_ends(terminate)
    told = "terminated: nothing was written\n"
    assert specctl("traces", "verify", tmp_path) == Outcome(143, "", told)
    assert signal.getsignal(signal.SIGTERM) is before
    verify_ends(lambda: signal.raise_signal(signal.SIGINT))
    assert specctl("traces", "verify", tmp_path).code == 130

    def refuse() -> None:
        raise SpecctlError("x: expected e, found f", hint="g")

    verify_ends(refuse)
    assert specctl("traces", "verify", tmp_path).code == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_handlers_of_others_are_left_alone(
    verify_ends: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    """SIGTERM that is ignored stays so; threads other than the main one set none."""
    found = []
    verify_ends(lambda: found.append(signal.getsignal(signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        specctl("traces", "verify", tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    thread = threading.Thread(target=specctl, args=("traces", "verify", tmp_path))
    thread.start()
    thread.join()
    assert found == [signal.SIG_IGN, before]


AT = """
import atexit, os, runpy, signal, sys
name, number = sys.argv[1], int(sys.argv[2])
class Signal:
    def find_spec(self, found, *_):
        if found == name:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Signal())
if name == "the end":
    atexit.register(os.kill, os.getpid(), number)
sys.argv[:] = ["specctl", *sys.argv[3:]]
runpy.run_module("specctl", run_name="__main__", alter_sys=True)
"""
"""A program that runs specctl, and sends it a signal when it imports a module."""
STARTS = ("specctl.cli", "typer", "specctl.cli.registry", "cryptography", "the end")


@pytest.mark.parametrize("moment", STARTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_or_after_a_verb_is_one_line(
    moment: str, number: int, tmp_path: Path
) -> None:
    """While modules are imported, and when Python ends."""
    verb = ("registry", "keygen", tmp_path / "key")
    ran = subprocess.run(
        [sys.executable, "-c", AT, moment, str(int(number)), *map(str, verb)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 128 + number
    word = "interrupted" if number == signal.SIGINT else "terminated"
    is_over = moment == "the end"
    assert ran.stderr == (f"{word}\n" if is_over else f"{word}: nothing was written\n")
    assert (tmp_path / "key").exists() == is_over
