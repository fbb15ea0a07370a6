"""`specctl` on an OCI registry whose histories lie beside it: what is it called, and is it one."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.cli.command import passes, refuses, specctl
from tests.cli.registries import NAME, SMALL, said

ARTIFACT, INPUT, REGISTRY = 3, 4, 7


@pytest.fixture
def repository(oci_host: str, registry: Path) -> str:
    """A fresh repository, and a user without a past."""
    return f"oci://{oci_host}/team/{uuid.uuid4().hex}"


def publish(place: str, artifact: Path, num_versions: int = 1) -> str:
    """Makes a registry with one artifact at `prod`, pushed so often; its digest."""
    passes("registry", "init", "--registry", place)
    return fill(place, artifact, num_versions)


def fill(place: str, artifact: Path, num_versions: int) -> str:
    push = ("push", artifact, NAME, "--registry", place)
    for _ in range(num_versions):
        digest: str = said(*push)["digest"]
    passes("registry", "promote", NAME, "prod", digest, "--registry", place)
    return digest


def test_run_and_show_take_a_reference_behind_the_log(
    repository: str, artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digest = publish(f"{repository}?log=lo+gs", artifacts["chain"])
    assert (tmp_path / "lo+gs" / "registry.json").is_file()
    for version in ("prod", digest):
        for what in (
            f"{repository}?log=lo+gs/{NAME}@{version}",
            f"{repository}/{NAME}@{version}?log=lo+gs",
        ):
            assert json.loads(passes("show", what, "--json").out)["digest"] == digest
            [ran] = json.loads(passes("run", "--policy", what, *SMALL).out)
            assert ran["artifact_digest"] == digest
    short = f"{repository}?log=lo+gs/{NAME}@sha256:abcd"
    assert "64 lower-case hex digits" in refuses(INPUT, "show", short)


def test_equal_texts_in_two_folders_are_two_registries(
    repository: str, artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the floors nor the cache of one are the other's.

    They share a repository, as two do that were made while it was empty; later `init` refuses.
    """
    place = f"{repository}?log=logs"
    pull = ("pull", f"{NAME}@prod", "--registry", place)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        passes("registry", "init", "--registry", place)
    for name, num_versions in (("one", 3), ("two", 1)):
        monkeypatch.chdir(tmp_path / name)
        fill(place, artifacts["chain"], num_versions)
        assert "E_OFFLINE" in refuses(REGISTRY, "registry", *pull, "--offline")
        passes("registry", *pull)
    monkeypatch.chdir(tmp_path)
    absolute = f"{repository}/?log={tmp_path}/one/logs"
    assert specctl("registry", *pull[:-1], absolute, "--offline").code == 0


def test_a_root_of_a_registry_is_asked_for_however_that_is_written(
    repository: str, artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without settings that it signed, a registry of a root is refused."""
    monkeypatch.chdir(tmp_path)
    place = f"{repository}?log=logs"
    publish(place, artifacts["chain"])
    passes("registry", "keygen", tmp_path / "root")
    root = ("trust", "add", f"{tmp_path}/root.pub", "--name", "*", "--role", "root")
    passes("registry", *root, "--registry", place)
    pull = ("registry", "pull", f"{NAME}@prod", "--registry")
    (tmp_path / "link").symlink_to(tmp_path / "logs")
    for log in ("logs", "./logs/", f"{tmp_path}/logs", "link"):
        for other in (f"{repository}?log={log}", f"{repository}/?log={log}"):
            assert "E_SIG" in refuses(ARTIFACT, *pull, other)


def test_a_password_in_a_policy_is_not_repeated(registry: Path) -> None:
    for place in ("s3://key:hunter2@bucket/x", "oci://key:hunter2@host/x?log=y"):
        for what in (place, f"{place}/{NAME}@prod", f"{place}/{NAME}"):
            for verb in (("show", what), ("run", "--policy", what, *SMALL)):
                assert "hunter2" not in refuses(2, *verb)
