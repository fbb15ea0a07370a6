"""SIGTERM, which batch systems and containers send: as Ctrl-C, and told apart from it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specctl import console
from specctl.collect.dense.collection import FinishedPrompts
from specctl.collect.recorder import TraceRecorder
from specctl.errors import SpecctlError
from specctl.logs.trace_set import TraceSet
from tests.cli.command import Outcome, passes, specctl, write_lines

TOLD = "terminated: what was finished is kept\n"


def terminate(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("mode", ["--live", "--dense"])
def test_collect_keeps_what_is_finished(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes behind the third prompt, while others are being decoded."""
    texts = [f"How much is {number} + 3?" for number in range(12)]
    prompts = write_lines(tmp_path / "prompts.txt", *texts)
    machine = ("--device", "cpu", "--threads", "1", "--max-new-tokens", "6")
    shape = ("--depth", "2", "--top-k", "2") if mode == "--dense" else ("--policy", "chain")
    arguments = ("collect", prompts, "-o", tmp_path / "set", mode, *machine, *shape)

    kind, name = (FinishedPrompts, "add") if mode == "--dense" else (TraceRecorder, "finish_prompt")
    monkeypatch.setattr(kind, name, then_terminate(getattr(kind, name), at=3))
    assert specctl(*arguments) == Outcome(143, "", TOLD)
    assert len(TraceSet.open(tmp_path / "set").prompt_ids) == 3
    monkeypatch.undo()
    passes(*arguments, "--resume")
    assert len(TraceSet.open(tmp_path / "set").prompt_ids) == 12


def then_terminate(method: Callable[..., None], at: int) -> Callable[..., None]:
    """The method, whose n-th call is followed by the signal."""
    calls = iter(range(1, at + 1))

    def called(*arguments: object) -> None:
        method(*arguments)
        if next(calls, None) == at:
            terminate()

    return called


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


def test_handler_is_restored_and_ctrl_c_is_told_apart(
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
        raise SpecctlError("x", expected="e", found="f", fix="g")

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
