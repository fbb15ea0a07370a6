"""Stages of long runs: kept when a later one fails, one run at a time, one sentence at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.stages import Stages, told
from specctl.errors import UsageError

OPTIONS = {"tokens": 40}


def test_a_stage_that_failed_is_made_anew_and_others_are_kept(tmp_path: Path) -> None:
    made: list[str] = []

    def make(path: Path) -> None:
        made.append(path.name)
        path.write_text("whole")
        if made == ["part-a"]:
            raise OSError(28, "No space left on device", str(path))

    for number in range(3):
        stages = Stages(tmp_path, OPTIONS)
        if number == 0:
            with (
                pytest.raises(SystemExit, match=r"part-a: no space left; finished stages are kept"),
                told(tmp_path),
            ):
                stages.stage("A", "a", make)
        else:
            assert stages.stage("A", "a", make).read_text() == "whole"
            assert [*stages.seconds] == ["a"]
        stages.close()
    assert made == ["part-a", "part-a"]


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    """Other options have a folder of their own, and nothing of the first is lost."""
    first = Stages(tmp_path, OPTIONS)
    with pytest.raises(UsageError, match="another run goes on in"):
        Stages(tmp_path, OPTIONS)
    other = Stages(tmp_path, OPTIONS | {"tokens": 41})
    assert other.folder != first.folder
    first.close()
    other.close()


def test_a_command_ends_all_or_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit codes that are named: here that of words that no verb knows."""
    stages = Stages(tmp_path, OPTIONS)
    with pytest.raises(SystemExit) as ended:
        stages.verb("B", "b", "nonsense")
    assert ended.value.code == 2
    assert not (stages.folder / "b").exists()
    assert stages.verb("B", "b", "nonsense", passes=(2,)).exists()
    stages.close()
    assert "error: " in capsys.readouterr().err


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the same command goes on"), told(tmp_path):
        raise KeyboardInterrupt
