"""One OCI repository, one registry: what one keeps there would be the other's garbage."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError, UsageError
from specctl.registry import (
    Author,
    Registry,
    Writer,
    copy_registry,
    init_registry,
    open_registry,
    push,
)
from specctl.registry.fsck import fsck
from specctl.stores import open_store
from tests.registry.worlds import NAME, package, writer_on


@pytest.fixture
def repository(oci_host: str) -> str:
    return f"oci://{oci_host}/team/{uuid.uuid4().hex}"


def published(place: str, word: str) -> Registry:
    registry = init_registry(place)
    push(Writer(registry, Author("ann"), Trust()), package(word), NAME)
    return registry


def test_a_registry_is_not_made_over_the_artifacts_of_another(
    repository: str, tmp_path: Path
) -> None:
    published(f"{repository}?log={tmp_path / 'first'}", "one")
    with pytest.raises(RegistryError, match=r"E_EXISTS.*artifacts of another registry"):
        init_registry(f"{repository}?log={tmp_path / 'second'}")
    other = writer_on(open_store(tmp_path / "other")).registry
    with pytest.raises(RegistryError, match=r"E_EXISTS.*artifacts of another registry"):
        copy_registry(other, f"{repository}?log={tmp_path / 'second'}")
    assert not (tmp_path / "second").exists()


def test_a_registry_that_lost_its_log_is_restored_over_its_own_repository(
    repository: str, tmp_path: Path
) -> None:
    place = f"{repository}?log={tmp_path / 'log'}"
    first = published(place, "one")
    copy_registry(first, tmp_path / "backup")
    shutil.rmtree(tmp_path / "log")
    copy_registry(open_registry(tmp_path / "backup"), place)
    assert open_registry(place).marker == first.marker
    assert [one.code for one in fsck(open_registry(place), Trust()) if one.is_damage] == []


def test_a_copy_has_a_repository_of_its_own(repository: str, tmp_path: Path) -> None:
    """Also while there is nothing in it: what the source pushes later, the copy would collect."""
    empty = init_registry(f"{repository}?log={tmp_path / 'first'}")
    with pytest.raises(UsageError, match="another repository"):
        copy_registry(empty, f"{repository}?log={tmp_path / 'second'}")
    assert not (tmp_path / "second").exists()
