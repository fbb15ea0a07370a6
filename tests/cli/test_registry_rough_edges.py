"""`specctl registry` as a new user meets it: what is refused before anything is written, and how
it is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import passes, refuses, specctl
from tests.cli.registries import ALL_NAMES, NAME, new_key, publish, said, trust_root

USAGE, ARTIFACT, INPUT, OUTPUT, REGISTRY = 2, 3, 4, 6, 7
PAST = "2020-01-01T00:00:00Z"


def everything(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------- before the first write


@pytest.mark.parametrize(
    ("code", "options", "word"),
    [
        (REGISTRY, ("--alias", "PROD"), "alias"),
        (USAGE, ("--alias", "prod", "--expires", PAST), "which is past"),
        (USAGE, ("--expires", "tomorrow"), "a UTC time to come"),
        (USAGE, ("--key", "/no/such/key"), "key"),
        (REGISTRY, ("--reason", "two\nlines"), "E_ENTRY"),
        (ARTIFACT, ("--reason", "token hf_" + "a" * 34), "E_PRIVACY log entry.reason"),
        (REGISTRY, ("--actor", "x" * 300), "E_ENTRY"),
    ],
)
def test_a_push_that_must_fail_writes_nothing(
    registry: Path, artifacts: dict[str, Path], code: int, options: tuple[str, ...], word: str
) -> None:
    before = everything(registry)
    assert word in refuses(code, "registry", "push", artifacts["chain"], NAME, *options)
    assert everything(registry) == before


def test_a_push_whose_alias_its_keys_may_not_move_publishes_nothing(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    key = new_key(tmp_path, "key")
    passes("registry", "trust", "add", f"{key}.pub", *ALL_NAMES, "--role", "publisher")
    passes("registry", "trust", "require", "*")
    push = ("push", artifacts["chain"], NAME, "--key", key)
    before = everything(registry)
    assert "is no promoter" in refuses(ARTIFACT, "registry", *push, "--alias", "prod")
    assert everything(registry) == before
    assert said(*push)["kind"] == "publish"


@pytest.mark.parametrize("verb", [("promote", NAME, "prod", "canary"), ("rollback", NAME, "prod")])
def test_moves_that_have_expired_already_are_refused(
    registry: Path, artifacts: dict[str, Path], verb: tuple[str, ...]
) -> None:
    publish(artifacts, "chain")
    more = ("--reason", "x", "--expires", PAST)
    assert "which is past" in refuses(USAGE, "registry", *verb, *more)


def test_settings_that_their_own_writer_would_refuse_are_not_written(
    registry: Path, tmp_path: Path
) -> None:
    root, other = new_key(tmp_path, "root"), new_key(tmp_path, "other")
    trust_root(root)
    record = tmp_path / "record.json"
    passes("registry", "trust", "require", "team*", "--trust", record)
    setting = ("registry", "settings", record)
    assert "--key ROOT" in refuses(USAGE, *setting)
    assert "--key ROOT" in refuses(USAGE, *setting, "--key", other)
    assert not list(registry.glob("log/_settings/*"))
    shown = passes(*setting, "--key", root).out
    assert shown.startswith("set, generation 0, signed by ed25519:")
    assert f"{shown.split()[-1]}\n" in passes("registry", "settings").out


def test_signed_settings_are_replaced_by_signed_ones_alone(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others trust the root, even where who writes does not."""
    root, record = new_key(tmp_path, "root"), tmp_path / "record.json"
    passes("registry", "trust", "require", "team*", "--trust", record)
    passes("registry", "settings", record, "--key", root)
    line = refuses(USAGE, "registry", "settings", record)
    assert "as those in force are signed" in line
    passes("registry", "settings", record, "--key", root)


def test_settings_that_are_no_trust_record_are_an_input_error(
    registry: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    for text in ("{", '{"trust_version": 1}', '{"keys": [], "keys": []}'):
        record.write_text(text)
        assert "a trust record (JSON)" in refuses(INPUT, "registry", "settings", record)


def test_a_place_that_holds_something_is_made_no_registry(traces: Path, tmp_path: Path) -> None:
    before = everything(traces)
    line = refuses(REGISTRY, "registry", "init", "--registry", traces)
    assert "E_EXISTS" in line
    assert "a trace set (trace.json)" in line
    assert everything(traces) == before
    (tmp_path / "notes").mkdir()
    assert "'notes'" in refuses(REGISTRY, "registry", "init", "--registry", tmp_path)
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    passes("registry", "init", "--registry", tmp_path / "disk")


def test_a_bucket_that_holds_something_is_made_no_registry(s3_url: str, traces: Path) -> None:
    passes("traces", "merge", traces, "-o", f"{s3_url}/set")
    line = refuses(REGISTRY, "registry", "init", "--registry", f"{s3_url}/set")
    assert "a trace set (trace.json)" in line
    passes("registry", "init", "--registry", f"{s3_url}/other")


def test_what_is_no_artifact_is_named(registry: Path, traces: Path, tmp_path: Path) -> None:
    assert "a trace set (trace.json)" in refuses(ARTIFACT, "registry", "push", traces, NAME)
    (tmp_path / "empty").mkdir()
    line = refuses(ARTIFACT, "registry", "push", tmp_path / "empty", NAME)
    assert "an empty folder" in line
    assert "fetch" not in line
    for words in (("registry", "promote", NAME, "prod"), ("run", "--policy")):
        assert "a trace set (trace.json)" in refuses(ARTIFACT, *words, traces)


def test_the_artifact_of_a_tuning_is_said_to_lie_in_its_folder(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """`fit auto -o tuned` writes tuned/policy beside its report: nobody is to guess that."""
    (tmp_path / "tuned").mkdir()
    shutil.copytree(artifacts["chain"], tmp_path / "tuned" / "policy")
    for words in (("registry", "push", tmp_path / "tuned", NAME), ("run", "--policy")):
        words = words if "push" in words else (*words, tmp_path / "tuned")
        assert f"name {tmp_path}/tuned/policy, which is one" in refuses(ARTIFACT, *words)


def test_a_name_that_is_none_is_refused_before_the_artifact_is_loaded(
    registry: Path, tmp_path: Path
) -> None:
    assert "E_NAME" in refuses(REGISTRY, "registry", "push", tmp_path / "nothing", "Capitals")


def test_a_digest_that_was_cut_is_taken_from_show(registry: Path) -> None:
    line = refuses(REGISTRY, "registry", "pull", f"{NAME}@sha256:2ac074cddc03")
    assert "take it whole from `specctl registry show NAME`" in line


def test_a_push_again_tells_what_it_wrote(registry: Path, artifacts: dict[str, Path]) -> None:
    push = ("registry", "push", artifacts["chain"], NAME, "--alias", "prod")
    assert passes(*push).out.startswith(f"alias {NAME}@prod ")
    again = passes(*push).out
    assert again.startswith(f"publish {NAME} "), "the alias was there already"
    assert again.endswith(", generation 2\n")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (NAME, ()),
        ("embedded", ()),
        ("other+model@h100:chat", ("target", "drafter", "hardware", "workload")),
        ("embedded+eagle3@cpu:chat", ("workload",)),
        ("embedded+eagle3@h100:code", ("hardware",)),
    ],
)
def test_a_name_that_says_other_than_the_manifest_is_warned_of(
    name: str, parts: tuple[str, ...]
) -> None:
    from specctl.artifacts.facts import Domain, PairFingerprint
    from specctl.artifacts.manifest import Manifest
    from specctl.registry.unlike import unlike

    digest = f"sha256:{'1' * 64}"
    pair = PairFingerprint(
        target="embedded",
        drafter="embedded",
        target_digest=digest,
        drafter_digest=digest,
        tokenizer_digest=digest,
    )
    domain = Domain(hardware=("Intel(R) Xeon(R) Processor",), workload="test, code")
    known: dict[str, Any] = {"pair": pair, "domain": domain}
    found = unlike(name, Manifest.model_construct(**known))
    assert [line.split()[3] for line in found] == list(parts)
    assert unlike(name, Manifest.model_construct(**known | {"domain": None})) == [
        line for line in found if line.split()[3] in ("target", "drafter")
    ], "what is not known is not compared"


def test_a_push_under_a_strange_name_warns_and_goes_on(
    registry: Path, artifacts: dict[str, Path]
) -> None:
    push = ("registry", "push", artifacts["chain"], "other+model@h100:chat", "--json")
    outcome = specctl(*push)
    warnings = json.loads(outcome.out)["warnings"]
    assert outcome.code == 0
    assert [line.split()[3] for line in warnings][:2] == ["target", "drafter"]
    assert outcome.err == "".join(f"warning: {line}\n" for line in warnings)
    assert said("push", artifacts["chain"], NAME)["warnings"] == []


# --------------------------------------------------------------------------- versions as people say


def test_versions_are_said_as_digest_alias_or_folder(
    registry: Path,
    artifacts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (publish(artifacts, kind) for kind in ("chain", "eagle2"))
    passes("registry", "promote", NAME, "canary", first)
    line = refuses(USAGE, "registry", "promote", NAME, "prod", first, "--expect", "canary")
    assert "--expect" in line
    assert "sha256:" in line
    moved = said("rollback", NAME, "prod", "--to", "canary", "--reason", "slow")
    assert (moved["digest"], moved["previous_digest"]) == (first, second)
    again = said("rollback", NAME, "prod", "--expect", second, "--reason", "slow")
    assert (again["changed"], again["generation"]) == (False, moved["generation"])
    monkeypatch.chdir(artifacts["chain"].parent)
    assert "write ./eagle2" in refuses(REGISTRY, "registry", "promote", NAME, "prod", "eagle2")
    assert said("promote", NAME, "prod", "./eagle2")["digest"] == second
    assert "no such alias" in refuses(REGISTRY, "registry", "promote", NAME, "prod", "nothing")


def test_times_of_garbage_are_checked_in_their_own_units(registry: Path) -> None:
    gc = ("registry", "gc", "--sweep")
    assert "--retention-days" in refuses(USAGE, *gc, "--retention-days", "-1")
    assert "--retention-days" in refuses(USAGE, *gc, "--retention-days", "nan")
    assert "--grace" in refuses(USAGE, *gc, "--grace", "nan")
    line = refuses(USAGE, *gc, "--grace", 0.5)
    assert "at least 2 hours" in line
    assert "found 0.5 hours" in line


def test_places_are_checked_as_they_are_written() -> None:
    assert "write s3://bucket/x" in refuses(USAGE, "registry", "list", "--registry", "s3:/bucket/x")
    assert "oci://" in refuses(USAGE, "registry", "list", "--registry", "gs://bucket/x")
    role = ("registry", "role", "publisher", "--registry", "s3://bucket/x", "--names")
    assert "--names" in refuses(USAGE, *role, "Bad Name")
    assert json.loads(passes(*role, "qwen*", "--json").out)["Statement"]
    reader = ("registry", "role", "reader", "--registry", "s3://bucket/x")
    assert json.loads(passes(*reader).out)["Statement"]
    assert "publisher or promoter" in refuses(USAGE, *reader, "--names", "qwen*")


def test_own_folders_that_cannot_be_written_are_named_by_their_variables(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(artifacts, "chain")
    (tmp_path / "file").write_text("in the way")
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, str(tmp_path / "file"))
            line = refuses(OUTPUT, "registry", "pull", f"{NAME}@prod")
        assert variable in line
        assert "--resume" not in line


def test_an_account_without_a_name_says_who_it_is(
    registry: Path, artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that was given any number for its user."""

    def no_such_user() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", no_such_user)
    push = ("push", artifacts["chain"], NAME)
    assert "--actor" in refuses(USAGE, "registry", *push)
    assert said(*push, "--actor", "ci")["actor"] == "ci"


def test_an_account_without_a_home_names_the_variable(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert "XDG_CONFIG_HOME" in refuses(USAGE, "registry", "trust", "list")


def test_a_signature_of_something_else_is_not_published(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """It would count for nothing, and be damage to everybody's `fsck` for ever."""
    key = new_key(tmp_path, "key")
    signed, other = (shutil.copytree(artifacts[kind], tmp_path / kind) for kind in artifacts)
    passes("registry", "sign", signed, "--key", key, "--name", NAME)
    stale = other / "signature.dsse.json"
    stale.write_bytes((signed / "signature.dsse.json").read_bytes())
    assert "E_SIG" in refuses(ARTIFACT, "registry", "push", other, NAME)
    stale.write_text("hello")
    assert "E_SIG" in refuses(ARTIFACT, "registry", "push", other, NAME)
    stale.unlink()
    passes("registry", "push", other, NAME)
    passes("registry", "push", signed, NAME)
    passes("registry", "fsck")
