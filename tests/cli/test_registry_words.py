"""`specctl registry` and `specctl show` in words: success, tables, terminals, what is meant."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl import console
from specctl.registry import log as tree_log
from specctl.registry.room import MAX_PUBLISH_LIMIT_S, MIN_PUBLISH_LIMIT_S
from specctl.stores.local import LocalStore
from tests.cli.command import passes, refuses, specctl, write_artifact
from tests.cli.registries import NAME, SMALL, publish, said

USAGE, ARTIFACT, INPUT = 2, 3, 4


def test_success_is_said(registry: Path, artifacts: dict[str, Path]) -> None:
    assert passes("registry", "list").out == f"{registry}: no names yet\n"
    assert passes("registry", "fsck").out == (
        "no damage: 0 names, 0 entries, 0 artifacts checked\n"
    )
    assert "nothing was ever written" in passes("registry", "log", "_gc").out
    assert "no settings yet" in passes("registry", "settings").out
    assert "no key is believed yet" in passes("registry", "trust", "list").out
    publish(artifacts, "chain")
    for check in (("fsck",), ("verify", f"{NAME}@prod")):
        said_so = "no damage: 1 name, 2 entries, 1 artifact checked\n"
        assert passes("registry", *check).out == said_so
    assert passes("registry", "gc", "--mark").out == f"{registry}: nothing was marked\n"
    both = passes("registry", "gc", "--mark", "--sweep").out
    assert both == f"{registry}: nothing was swept and marked\n"


def test_help_of_init_names_the_bounds_of_the_limit(tmp_path: Path) -> None:
    shown = " ".join(passes("registry", "init", "--help").out.replace("│", " ").split())
    assert f" {MIN_PUBLISH_LIMIT_S} " in shown
    assert f" {MAX_PUBLISH_LIMIT_S} " in shown
    for wrong in (MIN_PUBLISH_LIMIT_S - 1, MAX_PUBLISH_LIMIT_S + 1):
        place = ("--registry", tmp_path / "new", "--publish-limit", wrong)
        refused = refuses(USAGE, "registry", "init", *place)
        assert f"at least {MIN_PUBLISH_LIMIT_S} s" in refused
    place = ("--registry", tmp_path / "new", "--publish-limit", MAX_PUBLISH_LIMIT_S)
    passes("registry", "init", *place)


def test_a_registry_that_is_not_named_may_be_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPECCTL_REGISTRY", raising=False)
    assert "SPECCTL_REGISTRY" in refuses(USAGE, "registry", "list")


def test_what_is_piped_is_whole_and_speaks_in_words(
    registry: Path, artifacts: dict[str, Path]
) -> None:
    digest = publish(artifacts, "chain", "--reason", "a reason " * 20)
    for verb in (("list",), ("show", NAME), ("log", NAME)):
        lines = passes("registry", *verb).out.splitlines()
        assert any(digest in line for line in lines), verb
    shown = passes("registry", "list").out
    assert "versions" in shown
    assert "num_" not in shown
    assert "error" not in shown, "an empty column is hidden"
    ranked = passes("registry", "list", "--for", "embedded", "--gpu", "h100").out
    assert " no " in ranked
    assert "False" not in ranked
    assert "gpu: wanted h100" in ranked


def test_a_narrow_terminal_folds_prose_alone(
    registry: Path,
    artifacts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = publish(artifacts, "chain", "--reason", "because it is so " * 15)
    monkeypatch.setattr(console, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    log = passes("registry", "log", NAME).out
    created = said("log", NAME)[0]["created"]
    assert any(created in line and NAME not in line for line in log.splitlines())
    assert "because it is so " * 15 not in log
    moved = ("promote", NAME, "canary", "prod")
    for verb in (("list",), ("log", NAME), ("list", "--for", "embedded"), moved):
        assert digest in passes("registry", *verb).out, "no verb takes a part of it"
        assert "┃" not in passes("registry", *verb).out, "no table that the terminal would break"
    assert digest in passes("show", artifacts["chain"]).out


def test_brackets_in_a_path_are_shown(tmp_path: Path) -> None:
    assert "[red]key" in passes("registry", "keygen", tmp_path / "[red]key").out


def test_requiring_several_keys_is_an_option(registry: Path) -> None:
    passes("registry", "trust", "require", "*", "--num-keys", 2)
    assert json.loads(passes("registry", "trust", "list", "--json").out)["threshold"] == 2
    passes("registry", "trust", "require", "team*")
    assert json.loads(passes("registry", "trust", "list", "--json").out)["threshold"] == 2
    assert "--num-keys" in refuses(USAGE, "registry", "trust", "require", "*", "--num-keys", 0)


@pytest.mark.parametrize("signalled", [signal.SIGINT, signal.SIGTERM])
def test_a_reading_verb_that_is_interrupted_promises_nothing(
    registry: Path, monkeypatch: pytest.MonkeyPatch, signalled: signal.Signals
) -> None:
    def interrupted(*_: Any) -> Iterator[Any]:
        signal.raise_signal(signalled)
        raise AssertionError("the signal did not end it")

    monkeypatch.setattr(tree_log.Log, "refresh", interrupted)
    done = specctl("registry", "log", "_gc")
    word = "interrupted" if signalled is signal.SIGINT else "terminated"
    assert (done.code, done.out) == (128 + signalled, "")
    assert done.err == f"{word}: nothing was written\n"


@pytest.mark.parametrize("signalled", [signal.SIGINT, signal.SIGTERM])
def test_a_verb_that_is_interrupted_as_it_commits_says_where_to_look(
    registry: Path,
    artifacts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    signalled: signal.Signals,
) -> None:
    """The entry is there, and nobody was told: 'what was finished is kept' answers nothing."""
    publish(artifacts, "chain")
    (registry / "blobs" / "sha256" / hashlib.sha256(b"garbage").hexdigest()).write_bytes(b"garbage")
    written = LocalStore.put_new

    def interrupted(self: LocalStore, key: str, data: bytes) -> None:
        written(self, key, data)
        if key.startswith("log/"):
            signal.raise_signal(signalled)

    monkeypatch.setattr(LocalStore, "put_new", interrupted)
    record = registry.parent / "keys.json"
    record.write_text(passes("registry", "trust", "list", "--json").out)
    word = "interrupted" if signalled is signal.SIGINT else "terminated"
    for verb, name in (
        (("push", artifacts["eagle2"], NAME), NAME),
        (("promote", NAME, "prod", artifacts["eagle2"]), NAME),
        (("rollback", NAME, "prod", "--reason", "test"), NAME),
        (("settings", record), "_settings"),
        (("gc", "--mark", "--retention-days", 0), "_gc"),
    ):
        done = specctl("registry", *verb)
        assert (done.code, done.out) == (128 + signalled, ""), verb
        said_so = f"{word}: it may have been done: specctl registry log {name} tells"
        assert done.err.startswith(said_so), verb
        assert passes("registry", "log", name, "--json").out != "[]\n"


def test_show_takes_what_run_takes(registry: Path, artifacts: dict[str, Path]) -> None:
    digest = publish(artifacts, "chain")
    for version in ("prod", digest):
        place = f"{registry}/{NAME}@{version}"
        assert json.loads(passes("show", place, "--json").out)["digest"] == digest
        [ran] = json.loads(passes("run", "--policy", place, *SMALL).out)
        assert ran["artifact_digest"] == digest
    passes("registry", "trust", "require", "*")
    assert "E_SIG" in refuses(ARTIFACT, "show", f"{registry}/{NAME}@prod")


def test_show_says_how_to_ask_a_registry(registry: Path, artifacts: dict[str, Path]) -> None:
    publish(artifacts, "chain")
    for what in (registry, f"{registry}/{NAME}", f"{NAME}@prod", "oci://host/x?log=y"):
        assert "specctl registry show NAME" in refuses(INPUT, "show", what)
    for what in (f"{registry}/{NAME}@sha256:abcd", f"{registry}@sha256:abcd", "x@sha256:abcd"):
        assert "64 lower-case hex digits" in refuses(INPUT, "show", what)


def test_show_of_a_bucket_tells_artifacts_from_traces(
    s3_url: str, artifacts: dict[str, Path], traces: Path, tmp_path: Path
) -> None:
    place = f"{s3_url}/registry"
    passes("registry", "init", "--registry", place)
    push = ("push", artifacts["chain"], NAME, "--alias", "prod", "--registry", place)
    digest = said(*push)["digest"]
    for version in ("prod", digest):
        shown = json.loads(passes("show", f"{place}/{NAME}@{version}", "--json").out)
        assert shown["digest"] == digest
    passes("traces", "merge", traces, "-o", f"{s3_url}/set")
    frozen = json.loads(passes("traces", "snapshot", f"{s3_url}/set", "--json").out)["reference"]
    assert json.loads(passes("show", frozen, "--json").out)["summary"]["num_prompts"] == 4
    for what in (place, f"{place}/{NAME}"):
        assert "specctl registry show NAME" in refuses(INPUT, "show", what)
    bucket = s3_url.removesuffix("/shared")
    assert f"trace set {bucket}" in refuses(INPUT, "show", bucket)


def test_show_says_what_emitted_leaves_out(traces: Path) -> None:
    [line] = [one for one in passes("show", traces).out.splitlines() if "emitted" in one]
    assert "the first of each request not counted" in line


def test_show_of_an_artifact_of_a_folder_is_as_before(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "chain")
    assert json.loads(passes("show", folder, "--json").out)["manifest"]["policy"]


def test_what_a_push_takes_for_the_hardware_a_search_finds(
    registry: Path, artifacts: dict[str, Path]
) -> None:
    row = said("push", artifacts["chain"], NAME)
    assert row["warnings"] == []
    search = ("list", "--for", "embedded", "--draft", "embedded", "--gpu", "cpu")
    [found] = said(*search, "--dtype", "fp32")
    assert (found["exact"], found["by_name"], found["differences"]) == (False, ["gpu"], [])
    assert "by name (gpu)" in " ".join(passes("registry", *search).out.split())
    [exact] = said(*search[:-2])
    assert (exact["exact"], exact["by_name"]) == (True, [])
    assert "bf16" in refuses(USAGE, "registry", *search, "--dtype", "bfloat17")
    assert "no folder" in refuses(USAGE, "registry", "list", "--for", "/nonexistent/folder")
