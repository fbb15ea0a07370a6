"""`specctl registry` by its verbs: round trips, refusals before the first write, words, keys."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specctl import registry as room
from specctl.errors import RegistryError
from specctl.registry import log as log_module
from specctl.registry import publishing
from specctl.registry.names import Reference
from specctl.registry.resolving import named_digest
from specctl.registry.trust import Trust
from specctl.stores import LocalStore
from tests.cli.command import (
    ARTIFACT,
    INPUT,
    NAME,
    OUTPUT,
    REGISTRY,
    USAGE,
    new_key,
    passes,
    publish,
    refuses,
    said,
    specctl,
    trust,
    write_artifact,
)

SMALL = ("--limit", 1, "--max-new-tokens", 4, "--device", "cpu", "--json")
pytestmark = pytest.mark.usefixtures("registry")
Artifacts = dict[str, Path]


def test_a_policy_is_published_found_used_and_rolled_back(
    registry: Path, artifacts: Artifacts, tmp_path: Path
) -> None:
    first, second = (publish(artifacts, kind) for kind in ("chain", "eagle2"))
    [row] = said("list")
    assert (row["num_versions"], row["aliases"]) == (2, {"prod": second})
    assert [row["digest"] for row in said("show", NAME)] == [first, second]

    place = f"{registry}/{NAME}@prod"
    [ran] = json.loads(passes("run", "--policy", place, *SMALL).out)
    assert ran["artifact_digest"] == second
    assert "aliases: prod" in refuses(REGISTRY, "run", "--policy", f"{registry}/{NAME}", *SMALL)
    composed = f"{place}+survival:max_tokens=9"
    [ran] = json.loads(passes("run", "--policy", composed, *SMALL).out)
    assert (ran["policy"], ran["artifact_digest"]) == (composed, None)

    moved = said("rollback", NAME, "prod", "--reason", "slower", "--actor", "ann")
    assert moved["digest"] == first
    [ran] = json.loads(passes("run", "--policy", f"{NAME}@prod", *SMALL).out)
    assert ran["artifact_digest"] == first, "of the registry in the environment"
    history = said("log", NAME)
    assert [row["kind"] for row in history] == ["publish", "alias", "publish", "alias", "rollback"]
    assert (history[-1]["actor"], history[-1]["reason"]) == ("ann", "slower")

    pulled = said("pull", f"{NAME}@prod", "-o", tmp_path / "copy")
    assert pulled["digest"] == first
    assert json.loads(passes("show", tmp_path / "copy", "--json").out)
    checked = {"num_names": 1, "num_entries": 5, "findings": []}
    assert said("verify", f"{NAME}@prod") == {**checked, "num_artifacts": 1}
    assert said("verify") == {**checked, "num_artifacts": 2}
    shutil.copytree(registry, tmp_path / "backup")
    assert said("verify", "--registry", tmp_path / "backup") == {**checked, "num_artifacts": 2}


def test_a_push_under_a_name_that_contradicts_the_manifest_warns_and_goes_on(
    artifacts: Artifacts,
) -> None:
    told = specctl("registry", "push", artifacts["chain"], "embedded+h@cpu:chat", "--json")
    line = "the name says drafter h, the artifact was made on embedded:eagle3"
    assert (told.code, told.err) == (0, f"warning: {line}\n")
    assert json.loads(told.out)["warnings"] == [line]
    assert [row["name"] for row in said("list")] == ["embedded+h@cpu:chat"]


def test_offline_runs_from_the_cache_and_says_so(registry: Path, artifacts: Artifacts) -> None:
    digest = publish(artifacts, "chain")
    place = f"{registry}/{NAME}@prod"
    line = refuses(REGISTRY, "run", "--policy", place, "--offline", *SMALL)
    assert "E_OFFLINE" in line
    assert "never pulled" in line
    passes("registry", "pull", f"{NAME}@prod")
    publish(artifacts, "eagle2")
    outcome = specctl("run", "--policy", place, "--offline", *SMALL)
    assert json.loads(outcome.out)[0]["artifact_digest"] == digest
    assert outcome.err.startswith(f"warning: offline: {place} is {digest}")
    outcome = specctl("registry", "pull", f"{NAME}@prod", "--offline")
    assert outcome.code == 0
    assert outcome.err.startswith("warning: offline:")


def test_the_first_digits_of_a_digest_will_do(registry: Path, artifacts: Artifacts) -> None:
    first, second = (publish(artifacts, kind) for kind in ("chain", "eagle2"))
    short = f"{NAME}@{first[:15]}"
    assert said("pull", short)["digest"] == first
    assert first in specctl("registry", "pull", short, "--offline").out
    assert json.loads(passes("show", f"{registry}/{short}", "--json").out)["digest"] == first
    assert said("promote", NAME, "prod", first[:19], "--expect", second[:19])["digest"] == first
    promote = ("registry", "promote", NAME, "prod", second, "--expect")
    assert "E_ALIAS_CONFLICT" in refuses(REGISTRY, *promote, second)
    assert "sha256:" in refuses(USAGE, *promote, "canary")
    line = refuses(REGISTRY, "registry", "pull", f"{NAME}@sha256:2ac074cddc03")
    assert "the name has 2 versions, and none has this digest" in line
    alike = "sha256:" + first[7:20] + ("0" if first[20] != "0" else "1") * 51
    log: Any = SimpleNamespace(state=SimpleNamespace(versions={first: 0, alike: 1}))
    with pytest.raises(RegistryError, match=f"begin so: {first} and {alike}; give more of them"):
        named_digest(log, Reference(NAME, digest=first[:15]), Trust())


def test_versions_are_numbered_in_the_order_of_publication(artifacts: Artifacts) -> None:
    first, second = (publish(artifacts, kind) for kind in ("chain", "eagle2"))
    assert [row["version"] for row in said("show", NAME)] == ["v1", "v2"]
    assert said("promote", NAME, "prod", "v1")["digest"] == first
    assert said("rollback", NAME, "prod", "v2", "--reason", "slow")["digest"] == second
    assert said("pull", f"{NAME}@v1")["digest"] == first
    assert "versions: 2" in refuses(REGISTRY, "registry", "promote", NAME, "prod", "v3")
    assert "did you mean prod?" in refuses(REGISTRY, "registry", "pull", f"{NAME}@prd")
    assert "the number of a version" in refuses(REGISTRY, "registry", "promote", NAME, "v7", "v1")


def test_a_push_whose_alias_is_refused_says_what_was_published(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, stranger = new_key(tmp_path, "ann"), new_key(tmp_path, "stranger")
    trust(key)
    digest = publish(artifacts, "chain", "--key", key)
    push = ("registry", "push", artifacts["chain"], NAME, "--alias", "next")
    line = refuses(ARTIFACT, *push)
    assert f"{digest} is published: already there, v1; next did not move" in line
    assert "E_SIG" in refuses(ARTIFACT, *push, "--key", stranger), "whose signature is worth none"
    assert len(said("log", NAME)) == 2
    real = publishing.promote

    def late(writer: Any, *given: Any, **options: Any) -> Any:
        """Somebody moved the alias meanwhile."""
        return real(writer, *given, **options | {"expect": digest})

    monkeypatch.setattr(room, "promote", late)
    line = refuses(REGISTRY, *push[:2], artifacts["eagle2"], *push[3:], "--key", key)
    assert re.search("E_ALIAS_CONFLICT.*was published as v2; next did not move", line)
    assert [row["version"] for row in said("show", NAME)] == ["v1", "v2"]


# ------------------------------------------------------------------ refusals


def test_a_new_disk_may_become_a_registry_and_a_used_one_may_not(tmp_path: Path) -> None:
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    passes("registry", "init", "--registry", tmp_path / "disk")
    (tmp_path / "notes").write_text("mine")
    assert "'disk'" in refuses(REGISTRY, "registry", "init", "--registry", tmp_path)


def test_a_signature_of_something_else_is_not_published(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    key = new_key(tmp_path, "key")
    signed, other = (shutil.copytree(artifacts[kind], tmp_path / kind) for kind in artifacts)
    passes("registry", "sign", signed, "--key", key, "--name", NAME)
    stale = other / "signature.dsse.json"
    for data in ((signed / "signature.dsse.json").read_bytes(), b"hello"):
        stale.write_bytes(data)
        assert "E_SIG" in refuses(ARTIFACT, "registry", "push", other, NAME)
    stale.unlink()
    for folder in (other, signed):
        passes("registry", "push", folder, NAME)
    passes("registry", "verify")


def test_an_own_folder_that_cannot_be_written_is_named_by_its_variable(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(artifacts, "chain")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    line = refuses(OUTPUT, "registry", "pull", f"{NAME}@prod")
    assert "XDG_CACHE_HOME" in line
    assert "--resume" not in line


def test_without_a_registry_a_name_or_a_home_the_refusal_names_what_to_give(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that was given any number for its user."""

    def no_such_user() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", no_such_user)
    push = ("push", artifacts["chain"], NAME)
    assert "--actor" in refuses(USAGE, "registry", *push)
    assert said(*push, "--actor", "ci")["actor"] == "ci"
    monkeypatch.setattr("pwd.getpwuid", lambda uid: no_such_user())
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert "XDG_CONFIG_HOME" in refuses(USAGE, "registry", "trust", "list")
    monkeypatch.delenv("SPECCTL_REGISTRY")
    assert "SPECCTL_REGISTRY" in refuses(USAGE, "registry", "list")


# ------------------------------------------------------------------ damage, outage


def test_damage_ends_with_a_code(registry: Path, artifacts: Artifacts) -> None:
    publish(artifacts, "chain")
    blob = next((registry / "blobs" / "sha256").iterdir())
    blob.write_bytes(b"altered")
    outcome = specctl("registry", "verify", "--json")
    assert outcome.code == ARTIFACT
    assert "E_DIGEST" in {row["code"] for row in json.loads(outcome.out)["findings"]}
    assert outcome.err.startswith("error: E_DIGEST")
    assert outcome.err.count("\n") == 1
    assert "damage at 1 place" in specctl("registry", "verify").out
    assert blob.read_bytes() == b"altered", "nothing is changed"


def lose(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


HINTS: dict[str, tuple[str, Callable[[Path], object] | None]] = {
    "a version": (f"promote {NAME} prod v9", None),
    "an alias": (f"pull {NAME}@unheard-of", None),
    "a digest": (f"pull {NAME}@sha256:{'0' * 64}", None),
    "a rollback": (f"rollback {NAME} prod --reason slower", None),
    "a rollback of no alias": (f"rollback {NAME} next --reason slower", None),
    "a name": ("log qwen3-8b", None),
    "no registry": ("list", lose),
    "a blob": (f"pull {NAME}@prod", lambda place: lose(place / "blobs" / "sha256")),
    "a history": (
        f"log {NAME}",
        lambda place: next(place.glob("log/*/*0.json")).write_text("altered"),
    ),
}


@pytest.mark.parametrize("kind", HINTS)
def test_a_command_of_a_hint_works_as_it_is_printed(
    kind: str,
    registry: Path,
    artifacts: Artifacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the registry was given by the option, the command has it."""
    publish(artifacts, "chain")
    monkeypatch.delenv("SPECCTL_REGISTRY")
    line, harm = HINTS[kind]
    if harm is not None:
        harm(registry)
    said = specctl("registry", *line.split(), "--registry", registry)
    assert said.code != 0
    [told] = re.findall("`specctl ([^`]+)`", said.err)
    words = ["v1" if word == "VERSION" else word for word in shlex.split(told)]
    found = specctl(*words)
    assert found.code == (ARTIFACT if kind in ("a blob", "a history") else 0), found


def test_what_a_revoked_key_signed_is_no_damage(
    registry: Path, artifacts: Artifacts, tmp_path: Path
) -> None:
    """It is told apart and marked, hides no damage, and the hint works when it is followed."""
    old, new = (new_key(tmp_path, name) for name in ("old", "new"))
    old_id, _ = (trust(key) for key in (old, new))
    aliases = dict(zip(("prod", "canary"), artifacts, strict=False))
    for alias, kind in aliases.items():
        said("push", artifacts[kind], NAME, "--alias", alias, "--key", old)
    assert said("verify")["findings"] == []
    for verb in (("list",), ("show", NAME), ("log", NAME)):
        assert "refused" not in passes("registry", *verb).out
    passes("registry", "trust", "revoke", old_id, "--reason", "stolen")

    states = [row["state"] for row in said("verify")["findings"]]
    assert states == ["not accepted"] * 6, "artifact, publication and alias of each"
    shown = passes("registry", "verify").out
    assert "no damage" in shown
    assert "does not accept 6 places" in shown
    assert said("list")[0]["refused"] == ["canary", "prod"]
    assert [row["refused"] for row in said("show", NAME)] == [["v1", "prod"], ["v2", "canary"]]
    assert all("stolen" in row["refusal"] for row in said("log", NAME))
    for verb in (("list",), ("show", NAME), ("log", NAME)):
        assert "refused" in passes("registry", *verb).out

    blob = next((registry / "blobs" / "sha256").iterdir())
    whole = blob.read_bytes()
    blob.write_bytes(b"altered")
    damaged = specctl("registry", "verify")
    assert damaged.code == ARTIFACT
    assert "damage: " in damaged.err
    assert {"state: damage", "state: not accepted"} <= {*map(str.strip, damaged.out.splitlines())}
    blob.write_bytes(whole)

    for number, (alias, kind) in enumerate(aliases.items(), 1):
        refused = specctl("registry", "verify", f"{NAME}@{alias}")
        assert refused.code == ARTIFACT
        assert "not accepted: 3 findings" in refused.err
        told = shlex.split(re.findall("`specctl ([^`]+)`", refused.err)[-1])
        assert told[-2:] == ["--registry", str(registry)]
        given = {"FOLDER": artifacts[kind], "NAME": NAME, "ALIAS": alias, "KEY": new}
        assert set(given) < {*told}
        passes(*(given.get(word, word) for word in told))
        assert said("verify", f"{NAME}@{alias}")["findings"] == []
        assert len(said("verify")["findings"]) == 6 - 3 * number


# ------------------------------------------------------------------ words


def test_piped_output_is_whole_and_in_words(artifacts: Artifacts) -> None:
    digest = publish(artifacts, "chain", "--reason", "a reason " * 20)
    for verb in (("list",), ("show", NAME), ("log", NAME)):
        lines = passes("registry", *verb, "--wide").out.splitlines()
        assert any(digest in line for line in lines), verb
        short = passes("registry", *verb).out
        assert (digest[:19] in short) == (verb[0] != "log"), "a history has times and reasons"
        assert digest[:20] not in short


def test_a_search_names_what_an_artifact_was_made_on(artifacts: Artifacts) -> None:
    digest = publish(artifacts, "chain")
    [found] = said("list", "embedded", "prod")
    assert (found["reference"], found["digest"]) == (f"{NAME}@prod", digest)
    assert (found["target"], found["dtype"], found["refusal"]) == ("embedded", "float32", None)
    assert said("list", digest[:19], "float32") == [found]


def test_a_terminated_verb_says_where_to_look(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writing one may have committed; a reading one promises nothing."""
    publish(artifacts, "chain")
    written = LocalStore.put_new

    def terminated(self: LocalStore, key: str, data: bytes) -> None:
        written(self, key, data)
        if key.startswith("log/"):
            signal.raise_signal(signal.SIGTERM)

    def never(*_: Any) -> Iterator[Any]:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal did not end it")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put_new", terminated)
        for verb in (
            ("push", artifacts["eagle2"], NAME),
            ("promote", NAME, "prod", "v2"),
            ("rollback", NAME, "prod", "--reason", "test"),
        ):
            done = specctl("registry", *verb)
            assert (done.code, done.out) == (143, ""), verb
            log = f"`specctl registry log {NAME} --registry {os.environ['SPECCTL_REGISTRY']}`"
            assert done.err == f"terminated: it may have been done: see {log}\n", verb
    assert len(said("log", NAME)) == 5, "each of them was"
    monkeypatch.setattr(log_module.Log, "refresh", never)
    done = specctl("registry", "log", NAME)
    assert (done.code, done.out, done.err) == (143, "", "terminated: nothing was written\n")


# ------------------------------------------------------------------ `specctl show`


def test_show_takes_what_run_takes(registry: Path, artifacts: Artifacts, tmp_path: Path) -> None:
    digest = publish(artifacts, "chain")
    for version in ("prod", digest):
        place = f"{registry}/{NAME}@{version}"
        assert json.loads(passes("show", place, "--json").out)["digest"] == digest
    trust(new_key(tmp_path, "key"))
    assert "E_SIG" in refuses(ARTIFACT, "show", f"{registry}/{NAME}@prod")
    for what in (registry, f"{registry}/{NAME}", f"{NAME}@prod"):
        assert "specctl registry show NAME" in refuses(INPUT, "show", what)
    for what in (f"{registry}/{NAME}@sha256:abcd", f"{registry}@sha256:abcd", "x@sha256:abcd"):
        assert "not 64 hex digits" in refuses(INPUT, "show", what)


def test_show_of_a_bucket_finds_its_trace_sets(s3_url: str, prompts: Path) -> None:
    passes("collect", prompts, "-o", f"{s3_url}/set", *SMALL)
    frozen = json.loads(passes("traces", "snapshot", f"{s3_url}/set", "--json").out)["reference"]
    assert json.loads(passes("show", frozen, "--json").out)["summary"]["num_prompts"] == 1
    line = refuses(REGISTRY, "registry", "init", "--registry", f"{s3_url}/set")
    assert "a trace set (trace.json)" in line
    bucket = s3_url.removesuffix("/shared")
    assert f"{bucket} is no trace set" in refuses(INPUT, "show", bucket)


# ------------------------------------------------------------------ keys


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SPECCTL_KEY_PASSPHRASE", raising=False)
    return new_key(tmp_path, "key")


def test_signed_trusted_verified_revoked(key: Path, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "chain")
    public = key.with_name("key.pub")
    made = json.loads(
        passes("registry", "sign", folder, "--key", key, "--name", NAME, "--json").out
    )
    verify = ("registry", "verify-signature", folder, "--name", NAME)
    assert "E_SIG" in refuses(ARTIFACT, *verify)
    assert "no key is trusted yet" in passes("registry", "trust", "list").out
    passes("registry", "trust", "add", public, "--name", "x", "--name", "y*")
    again = passes("registry", "trust", "add", public, "--name", "embedded*").out
    assert again.endswith(" for embedded*, in place of x and y*\n")
    shown = json.loads(passes(*verify, "--json").out)
    assert shown["digest"] == made["digest"]
    key_id = shown["key_id"]
    assert "E_SIG" in refuses(ARTIFACT, *verify[:-1], "other")
    assert " trusted " in " ".join(passes("registry", "trust", "list").out.split())
    assert said("trust", "revoke", key_id[:20], "--reason", "lost laptop")["key_id"] == key_id
    assert "revoked: lost laptop" in " ".join(passes("registry", "trust", "list").out.split())
    assert "lost laptop" in refuses(ARTIFACT, *verify)
    [record] = json.loads(passes("registry", "trust", "list", "--json").out)["keys"]
    assert (record["key_id"], record["names"]) == (key_id, ["embedded*"])
    assert record["revoked"]["reason"] == "lost laptop"


def test_a_policy_of_another_pair_runs_where_the_user_says_so(
    tmp_path: Path, prompts: Path
) -> None:
    """The text is the target's all the same: that is what makes the flag harmless."""
    folder = write_artifact(tmp_path / "policy", "chain", tokenizer_digest="sha256:" + "1" * 64)
    run = ("run", prompts, "--compare", f"ar,{folder}", *SMALL)
    assert "E_TOKENIZER tokenizer" in refuses(ARTIFACT, *run)
    outcome = specctl(*run, "--allow-mismatch")
    assert outcome.code == 0
    assert outcome.err.startswith("warning: E_TOKENIZER tokenizer: this run has sha256:")
    rows = json.loads(outcome.out)
    assert [row["policy"] for row in rows] == ["ar", str(folder)]
    assert rows[1]["equal_to_ar"] is True


def test_a_lossy_policy_of_another_pair_runs_under_no_flag(tmp_path: Path, prompts: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "adasd", drafter_digest="sha256:" + "1" * 64)
    run = ("run", prompts, "--policy", folder, *SMALL)
    line = refuses(ARTIFACT, *run, "--allow-mismatch", "--allow-lossy")
    assert "E_TARGET" in line
    assert "--allow-mismatch" not in line


def test_a_pulled_folder_is_verified_elsewhere(artifacts: Artifacts, tmp_path: Path) -> None:
    """Pulled online or not; and it may be pushed again, with its signature."""
    key, file = new_key(tmp_path, "ann"), tmp_path / "trust.json"
    publish(artifacts, "chain", "--key", key)
    key_id = trust(key, file=file)
    for out, options in (("online", ()), ("offline", ("--offline",))):
        pull = ("registry", "pull", f"{NAME}@prod", "-o", tmp_path / out, "--trust", file)
        assert specctl(*pull, *options).code == 0
        verify = ("registry", "verify-signature", tmp_path / out, "--name", NAME)
        assert passes(*verify, "--trust", file).out.endswith(f"{key_id}\n")
        assert said("push", tmp_path / out, NAME)["version"] == "v1"
