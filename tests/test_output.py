"""Files are whole or not there, and a place is tried before the work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from specctl import durable
from specctl.durable import check_place, prepare_folder, write_whole
from specctl.errors import OutputError
from specctl.records import json_bytes


def test_an_older_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_whole(path, b"old", "results")
    write_whole(path, b"new", "results")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_write_that_fails_keeps_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    write_whole(path, b"old", "results")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OutputError, match=r"results .*no space left"):
        write_whole(path, b"new", "results")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_file_where_a_folder_is_wanted_and_the_other_way_round(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OutputError, match=r"results folder .* cannot be written"):
        prepare_folder(file)
    with pytest.raises(OutputError, match=r"report .* cannot be written: a folder"):
        check_place(tmp_path, "report")
    with pytest.raises(OutputError, match="no such file or folder"):
        check_place(tmp_path / "absent" / "report.html", "report")


def test_a_checked_place_is_left_as_it_was(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "new")
    check_place(tmp_path / "new" / "page.html", "report")
    assert os.listdir(tmp_path / "new") == []


def test_json_has_no_nan() -> None:
    assert json.loads(json_bytes({"a": [float("nan"), 1.5], "b": "Φ"})) == {
        "a": [None, 1.5],
        "b": "Φ",
    }
