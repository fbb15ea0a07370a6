"""A copy is the same registry: same histories, same identity, on every kind of place."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts.registry import (
    Author,
    Registry,
    Writer,
    copy_registry,
    init_registry,
    open_registry,
    parse_reference,
    pin,
    promote,
    pull,
    push,
    read_package,
)
from specctl.artifacts.registry.pins import pins
from specctl.artifacts.registry.roles import registry_role
from specctl.artifacts.signing import SigningKey, Trust
from specctl.errors import ArtifactError, RegistryError, UsageError
from specctl.stores.roles import iam_policy
from tests.artifacts.registry.worlds import NAME, reader_in

GOLDEN = Path(__file__).parents[2] / "golden" / "artifacts-v1"
PROD = parse_reference(f"{NAME}@prod")


@pytest.fixture
def source(tmp_path: Path) -> Registry:
    """Two signed versions of a name, one pinned, `prod` at the second."""
    key = SigningKey.generate()
    writer = Writer(init_registry(tmp_path / "source"), Author("alice", (key,)), Trust.load())
    for kind in ("chain", "eagle2"):
        package = read_package(GOLDEN / kind)
        push(writer, package, NAME)
    pin(writer, package.digest, reason="shipped")
    promote(writer, NAME, "prod", package.digest)
    return writer.registry


def histories(registry: Registry) -> dict[str, list[bytes]]:
    return {n: [one.envelope for one in registry.log(n).entries] for n in registry.names()}


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
        patch.setattr("specctl.artifacts.registry.store_content.StoreContent.publish", cut)
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
    (other,) = set(source.log(NAME).state.versions) - {prod}
    source.content.remove(other)
    assert copy_registry(source, tmp_path / "copy").num_collected == 1
    source.content.remove(prod)
    with pytest.raises(ArtifactError, match="E_MISSING"):
        copy_registry(source, tmp_path / "next")


def test_roles_reach_their_names_and_no_settings() -> None:
    policy = iam_policy("s3://b/p", registry_role("publisher", "qwen3-8b+eagle3@h200:*"))
    rights = {one["Sid"]: one["Resource"] for one in policy["Statement"]}
    assert "arn:aws:s3:::b/p/log/qwen3-8b+eagle3@h200=*/*" in rights["CreateNewOnly"]
    assert rights["Never"] == ["arn:aws:s3:::b/p/log/_settings/*"]
    assert "Delete" not in rights
    for wrong in (("root", "*"), ("publisher", "a/b"), ("publisher", "")):
        with pytest.raises(UsageError):
            registry_role(*wrong)
