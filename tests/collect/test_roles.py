"""Roles of trace sets on a real S3 server that enforces them: each does its verbs, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specctl.collect.compacting import COMPACTOR, compact, prune
from specctl.collect.places import open_place
from specctl.collect.reader import TraceSet
from specctl.collect.roles import TRACE_ROLES, trace_role
from specctl.collect.store import TraceWriter
from specctl.collect.verifying import verify
from specctl.collect.writer_log import writer_id
from specctl.errors import StoreError, UsageError
from specctl.stores.roles import iam_policy
from tests.cli.command import passes, refuses
from tests.collect.rounds import header
from tests.collect.small_rows import tables_of
from tests.stores.guarded import users

URL = "s3://guarded/shared/traces"
As = Callable[[str], None]


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[As]:
    """Lets this process be a user of a role."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with users(tmp_path, URL, TRACE_ROLES.values()) as known:

        def change(role: str) -> None:
            monkeypatch.setenv("AWS_REGION", "us-east-1")
            monkeypatch.setenv("AWS_ENDPOINT_URL", known[role]["endpoint"])
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", known[role]["access_key_id"])
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", known[role]["secret_access_key"])

        yield change


def test_each_role_does_what_it_may_and_no_more(become: As) -> None:
    become("reader")
    with pytest.raises(StoreError, match="role"):
        TraceWriter.open(URL, header())
    become("collector")
    with TraceWriter.open(URL, header()) as writer:
        for prompt in "ab":
            writer.commit([prompt], tables_of([prompt]))
    with TraceWriter.open(URL, header(), resume=True) as writer:
        assert writer.pending("abc") == ["c"]
    for forbidden in (
        lambda: TraceWriter.named(open_place(URL), COMPACTOR),
        lambda: open_place(URL).store.put_new("snapshots/x.txt", b""),
        lambda: open_place(URL).store.delete("data/x"),
    ):
        with pytest.raises(StoreError, match="role"):
            forbidden()
    become("reader")
    assert verify(URL).is_whole
    digest = TraceSet.open(URL).digest
    become("compactor")
    passes("traces", "snapshot", URL)
    assert compact(URL).num_commits == 1
    prune(URL, grace_s=0.0)
    with pytest.raises(StoreError, match="role"):
        TraceWriter.open(URL, header(), resume=True)
    become("reader")
    assert TraceSet.open(f"{URL}@{digest}").prompt_ids == ("a", "b")
    assert verify(URL).is_whole


def test_nobody_deletes_what_acknowledges_and_only_compactions_supersede() -> None:
    compactions = f"commits/{writer_id(COMPACTOR)}/*"
    assert [role.name for role in TRACE_ROLES.values() if role.deletes] == ["compactor"]
    assert not [key for key in TRACE_ROLES["compactor"].deletes if key.startswith("commits")]
    assert TRACE_ROLES["collector"].never_creates == (compactions,)
    own = [key for key in TRACE_ROLES["compactor"].creates if key.startswith("commits")]
    assert own == [compactions]


def test_roles_are_printed(tmp_path: Path) -> None:
    told = json.loads(passes("traces", "role", "collector", URL).out)
    assert told == iam_policy(URL, trace_role("collector"))
    assert "reader, collector, compactor" in refuses(2, "traces", "role", "owner", URL)
    assert "s3://bucket/prefix" in refuses(2, "traces", "role", "reader", tmp_path)
    with pytest.raises(UsageError, match="role"):
        trace_role("x")
