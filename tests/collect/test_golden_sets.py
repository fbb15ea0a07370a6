"""Sets of earlier writers stay readable and writable, and their digests do not move."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specctl.collect.compacting import compact
from specctl.collect.logs import read_commits
from specctl.collect.quarantine import Quarantined, read_quarantine
from specctl.collect.reader import TraceSet
from specctl.collect.snapshots import list_snapshots
from specctl.collect.store import TraceWriter
from specctl.collect.texts import committed_texts, texts_of
from specctl.collect.tokens import KEEP
from specctl.collect.verifying import verify
from specctl.errors import TraceCorruptError
from tests.collect.rounds import header
from tests.collect.sets import PROMPTS, rows_of

GOLDEN = Path(__file__).parents[1] / "golden"
V1_DIGEST = "sha256:0b2481c5fc875a33ce691ab47204a7369f1f0b1a59cc047f72c8396e480c7959"


def test_digest_of_the_first_version_did_not_move() -> None:
    traces = TraceSet.open(GOLDEN / "traces-v1")
    commits = sorted((GOLDEN / "traces-v1" / "commits").glob("*/*.json"))
    assert len(commits) == 1
    assert traces.digest == V1_DIGEST


def test_digests_of_the_golden_set_are_still_what_is_computed() -> None:
    root = GOLDEN / "traces-v1-digests"
    log = read_commits(root)
    assert all(record.body_digest and record.header_digest for record in log.records)
    assert sorted(committed_texts(log.commits)) == ["a", "b", "c"]
    assert committed_texts(log.commits) == texts_of(PROMPTS, KEEP)
    [note] = read_quarantine(log.place).values()
    assert isinstance(note, Quarantined)
    [snapshot] = list_snapshots(log.place)
    with pytest.raises(TraceCorruptError, match="1 of 2 in quarantine, 46 rows"):
        TraceSet.open(f"{root}@{snapshot}")
    assert TraceSet.open(f"{root}@{snapshot}", damaged="skip").prompt_ids == ("b",)
    assert verify(root).is_whole


@pytest.mark.parametrize("name", ["traces-v1", "traces-v1-writers", "traces-v1-digests"])
def test_golden_sets_stay_readable_and_writable(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "set")
    before = TraceSet.open(tmp_path / "set")
    assert before.summary()["num_rounds"] > 0
    with TraceWriter.open(tmp_path / "set", header(), resume=True) as writer:
        writer.commit(["new"], rows_of("new"))
    compact(tmp_path / "set")
    assert TraceSet.open(tmp_path / "set").prompt_ids == tuple(sorted((*before.prompt_ids, "new")))
