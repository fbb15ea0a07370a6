"""What has expired, or nobody believes any more: shown, told as a finding, and never damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.registry.room import Clock
from tests.cli.command import passes, refuses, specctl
from tests.cli.registries import ALL_NAMES, NAME, new_key, publish, said, trust_root

ARTIFACT, STORE = 3, 6
END, AFTER = "2300-01-01T00:00:00Z", "2300-01-01T00:00:01Z"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Called, it is a second after `END`."""
    return lambda: monkeypatch.setattr(Clock, "utc", lambda _: AFTER)


def test_what_has_expired_is_found_without_being_damage(
    registry: Path, artifacts: dict[str, Path], late: Any
) -> None:
    digest = publish(artifacts, "chain")
    passes("registry", "promote", NAME, "canary", digest, "--expires", END)
    assert said("verify", f"{NAME}@canary")["findings"] == []
    late()
    assert "E_STALE" in refuses(ARTIFACT, "registry", "pull", f"{NAME}@canary")
    verified = specctl("registry", "verify", f"{NAME}@canary")
    assert verified.code == ARTIFACT
    assert verified.err.startswith("error: E_STALE")
    assert "backup" not in verified.err
    for fine in (f"{NAME}@prod", f"{NAME}@{digest}"):
        assert said("verify", fine)["findings"] == []
        passes("registry", "pull", fine)
    [finding] = said("fsck")["findings"]
    assert (finding["code"], finding["is_damage"]) == ("E_STALE", False)
    assert finding["place"] == f"{NAME}@canary, generation 2"
    assert "no damage, 1 expired, which readers refuse: 1 name" in passes("registry", "fsck").out


def test_a_publication_that_has_expired_is_one_finding_signed_or_not(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path, late: Any
) -> None:
    key = new_key(tmp_path, "key")
    passes("registry", "trust", "add", f"{key}.pub", *ALL_NAMES, "--role", "publisher")
    passes("registry", "trust", "require", "*")
    push = ("push", artifacts["chain"], NAME, "--key", key)
    digest = said(*push, "--expires", END)["digest"]
    late()
    told = json.loads(specctl("registry", "fsck", "--json").out)["findings"]
    assert {(one["code"], one["is_damage"]) for one in told} == {("E_STALE", False)}
    assert f"{NAME}, generation 0" in {one["place"] for one in told}
    verified = specctl("registry", "verify", f"{NAME}@{digest}")
    assert (verified.code, verified.err[:14]) == (ARTIFACT, "error: E_STALE")


def test_expiry_is_shown_where_there_is_one(registry: Path, artifacts: dict[str, Path]) -> None:
    first = publish(artifacts, "chain")
    for verb in (("show", NAME), ("log", NAME)):
        assert "expires" not in passes("registry", *verb).out
    second = said("push", artifacts["eagle2"], NAME, "--expires", END)["digest"]
    passes("registry", "promote", NAME, "canary", first, "--expires", AFTER)
    rows = {row["digest"]: row for row in said("show", NAME)}
    assert (rows[first]["expires"], rows[second]["expires"]) == (None, END)
    assert (rows[first]["alias_expires"], rows[second]["alias_expires"]) == ({"canary": AFTER}, {})
    assert f"canary {AFTER}" in passes("registry", "show", NAME).out
    assert END in passes("registry", "log", NAME).out


def test_a_search_says_what_is_not_loaded_and_why(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path, late: Any
) -> None:
    other, search = NAME.replace("test", "other"), ("list", "--for", "embedded")
    publish(artifacts, "chain", "--expires", END)
    passes("registry", "push", artifacts["eagle2"], other)
    assert [row["refusal"] for row in said(*search)] == [None, None]
    late()
    fine, refused = said(*search)
    assert (fine["loadable"], fine["refusal"]) == (True, None)
    assert refused["reference"] == f"{NAME}@prod"
    assert not refused["loadable"]
    assert f"found one that expired at {END}" in refused["refusal"]
    assert "refused for" in passes("registry", *search).out


def test_a_search_knows_whose_key_was_revoked(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    key = new_key(tmp_path, "key")
    key_id = json.loads(
        passes(
            "registry",
            "trust",
            "add",
            f"{key}.pub",
            *ALL_NAMES,
            "--role",
            "publisher",
            "--role",
            "promoter",
            "--json",
        ).out
    )["key_id"]
    passes("registry", "trust", "require", "*")
    publish(artifacts, "chain", "--key", key)
    search = ("list", "--for", "embedded")
    assert said(*search)[0]["loadable"]
    passes("registry", "trust", "revoke", key_id, "--reason", "lost")
    [row] = said(*search)
    assert not row["loadable"]
    assert "was revoked" in row["refusal"]
    nobody = tmp_path / "trust.json"
    passes("registry", "trust", "require", "team*", "--trust", nobody)
    assert said(*search, "--trust", nobody)[0]["loadable"], "another user's trust"


def test_an_outage_is_no_damage(registry: Path, artifacts: dict[str, Path]) -> None:
    publish(artifacts, "chain")
    place = f"oci://127.0.0.1:1/team/policies?log={registry}"
    for check in (("verify", f"{NAME}@prod"), ("fsck",)):
        outcome = specctl("registry", *check, "--registry", place)
        assert (outcome.code, outcome.out) == (STORE, "")
        assert "the store does not answer" in outcome.err
        assert "backup" not in outcome.err


def test_settings_that_have_expired_are_believed_by_nobody_until_a_root_signs_anew(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path, late: Any
) -> None:
    """Else who serves a registry could hide a revocation behind old settings for ever."""
    publish(artifacts, "chain")
    root, record = new_key(tmp_path, "root"), tmp_path / "record.json"
    trust_root(root)
    passes("registry", "trust", "require", "team*", "--trust", record)
    settings = ("settings", record, "--key", root)
    assert said(*settings, "--expires", END)["expires"] == END
    passes("registry", "pull", f"{NAME}@prod")
    late()
    assert "E_STALE" in refuses(ARTIFACT, "registry", "pull", f"{NAME}@prod")
    assert said(*settings)["expires"] is None
    passes("registry", "pull", f"{NAME}@prod")
