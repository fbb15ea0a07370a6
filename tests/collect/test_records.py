"""Commit records that lie or are lost: what they cost, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.collect.commits import MAX_SEGMENT_BYTES, Commit
from specctl.collect.logs import read_commits
from specctl.collect.opening import open_log
from specctl.collect.reader import TraceSet
from specctl.collect.snapshots import take_snapshot
from specctl.collect.store import TraceWriter
from specctl.collect.verifying import verify
from specctl.errors import OutputError, TraceCorruptError, TraceSchemaError
from tests.collect.memory_store import SetStore
from tests.collect.rounds import header
from tests.collect.sets import collect
from tests.collect.small_rows import tables_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return collect(tmp_path / "set", "a", "b", "c")


def log_of(root: Path) -> Path:
    [log] = (root / "commits").iterdir()
    return log


def test_a_record_of_a_high_number_is_a_gap(root: Path) -> None:
    """Told at once: nothing is asked for each number between."""
    (log_of(root) / "99999999.json").write_bytes(b"{}")
    with pytest.raises(TraceCorruptError, match=r"00000004.*found none, and later ones"):
        TraceSet.open(root)
    with pytest.raises(TraceCorruptError, match="00000004"):
        TraceWriter.open(root, header(), resume=True)
    traces = TraceSet.open(root, damaged="skip")
    assert traces.prompt_ids == ("a", "b", "c")
    gap, record = traces.damages
    assert gap.what.endswith("00000004.json")
    assert record.what.endswith("99999999.json")


def test_a_gap_is_one_damage_and_what_follows_is_read(root: Path) -> None:
    for seq in (1, 2):
        (log_of(root) / f"0000000{seq}.json").unlink()
    log = open_log(root, damaged="skip")
    assert log.prompt_ids == ("c",)
    assert [damage.what[-13:] for damage in log.damages] == ["00000001.json"]


def test_a_bucket_is_not_asked_for_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = SetStore(), []
    store.put_new(f"commits/{'a' * 32}/99999999.json", b"{}")
    real = store.get
    monkeypatch.setattr(
        store, "get", lambda key, **limits: asked.append(key) or real(key, **limits)
    )
    with pytest.raises(TraceCorruptError, match="00000000"):
        read_commits(store.place)
    assert len(asked) < 100


def test_what_a_segment_may_claim_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log_of(root) / "00000001.json"
    record = Commit.model_validate_json(path.read_bytes())
    [size] = {segment.size_bytes for segment in record.files[:1]}
    claim = path.read_bytes().replace(f":{size},".encode(), f":{MAX_SEGMENT_BYTES + 1},".encode())
    path.write_bytes(claim)
    with pytest.raises(TraceSchemaError, match="size_bytes"):
        TraceSet.open(root)
    monkeypatch.setattr("specctl.collect.segments.MAX_SEGMENT_BYTES", 100)
    with (
        TraceWriter.open(root.parent / "new", header()) as writer,
        pytest.raises(OutputError, match="a file of at most 100 bytes"),
    ):
        writer.commit(["d"], tables_of(["d"]))


def test_a_lost_record_is_told_where_its_rows_are_missing(root: Path) -> None:
    """Nothing says how many rows it had; that there were some must be said."""
    path = log_of(root) / "00000002.json"
    path.write_bytes(path.read_bytes()[:40])
    taken = take_snapshot(open_log(root, damaged="skip"))
    assert (taken.num_prompts, taken.num_missing_rows, taken.num_unreadable_records) == (2, 0, 1)
    assert "1 commit record or runs of them cannot be read" in taken.render()
    assert taken.to_json()["num_unreadable_records"] == 1
    found = verify(root)
    assert found.num_unreadable_records == 1
    assert "1 commit record or runs of them cannot be read" in found.render()


def test_a_copy_of_a_record_has_a_digest_of_its_own(root: Path) -> None:
    record = read_commits(root).commits[0]
    before = record.digest
    assert record.model_copy(update={"seq": 7}).digest != before
    assert record.model_copy().digest == before == Commit(**record.model_dump()).digest
