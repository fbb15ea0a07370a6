"""A copy: the same registry at another place, or nothing is written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts.signing import SigningKey
from specctl.errors import ArtifactError, RegistryError, StoreError, UsageError
from specctl.registry import (
    Package,
    Registry,
    copy_registry,
    init_registry,
    open_registry,
    opening,
    promote,
    pull,
    push,
)
from specctl.registry.content import blob_key
from specctl.registry.publishing import Writer
from specctl.registry.trust import Trust
from specctl.registry.verifying import verify
from specctl.stores import PROBE_KEY, open_store
from tests.registry.worlds import NAME, PROD, Ignoring, code_of, package, reader_in, trusting

KEY = SigningKey.generate()


def writer(registry: Registry) -> Writer:
    return Writer(registry, Trust(), "alice", KEY)


@pytest.fixture
def source(tmp_path: Path, real: tuple[Package, Package]) -> Registry:
    """Two signed versions of a name, `prod` at the second."""
    registry = init_registry(tmp_path / "source")
    for one in real:
        push(writer(registry), one, NAME)
    promote(writer(registry), NAME, "prod", real[1].digest)
    return registry


def histories(registry: Registry) -> dict[str, list[bytes]]:
    return {n: [one.envelope for one in registry.log(n).entries] for n in registry.names()}


@pytest.mark.parametrize("backend", ["local", "s3"])
def test_a_copy_is_the_same_registry_and_comes_back(
    source: Registry,
    tmp_path: Path,
    backend: str,
    request: pytest.FixtureRequest,
    real: tuple[Package, Package],
) -> None:
    """Chains and signatures hold, it is brought up to date, and it restores the first."""
    local = backend == "local"
    place = str(tmp_path / "copy") if local else request.getfixturevalue("s3_url")
    copied = copy_registry(source, place)
    assert (copied.num_names, copied.num_entries, copied.num_artifacts) == (1, 3, 2)
    copy = open_registry(place)
    assert copy.marker == source.marker
    assert histories(copy) == histories(source)
    reader = reader_in(tmp_path / "home", trusting(KEY))
    assert pull(copy, PROD, reader).artifact.digest == real[1].digest
    push(writer(source), package("third"), "other")
    promote(writer(source), NAME, "prod", real[0].digest)
    copy_registry(source, place)
    copy_registry(open_registry(place), tmp_path / "restored")
    restored = open_registry(tmp_path / "restored")
    assert histories(restored) == histories(source)
    assert verify(restored, trusting(KEY)).findings == []


def test_a_copy_that_was_written_to_is_refused(
    source: Registry, tmp_path: Path, real: tuple[Package, Package]
) -> None:
    copy_registry(source, tmp_path / "copy")
    for registry in (open_registry(tmp_path / "copy"), source):
        promote(writer(registry), NAME, "canary", real[0].digest)
    assert code_of(copy_registry, source, tmp_path / "copy") == "E_LOG"


def test_a_copy_goes_nowhere_where_anything_else_is(source: Registry, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "paper.tex").touch()
    init_registry(tmp_path / "other")
    for place in (thesis, tmp_path / "other"):
        assert code_of(copy_registry, source, place) == "E_EXISTS"
    assert [path.name for path in thesis.iterdir()] == ["paper.tex"]
    for inside in (source.url, f"{source.url}/backup"):
        with pytest.raises(UsageError, match="is the registry itself, or lies in it"):
            copy_registry(source, inside)
    assert verify(source, Trust()).findings == []


@pytest.mark.parametrize("harm", ["gone", "flipped"])
def test_damaged_content_is_not_copied(
    source: Registry, tmp_path: Path, real: tuple[Package, Package], harm: str
) -> None:
    from specctl.artifacts.manifest import CARD, digest_of

    blob = tmp_path / "source" / blob_key(digest_of(real[0].files[CARD]))
    blob.chmod(0o600)
    blob.unlink() if harm == "gone" else blob.write_bytes(b"#" * blob.stat().st_size)
    with pytest.raises(ArtifactError, match=r"E_MISSING|E_DIGEST"):
        copy_registry(source, tmp_path / "copy")
    assert open_registry(tmp_path / "copy").names() == []


def test_a_folder_that_is_no_name_is_not_copied(source: Registry, tmp_path: Path) -> None:
    """Whoever may write there cannot stop a backup."""
    (tmp_path / "source" / "log" / "EVIL").mkdir()
    (tmp_path / "source" / "log" / "EVIL" / "x").touch()
    copy_registry(source, tmp_path / "copy")
    assert histories(open_registry(tmp_path / "copy")) == histories(source)


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "copied before"])
def test_a_place_that_ignores_the_condition_gets_no_copy(
    source: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    if is_there:
        copy_registry(source, tmp_path / "copy")
    push(writer(source), package("more"), "more")
    store = Ignoring(open_store(tmp_path / "copy"))
    before = {one.key for one in store.objects("")}
    monkeypatch.setattr(opening, "open_store", lambda _: store)
    with pytest.raises(StoreError, match="If-None-Match"):
        copy_registry(source, tmp_path / "copy")
    assert {one.key for one in store.objects("")} - before <= {PROBE_KEY}


def test_a_registry_that_lost_its_marker_is_named_as_that(source: Registry) -> None:
    """The advice for an absent one, `init`, would lead nowhere."""
    Path(source.url, "registry.json").unlink()
    with pytest.raises(RegistryError, match=r"E_EXISTS.*lost its registry.json.*from a copy"):
        init_registry(source.url)
