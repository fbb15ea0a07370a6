"""`specctl traces` and `collect` at their edges: refusals, full disks, ways out."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.command import passes, refuses
from tests.collect.test_rearranging import again, collect
from tests.collect.test_store import rows_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return collect(tmp_path / "set", "ab", "c")


def test_snapshots_of_what_is_no_set_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in refuses(4, "traces", "snapshot", tmp_path / "none", "--list")
    assert "another folder" in refuses(4, "traces", "snapshot", tmp_path, "--list")


def test_commits_are_left_out_by_name(root: Path) -> None:
    again(root, "a", made=rows_of("a", rounds=1))
    named = refuses(4, "traces", "compact", root).split("others in ")[1].split(";")[0]
    told = json.loads(passes("traces", "snapshot", root, "--without", named, "--json").out)
    assert (told["num_prompts"], told["num_excluded_prompts"], told["num_excluded_rows"]) == (
        3,
        0,
        23,
    )
    assert "--without" in refuses(2, "traces", "snapshot", root, "--without", "commits/x")


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """A limit on file sizes stands for a full disk: writes come short, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_export_without_room_is_one_line(root: Path, tmp_path: Path, format: str) -> None:
    with small_files(500):
        told = refuses(6, "traces", "export", root, "-o", tmp_path / "out", "--format", format)
    assert "then try again" in told
    assert "--resume" not in told
    assert not list((tmp_path / "out").iterdir())


def test_export_to_a_url_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "a local folder" in refuses(2, "traces", "export", root, "-o", "s3://bucket/plain")
    assert not (tmp_path / "s3:").exists()


def test_a_key_inside_the_set_is_not_made(tmp_path: Path) -> None:
    key = tmp_path / "set" / "deep" / "key"
    options = ("--tokens", "hash", "--token-key", key)
    told = refuses(2, "collect", "embedded", "-o", tmp_path / "set", *options)
    assert "outside of the trace set" in told
    assert not (tmp_path / "set").exists()
