"""A copy is the same registry: same histories, same identity, on every kind of place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.facts import utc_now, utc_seconds
from specctl.artifacts.signing import Trust
from specctl.errors import ArtifactError, RegistryError, UsageError
from specctl.registry import (
    Author,
    Registry,
    StoreContent,
    Writer,
    copy_registry,
    copying,
    init_registry,
    open_registry,
    parse_reference,
    pin,
    promote,
    pull,
    push,
    read_package,
)
from specctl.registry.fsck import fsck
from specctl.registry.garbage import mark, sweep
from specctl.registry.layout import blob_key
from specctl.registry.pins import pins
from specctl.registry.roles import registry_role
from specctl.registry.room import Clock
from specctl.stores.probing import PROBE_KEY
from specctl.stores.roles import iam_policy
from tests.registry.copies import GOLDEN, collected, histories, source
from tests.registry.worlds import NAME, HandClock, reader_in

__all__ = ["source"]  # a fixture

PROD = parse_reference(f"{NAME}@prod")


@pytest.fixture(params=["folder", "s3", "oci"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "copy")
    if request.param == "s3":
        found: str = request.getfixturevalue("s3_url")
        return found
    return f"oci://{request.getfixturevalue('oci_host')}/{tmp_path.name}?log={tmp_path / 'copy'}"


def test_a_copy_is_the_same_registry(source: Registry, place: str, tmp_path: Path) -> None:
    copied = copy_registry(source, place)
    copy = open_registry(place)
    assert (copied.num_names, copied.num_entries, copied.num_artifacts) == (1, 3, 2)
    assert copy.marker == source.marker
    assert histories(copy) == histories(source)
    pulled = pull(copy, PROD, reader_in(tmp_path / "home"))
    assert pulled.artifact == pull(source, PROD, reader_in(tmp_path / "other")).artifact
    digest = pulled.artifact.digest
    assert copy.content.signatures(digest) == source.content.signatures(digest) != []
    assert list(pins(copy)) == list(pins(source)) != []


def test_a_copy_goes_on_and_comes_back(source: Registry, tmp_path: Path) -> None:
    copy_registry(source, tmp_path / "copy")
    writer = Writer(source, Author("alice"), Trust.load())
    package = read_package(GOLDEN / "hetero")
    push(writer, package, NAME)
    promote(writer, NAME, "prod", package.digest)
    copy_registry(source, tmp_path / "copy")
    copy_registry(open_registry(tmp_path / "copy"), tmp_path / "restored")
    assert histories(open_registry(tmp_path / "restored")) == histories(source)


def test_histories_come_behind_what_they_name(
    source: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("specctl.registry.store_content.StoreContent.publish", cut)
        with pytest.raises(KeyboardInterrupt):
            copy_registry(source, tmp_path / "copy")
    assert open_registry(tmp_path / "copy").names() == []
    copy_registry(source, tmp_path / "copy")
    assert histories(open_registry(tmp_path / "copy")) == histories(source)


def test_a_copy_that_went_its_own_way_is_refused(source: Registry, tmp_path: Path) -> None:
    copy_registry(source, tmp_path / "copy")
    digest = read_package(GOLDEN / "chain").digest
    for registry in (open_registry(tmp_path / "copy"), source):
        promote(Writer(registry, Author("bob"), Trust.load()), NAME, "canary", digest)
    with pytest.raises(RegistryError, match="E_LOG"):
        copy_registry(source, tmp_path / "copy")


def test_another_registry_is_not_written_to(source: Registry, tmp_path: Path) -> None:
    init_registry(tmp_path / "other")
    with pytest.raises(RegistryError, match="E_EXISTS"):
        copy_registry(source, tmp_path / "other")


def test_content_that_an_alias_needs_must_be_there(source: Registry, tmp_path: Path) -> None:
    prod = source.log(NAME).state.aliases["prod"].digest
    source.content.remove(prod)
    with pytest.raises(ArtifactError, match="E_MISSING"):
        copy_registry(source, tmp_path / "next")


def test_what_was_collected_stays_so_in_copies_of_copies(source: Registry, tmp_path: Path) -> None:
    gone = collected(source)
    for place in ("copy", "copy", "copy of the copy"):
        before = source if place == "copy" else open_registry(tmp_path / "copy")
        copied = copy_registry(before, tmp_path / place)
        assert (copied.num_artifacts, copied.num_collected) == (1, 1)
        copy = open_registry(tmp_path / place)
        assert copy.garbage_log().state.collected == {gone}
        assert len(copy.garbage_log().entries) == 3, "written down once"
        assert {one.code for one in fsck(copy, Trust())} == {"W_COLLECTED"}
        assert mark(copy, Author("gc")) == []


def test_what_was_lost_is_not_called_collected(source: Registry, tmp_path: Path) -> None:
    """No alias needs it, but no garbage collection took it."""
    prod = source.log(NAME).state.aliases["prod"].digest
    (other,) = set(source.log(NAME).state.versions) - {prod}
    blob = min(source.content.parts(other) - source.content.parts(prod) - {other})
    (tmp_path / "source" / blob_key(blob)).unlink()
    with pytest.raises(ArtifactError, match=f"E_MISSING {re.escape(NAME)}@{other}.*fsck"):
        copy_registry(source, tmp_path / "copy")
    assert open_registry(tmp_path / "copy").names() == []


def test_a_copy_that_died_while_it_wrote_that_down_goes_on(
    source: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = collected(source)
    real = copying._next_step

    for num_steps in range(3):
        steps = iter(range(num_steps))

        def step(*given: Any, steps: Any = steps) -> Any:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(copying, "_next_step", step)
            with pytest.raises(KeyboardInterrupt):
                copy_registry(source, tmp_path / "copy")
    copy_registry(source, tmp_path / "copy")
    state = open_registry(tmp_path / "copy").garbage_log().state
    assert (state.collected, state.sweep_generation) == ({gone}, None)


def test_a_sweep_at_the_destination_takes_nothing_of_a_copy(
    source: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest version lies there, marked, of a copy that was cut off; the sweep comes between
    content and history."""
    copy_registry(source, tmp_path / "copy")
    writer = Writer(source, Author("alice"), Trust.load())
    package = read_package(GOLDEN / "hetero")
    push(writer, package, NAME)

    def at_the_destination() -> Registry:
        registry = open_registry(tmp_path / "copy")
        registry.clock = HandClock(utc_seconds(utc_now()) + ahead)
        return registry

    ahead = 1
    at_the_destination().content.publish(package.digest, package.files, lambda _: None)
    assert package.digest in mark(at_the_destination(), Author("gc"))
    real, swept, ahead = copying._copy_entries, list[str](), 7300

    def sweep_first(copy: Registry, name: str, *given: Any) -> int:
        if name == NAME:
            swept.extend(sweep(at_the_destination(), Author("gc"), grace_s=7200))
        return real(copy, name, *given)

    monkeypatch.setattr(copying, "_copy_entries", sweep_first)
    copy_registry(source, tmp_path / "copy")
    assert swept == []
    assert open_registry(tmp_path / "copy").content.fetch(package.digest, lambda _: None)


def test_a_name_that_takes_too_long_is_stopped_before_its_history(
    source: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StoreContent.publish

    def slow(*given: Any) -> None:
        real(*given)
        monkeypatch.setattr(Clock, "elapsed_s", lambda _: 1e9)

    monkeypatch.setattr(StoreContent, "publish", slow)
    with pytest.raises(RegistryError, match="E_TIMEOUT"):
        copy_registry(source, tmp_path / "copy")
    monkeypatch.undo()
    assert open_registry(tmp_path / "copy").names() == []


def test_what_is_pinned_and_not_named_is_copied_too(source: Registry, tmp_path: Path) -> None:
    package = read_package(GOLDEN / "hetero")
    source.content.publish(package.digest, package.files, lambda _: None)
    pin(Writer(source, Author("alice"), Trust.load()), package.digest, reason="mine")
    copy_registry(source, tmp_path / "copy")
    copy = open_registry(tmp_path / "copy")
    assert copy.content.fetch(package.digest, lambda _: None) == dict(package.files)
    assert list(pins(copy)) == list(pins(source))


def test_a_history_that_no_name_is_written_as_is_not_left_out_in_silence(
    source: Registry, tmp_path: Path
) -> None:
    (tmp_path / "source" / "log" / "README.md").mkdir()
    (tmp_path / "source" / "log" / "README.md" / "x").touch()
    with pytest.raises(RegistryError, match=r"E_NAME .*log/README.md"):
        copy_registry(source, tmp_path / "copy")


def test_roles_reach_their_names_and_no_settings() -> None:
    policy = iam_policy("s3://b/p", registry_role("publisher", "qwen3-8b+eagle3@h200:*"))
    rights = {one["Sid"]: one["Resource"] for one in policy["Statement"]}
    assert "arn:aws:s3:::b/p/log/qwen3-8b+eagle3@h200=*/*" in rights["CreateNewOnly"]
    assert rights["Never"][0] == "arn:aws:s3:::b/p/log/_settings/*"
    assert "Delete" not in rights
    for role in ("publisher", "promoter", "gc", "owner"):
        assert PROBE_KEY in registry_role(role).creates, "whoever commits tries the store first"
    assert registry_role("reader").name == "reader"
    for wrong in (("root", "*"), ("publisher", "a/b"), ("publisher", ""), ("reader", "*")):
        with pytest.raises(UsageError):
            registry_role(*wrong)
