"""`specctl registry` by its verbs, on a folder; the stores have their own tests below."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.cli.command import passes, refuses, specctl
from tests.cli.registries import NAME, SMALL, publish, said


def test_a_policy_is_published_found_used_and_rolled_back(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    first, second = (publish(artifacts, kind) for kind in ("chain", "eagle2"))
    [row] = said("list")
    assert (row["num_versions"], row["aliases"]) == (2, {"prod": second})
    assert [row["digest"] for row in said("show", NAME)] == [first, second]

    place = f"{registry}/{NAME}@prod"
    [ran] = json.loads(passes("run", "--policy", place, *SMALL).out)
    assert ran["artifact_digest"] == second

    moved = said("rollback", NAME, "prod", "--reason", "slower", "--actor", "ann")
    assert (moved["digest"], moved["previous_digest"]) == (first, second)
    [ran] = json.loads(passes("run", "--policy", place, *SMALL).out)
    assert ran["artifact_digest"] == first
    history = said("log", NAME)
    assert [row["kind"] for row in history] == ["publish", "alias", "publish", "alias", "rollback"]
    assert (history[-1]["actor"], history[-1]["reason"]) == ("ann", "slower")

    pulled = said("pull", f"{NAME}@prod", "-o", tmp_path / "copy")
    assert pulled["digest"] == first
    assert json.loads(passes("show", tmp_path / "copy", "--json").out)
    checked = {"num_names": 1, "num_entries": 5, "findings": []}
    assert said("verify", f"{NAME}@prod") == {**checked, "num_artifacts": 1}
    assert said("fsck") == {**checked, "num_artifacts": 2}


@pytest.mark.parametrize("damage", ["a version of tomorrow", "no manifest", "a broken log"])
def test_one_name_that_cannot_be_read_hides_no_other(
    registry: Path, artifacts: dict[str, Path], damage: str
) -> None:
    publish(artifacts, "chain")
    other = "embedded+eagle3@cpu:other"
    digest = said("push", artifacts["eagle2"], other)["digest"]
    manifest = registry / "manifests" / "sha256" / f"{digest.removeprefix('sha256:')}.json"
    if damage == "a broken log":
        [entry] = (path for path in (registry / "log").rglob("*.json") if "other" in str(path))
        entry.write_bytes(b"{}")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes().replace(b'_version":2', b'_version":3'))
    found = specctl("registry", "list", "--for", "embedded", "--json")
    assert found.code == 0
    assert "other" in found.err
    [row] = json.loads(found.out)
    assert row["reference"] == f"{NAME}@prod"


def test_offline_runs_from_the_cache_and_says_so(
    registry: Path, artifacts: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    digest = publish(artifacts, "chain")
    place = f"{registry}/{NAME}@prod"
    line = refuses(7, "run", "--policy", place, "--offline", *SMALL)
    assert "E_OFFLINE" in line
    assert "found nothing, in the cache" in line
    passes("registry", "pull", f"{NAME}@prod")
    publish(artifacts, "eagle2")
    [ran] = json.loads(passes("run", "--policy", place, "--offline", *SMALL).out)
    assert ran["artifact_digest"] == digest
    assert f"offline: {place} is {digest}" in caplog.text
    outcome = specctl("registry", "pull", f"{NAME}@prod", "--offline")
    assert outcome.code == 0
    assert outcome.err.startswith("warning: offline:")


def test_a_reference_composes_like_a_folder(registry: Path, artifacts: dict[str, Path]) -> None:
    publish(artifacts, "chain")
    place = f"{registry}/{NAME}@prod+survival:max_tokens=9"
    [ran] = json.loads(passes("run", "--policy", place, *SMALL).out)
    assert (ran["policy"], ran["artifact_digest"]) == ("chain+survival:max_tokens=9", None)
    assert "aliases: prod" in refuses(7, "run", "--policy", f"{registry}/{NAME}", *SMALL)


def test_a_promotion_names_what_it_replaces(registry: Path, artifacts: dict[str, Path]) -> None:
    first, second = (publish(artifacts, kind) for kind in ("chain", "eagle2"))
    line = refuses(7, "registry", "promote", NAME, "prod", first, "--expect", first)
    assert "E_ALIAS_CONFLICT" in line
    assert second in line
    assert said("promote", NAME, "prod", first, "--expect", second)["generation"] == 4


def test_damage_ends_with_a_code(registry: Path, artifacts: dict[str, Path]) -> None:
    publish(artifacts, "chain")
    blob = next((registry / "blobs" / "sha256").iterdir())
    blob.write_bytes(b"altered")
    outcome = specctl("registry", "fsck", "--json")
    assert outcome.code == 3
    assert "E_DIGEST" in {row["code"] for row in json.loads(outcome.out)["findings"]}
    assert outcome.err.startswith("error: E_DIGEST")
    assert outcome.err.count("\n") == 1
    assert blob.read_bytes() == b"altered", "fsck changes nothing"


def test_what_is_bad_is_not_published(registry: Path, artifacts: dict[str, Path]) -> None:
    assert "a registry (registry.json)" in refuses(3, "registry", "push", registry, NAME)
    assert "E_NAME" in refuses(7, "registry", "push", artifacts["chain"], "../x")
    assert said("list") == []


def test_garbage_is_collected_in_two_phases(registry: Path, artifacts: dict[str, Path]) -> None:
    publish(artifacts, "chain")
    publish(artifacts, "eagle2")
    reference = f"{NAME}@prod"
    said("pin", reference, "--reason", "the paper cites it")
    assert [one["reason"] for one in said("pins")] == ["the paper cites it"]
    assert "the paper cites it" in passes("registry", "pins").out
    assert said("unpin", reference, "--reason", "withdrawn")[0]["num_released"] == 1
    assert said("pins") == []
    assert said("gc", "--mark") == []
    assert "neither" in refuses(2, "registry", "gc")
    assert "--grace" in refuses(2, "registry", "gc", "--sweep", "--grace", 0.5)
    time.sleep(1.1)  # entries know their second: one of this second is not older than now
    assert said("gc", "--mark", "--retention-days", 0) != []
    assert said("gc", "--sweep") == []


def test_settings_are_shown_and_set(registry: Path, tmp_path: Path) -> None:
    assert said("settings") is None
    record = {"trust_version": 1, "keys": [], "require": ["*"], "threshold": 1}
    (tmp_path / "record.json").write_text(json.dumps(record))
    shown = passes("registry", "settings", tmp_path / "record.json").out
    assert shown == "set, generation 0, not signed\n"
    assert said("settings") == {**record, "generation": 0}
    assert said("settings", tmp_path / "record.json")["generation"] == 1
    assert "No such file" in refuses(2, "registry", "settings", tmp_path / "none")


def test_places_that_are_no_registry_are_told(tmp_path: Path) -> None:
    assert "E_NO_REGISTRY" in refuses(7, "registry", "list", "--registry", tmp_path)
    assert "scheme" in refuses(2, "registry", "list", "--registry", "gs://bucket/x")


def test_a_registry_is_made_once(registry: Path) -> None:
    assert "E_EXISTS" in refuses(7, "registry", "init")


def test_on_s3_the_same_round_trip(
    s3_url: str, artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECCTL_REGISTRY", s3_url)
    passes("registry", "init")
    digest = publish(artifacts, "chain")
    [ran] = json.loads(passes("run", "--policy", f"{s3_url}/{NAME}@prod", *SMALL).out)
    assert ran["artifact_digest"] == digest
    assert said("fsck")["findings"] == []
