"""Damage that has a way out: notes of quarantine, compactions that lost something, headers."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.collect import commits
from specctl.collect.chains import Damage
from specctl.collect.commits import COMPACTOR, Commit, writer_id
from specctl.collect.compacting import compact, prune
from specctl.collect.logs import read_commits
from specctl.collect.opening import open_log
from specctl.collect.places import open_place
from specctl.collect.quarantine import put_in_quarantine
from specctl.collect.reader import TraceSet
from specctl.collect.snapshots import take_snapshot
from specctl.collect.store import TraceWriter
from specctl.collect.verifying import verify
from specctl.errors import StoreError, TraceCorruptError, TraceSchemaError
from tests.collect.rounds import header
from tests.collect.sets import edit
from tests.collect.small_sets import again, collect


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return collect(tmp_path / "set", "a", "b", "c")


def damaged(root: Path) -> tuple[Path, bytes]:
    """A file of the commit of `b`, cut short, and what it was."""
    path = read_commits(root).commits[1].files[0].path(root)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    return path, whole


# --------------------------------------------------------------------------- quarantine


def test_a_quarantined_commit_holds_up_no_writer(root: Path) -> None:
    damaged(root)
    with pytest.raises(TraceCorruptError, match="traces verify --quarantine"):
        TraceWriter.open(root, header(), resume=True)
    with pytest.raises(TraceCorruptError, match="bytes"):
        compact(root)
    verify(root, quarantine=True)
    with TraceWriter.open(root, header(), resume=True) as writer:
        assert writer.pending("abcd") == ["d"]  # acknowledged is acknowledged
    done = compact(root)
    assert (done.num_commits_before, done.num_commits) == (3, 2)
    assert open_log(root, damaged="skip").prompt_ids == ("a", "c")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def rename(path: Path) -> None:
    """A note of another commit than its own."""
    edit(path, commit="sha256:" + "0" * 64)


@pytest.mark.parametrize("harm", [cut, rename])
@pytest.mark.parametrize("is_mended", [True, False])
def test_a_note_that_cannot_be_read_still_leaves_its_commit_out(
    root: Path, harm: Callable[[Path], None], *, is_mended: bool
) -> None:
    path, whole = damaged(root)
    verify(root, quarantine=True)
    [note] = (root / "quarantine").iterdir()
    harm(note)
    if is_mended:
        path.write_bytes(whole)
    with pytest.raises(TraceCorruptError, match="1 of 3 in quarantine, 46 rows"):
        TraceSet.open(root)
    taken = take_snapshot(open_log(root, damaged="skip"))
    assert (taken.num_prompts, taken.num_missing_rows) == (2, 46)
    found = verify(root)
    assert any(note.name in damage.reason for damage in found.damages)
    assert len(verify(root, quarantine=True).damages) == (0 if is_mended else 1)
    assert len(list((root / "quarantine").iterdir())) == (0 if is_mended else 1)


def test_other_files_in_quarantine_are_named_and_do_no_harm(root: Path) -> None:
    (root / "quarantine").mkdir()
    (root / "quarantine" / "thesis.tex").write_text("x")
    assert TraceSet.open(root).prompt_ids == ("a", "b", "c")
    [damage] = verify(root).damages
    assert "thesis.tex" not in str(damage.commit)
    assert "found another name" in damage.reason


def test_quarantine_holds_for_snapshots_too(root: Path) -> None:
    reference = take_snapshot(open_log(root)).reference
    damaged(root)
    verify(root, quarantine=True)
    with pytest.raises(TraceCorruptError, match="1 of 3 in quarantine"):
        TraceSet.open(reference, verify=False)


def test_what_a_note_says_is_checked(root: Path) -> None:
    commit = read_commits(root).commits[1]
    for change in ({"num_rows": -5}, {"created": "\x1b[2J"}, {"what": "\x1b[31m"}):
        put_in_quarantine(open_place(root), Damage("w", "r", commit.digest, 46))
        [note] = (root / "quarantine").iterdir()
        edit(note, **change)
        [told] = open_log(root, damaged="skip").damages
        assert (told.reason, told.num_rows) == ("in quarantine, by a note that cannot be read", 46)
        note.unlink()


# --------------------------------------------------------------------------- the disk


def failing(monkeypatch: pytest.MonkeyPatch, path: Path, error: OSError) -> None:
    """Reading the bytes of one file fails."""
    real = commits.file_sha256

    def read(asked: Path) -> str:
        if asked == path:
            raise error
        return real(asked)

    monkeypatch.setattr(commits, "file_sha256", read)


def test_what_the_disk_cannot_read_is_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = read_commits(root).commits[1].files[0].path(root)
    failing(monkeypatch, path, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(TraceCorruptError, match="found Input/output error; restore the file"):
        TraceSet.open(root)
    found = verify(root, quarantine=True)
    assert [damage.what for damage in found.damages] == [f"data/{path.name}"]
    assert open_log(root, damaged="skip").prompt_ids == ("a", "c")


def test_what_one_may_not_read_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To others the file is whole: nobody may put it into quarantine for that."""
    path = read_commits(root).commits[1].files[0].path(root)
    failing(monkeypatch, path, PermissionError(errno.EACCES, "Permission denied"))
    for act in (
        lambda: TraceSet.open(root),
        lambda: open_log(root, damaged="skip"),
        lambda: verify(root, quarantine=True),
    ):
        with pytest.raises(StoreError, match=f"{path.name}.*Permission denied; correct perm"):
            act()
    assert not (root / "quarantine").exists()


# --------------------------------------------------------------------------- compactions


def forge(root: Path, **fields: Any) -> None:
    """A compaction of `a` and `b` that is not what it should be."""
    compact(root)
    path = root / "commits" / writer_id(COMPACTOR) / "00000001.json"
    edit(path, **fields)


LOSSES = {
    "a prompt": ({"prompt_ids": ["a", "b"]}, "found no prompt 'c'"),
    "all prompts": ({"prompt_ids": [], "files": []}, "found no prompt 'a'"),
    "all rows": ({"files": []}, "found 0 rows of rounds instead of 6"),
    "a new prompt": ({"prompt_ids": ["a", "b", "c", "d"]}, "found prompt 'd', which none"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_compaction_that_lost_something_is_refused(root: Path, loss: str) -> None:
    fields, message = LOSSES[loss]
    forge(root, **fields)
    with pytest.raises(TraceCorruptError, match=message):
        TraceSet.open(root)
    with pytest.raises(TraceCorruptError, match=message):
        TraceWriter.open(root, header(), resume=True)
    assert TraceSet.open(root, damaged="skip").prompt_ids == ("a", "b", "c")
    found = verify(root)
    assert [message.removeprefix("found ") in damage.reason for damage in found.damages] == [True]
    assert (found.num_prompts, found.num_unreadable_records) == (3, 0)


def test_only_the_compactor_supersedes(root: Path) -> None:
    path = sorted((root / "commits").glob("*/*.json"))[-1]
    edit(path, supersedes=["sha256:" + "0" * 64])
    with pytest.raises(TraceSchemaError, match="only the writer 'compactor'"):
        TraceSet.open(root)
    assert open_log(root, damaged="skip").prompt_ids == ("a", "b")


def test_a_superseded_record_behind_an_unreadable_one_is_not_blamed(root: Path) -> None:
    """What cannot be read may be the one that holds the prompt."""
    forge(root, prompt_ids=["a", "b"])
    path = sorted((root / "commits" / writer_id("shard 1/1")).iterdir())[1]
    path.write_bytes(b"")
    assert open_log(root, damaged="skip").prompt_ids == ("a", "b")


def cut_compaction(root: Path) -> Path:
    """A compaction of all commits, one of whose files is cut short."""
    compact(root)
    path = open_log(root).commits[0].files[0].path(root)
    path.write_bytes(path.read_bytes()[:100])
    return path


@pytest.mark.parametrize("is_noted", [True, False])
def test_what_a_damaged_compaction_joined_takes_its_place_again(
    root: Path, *, is_noted: bool
) -> None:
    joined = [segment.path(root) for segment in read_commits(root).segments]
    cut_compaction(root)
    verify(root, quarantine=is_noted)
    with pytest.raises(TraceCorruptError):
        TraceSet.open(root)
    taken = take_snapshot(open_log(root, damaged="skip"))
    assert (taken.num_prompts, taken.num_missing_rows) == (3, 0)
    frozen = TraceSet.open(taken.reference)
    assert frozen.prompt_ids == ("a", "b", "c")
    assert frozen.num_rows("rounds") == 6
    joined[0].unlink()
    log = open_log(root, damaged="skip")
    assert log.prompt_ids == ("b", "c")
    assert take_snapshot(log).num_missing_rows == 46


def test_a_repeat_that_a_damaged_compaction_had_dropped_does_not_shut_the_set(root: Path) -> None:
    """The commit with it is left out, and its rows are told as missing."""
    again(root, "b", "d")
    cut_compaction(root)
    log = open_log(root, damaged="skip")
    assert sorted(log.prompt_ids) == ["a", "b", "c"]
    assert take_snapshot(log).num_missing_rows > 0
    assert sorted(TraceSet.open(root, damaged="skip").prompt_ids) == ["a", "b", "c"]


def test_a_compaction_of_compactions_falls_back_step_by_step(root: Path) -> None:
    compact(root)
    first = open_log(root).commits[0].files[0].path(root)
    collect(root, "d")
    cut_compaction(root)
    assert sorted(open_log(root, damaged="skip").prompt_ids) == ["a", "b", "c", "d"]
    assert len(open_log(root, damaged="skip").commits) == 2
    first.unlink()
    log = open_log(root, damaged="skip")
    assert (len(log.commits), sorted(log.prompt_ids)) == (4, ["a", "b", "c", "d"])
    assert take_snapshot(log).num_missing_rows == 0


def test_a_prompt_of_a_quarantined_commit_and_another_holds_up_no_compaction(root: Path) -> None:
    damaged(root)
    verify(root, quarantine=True)
    again(root, "b")
    assert compact(root).num_commits == 2
    assert prune(root) == (0, 0)
    assert sorted(open_log(root, damaged="skip").prompt_ids) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "change",
    [
        {"created": "x"},
        {"created": "2026-13-01T00:00:00+00:00"},
        {"prompt_ids": ["c", "c"]},
        {"prompt_ids": ["d", "c"]},
        {"epoch": 2},
    ],
)
def test_fields_of_records_follow_their_laws(root: Path, change: dict[str, Any]) -> None:
    edit(sorted((root / "commits").glob("*/*.json"))[-1], **change)
    message = next(iter(change)).replace("_", ".")
    with pytest.raises((TraceSchemaError, TraceCorruptError), match=message):
        TraceSet.open(root)


def test_two_files_of_one_table_are_refused(root: Path) -> None:
    path = sorted((root / "commits").glob("*/*.json"))[-1]
    files = json.loads(path.read_bytes())["files"]
    edit(path, files=files + files[:1])
    with pytest.raises(TraceSchemaError, match="one of each table"):
        TraceSet.open(root)


# --------------------------------------------------------------------------- headers, snapshots


def test_a_snapshot_freezes_the_header(root: Path) -> None:
    """Well-formed, with a digest that is right: but not what these rows were collected under."""
    reference = take_snapshot(open_log(root)).reference
    edit(root / "trace.json", sampling={"temperature": 0.7})
    for name in (root, reference):
        with pytest.raises(TraceCorruptError, match=r"trace.json: .*00000001.json says"):
            TraceSet.open(name, damaged="skip")
        assert [damage.what for damage in verify(name).damages] == ["trace.json"]
    before = len(list((root / "commits").rglob("*")))
    with pytest.raises(TraceCorruptError, match=r"trace.json"):
        compact(root)
    with pytest.raises(TraceCorruptError, match=r"trace.json"):
        TraceWriter.named(open_place(root), "shard 1/1")
    assert len(list((root / "commits").rglob("*"))) == before, "a record names the wrong header"


def test_a_snapshot_of_a_lost_record_is_refused(root: Path) -> None:
    reference = take_snapshot(open_log(root)).reference
    sorted((root / "commits").glob("*/*.json"))[-1].unlink()
    with pytest.raises(TraceCorruptError, match="expected 3 commits, found 2"):
        TraceSet.open(reference)


def test_all_records_name_the_header(root: Path) -> None:
    found = [Commit.model_validate_json(path.read_bytes()) for path in root.glob("commits/*/*")]
    assert {record.header_digest for record in found} == {header().digest}
    assert all(record.is_sound and record.body_digest for record in found)
