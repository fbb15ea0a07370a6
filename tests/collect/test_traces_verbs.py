"""`specctl traces` and `collect` at their edges: refusals, full disks, ways out."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specctl.collect import verifying
from specctl.collect.logs import read_commits
from specctl.collect.store import TraceWriter
from specctl.collect.tokens import TokenTreatment
from specctl.errors import TraceMismatchError
from tests.cli.command import passes, refuses, specctl
from tests.collect.rounds import header
from tests.collect.sets import rows_of
from tests.collect.small_sets import again, collect


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


def test_export_replaces_nothing(root: Path, tmp_path: Path) -> None:
    export = ("traces", "export", root, "-o", tmp_path / "out")
    passes(*export)
    assert "a file of this name" in refuses(6, *export)
    passes(*export, "--format", "csv")
    (tmp_path / "out" / "rounds.parquet").unlink()
    (tmp_path / "out" / "nodes.parquet").write_bytes(b"mine")
    assert "nodes.parquet" in refuses(6, *export)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["nodes.csv", "nodes.parquet", "rounds.csv"]
    assert (tmp_path / "out" / "nodes.parquet").read_bytes() == b"mine"


def treated(root: Path, mode: str, key: bytes = b"") -> Path:
    """A set whose header says how its token ids were treated."""
    treatment = TokenTreatment(mode, key=key, vocab_size=9)  # type: ignore[arg-type]
    with TraceWriter.open(root, header().model_copy(update={"collect": treatment.header})):
        return root


def test_ids_that_were_dropped_cannot_be_kept_in_silence(tmp_path: Path) -> None:
    for mode in ("keep", "hash", "drop"):
        export = ("traces", "export", treated(tmp_path / mode, mode), "--tokens", "keep")
        told = specctl(*export, "-o", tmp_path / f"{mode}-out").err
        assert ("dropped" in told) == (mode == "drop")


@pytest.mark.parametrize("other", ["keep", "drop", "hash"])
def test_merges_of_other_token_ids_are_refused_in_words(tmp_path: Path, other: str) -> None:
    hashed = treated(tmp_path / "hashed", "hash", b"one")
    second = treated(tmp_path / "second", other, b"two" if other == "hash" else b"")
    line = refuses(4, "traces", "merge", second, hashed, "-o", tmp_path / "out")
    if other == "hash":
        assert "expected --tokens hash with the same --token-key" in line
    else:
        assert f"expected --tokens {other}, found --tokens hash" in line
    assert "join sets whose token ids were treated alike" in line
    assert "None" not in line
    line = refuses(4, "traces", "export", second, hashed, "-o", tmp_path / "out")
    assert "name sets of one pair" in line


def test_a_run_is_not_resumed_with_another_token_key(tmp_path: Path) -> None:
    """As `collect --resume` opens its set."""
    treated(tmp_path / "set", "hash", b"one")
    for mode, key, words in (
        ("hash", b"two", "expected --tokens hash with the same --token-key"),
        ("drop", b"", "expected --tokens drop, found --tokens hash"),
        ("keep", b"", "expected --tokens keep, found --tokens hash"),
    ):
        wanted = TokenTreatment(mode, key=key, vocab_size=9)  # type: ignore[arg-type]
        made = header().model_copy(update={"collect": wanted.header})
        with pytest.raises(TraceMismatchError, match=f"{words}.*--token-key that the set was"):
            TraceWriter.open(tmp_path / "set", made, resume=True)


def test_a_snapshot_is_verified_by_its_own_commits(root: Path) -> None:
    frozen = json.loads(passes("traces", "snapshot", root, "--json").out)["reference"]
    collect(root, "de")
    now = json.loads(passes("traces", "verify", root, "--json").out)
    then = json.loads(passes("traces", "verify", frozen, "--json").out)
    assert (now["num_prompts"], then["num_prompts"]) == (5, 3)
    assert then["name"] == frozen
    newest = read_commits(root).commits[-1].files[0].path(root)
    newest.chmod(0o644)
    newest.write_bytes(b"altered")
    assert not json.loads(specctl("traces", "verify", root, "--json").out)["is_whole"]
    passes("traces", "verify", frozen)
    [*_, oldest] = [s.path(root) for s in read_commits(root).commits[0].files]
    oldest.chmod(0o644)
    oldest.write_bytes(b"altered")
    assert specctl("traces", "verify", frozen).code == 4
    absent = f"{root}@sha256:{'0' * 64}"
    assert "--list" in refuses(4, "traces", "verify", absent)


def test_what_there_is_none_of_is_said(tmp_path: Path) -> None:
    root = collect(tmp_path / "set", "a")
    assert passes("traces", "snapshot", root, "--list").out == "no snapshots\n"
    assert passes("traces", "snapshot", root, "--list", "--json").out == "[]\n"
    assert passes("traces", "compact", root).out == "nothing to join: 1 commit\n"
    assert "1 commit of 1 prompt, " in passes("traces", "verify", root).out
    assert passes("traces", "snapshot", root).out.startswith("1 commit of 1 prompt:\n")
    assert "sha256:" in passes("traces", "snapshot", root, "--list").out
    collect(root, "b")
    assert passes("traces", "compact", root).out == "2 commits are 1 now\n"


@pytest.mark.parametrize("signalled", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_promises_nothing_unless_it_writes(
    root: Path, monkeypatch: pytest.MonkeyPatch, signalled: signal.Signals
) -> None:
    monkeypatch.setattr(verifying, "read_commits", lambda *_, **__: signal.raise_signal(signalled))
    told = specctl("traces", "verify", root)
    assert told.code == 128 + signalled
    assert told.err.endswith("nothing was written\n")
    assert "is kept" in specctl("traces", "verify", root, "--quarantine").err


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


def test_a_grace_without_pruning_is_refused(root: Path) -> None:
    line = refuses(2, "traces", "compact", root, "--grace-hours", 1)
    assert "--grace-hours: expected it with --prune" in line
    assert len(read_commits(root).commits) == 2
    passes("traces", "compact", root, "--prune", "--grace-hours", 1)
