"""What is saved is loaded, bit for bit, for every kind of policy; a manifest has one form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from specctl.artifacts import (
    Domain,
    Metric,
    Origin,
    load_artifact,
    save,
    save_artifact,
)
from specctl.artifacts.files import MAX_BYTES
from specctl.artifacts.manifest import digest_of, parse_manifest
from specctl.artifacts.save import source_digest
from specctl.errors import ArtifactError, OutputError
from specctl.policy import (
    Acceptance,
    Budget,
    Chain,
    FullTree,
    Mars,
    Policy,
    Scorer,
    Shape,
    SparseGates,
    policy_digest,
)
from specctl.records import canonical_json
from tests.artifacts.conftest import refused
from tests.artifacts.examples import (
    DOMAIN,
    EVIDENCE,
    ORIGIN,
    PAIR,
    POLICIES,
    read_manifest,
    sha,
    write_artifact,
)

UNTOUCHED = "nothing was touched"


def test_examples_hold_every_kind() -> None:
    known = {
        kind.model_fields["kind"].default
        for union in (Shape, Budget, Acceptance, Scorer)
        for kind in get_args(get_args(union)[0])
    }
    used = {
        part.kind
        for policy in POLICIES.values()
        for part in (policy.shape, policy.budget, policy.acceptance)
    } | {getattr(policy.shape, "scorer", policy.shape).kind for policy in POLICIES.values()}
    assert used == known - {"own"}, "a rule of Python is in no artifact"


@pytest.mark.parametrize("name", POLICIES)
def test_round_trip_is_bit_exact_and_repeats(name: str, tmp_path: Path) -> None:
    policy = POLICIES[name]
    saved = save_artifact(tmp_path / "a", policy, ORIGIN, card="# card\n")
    loaded = load_artifact(tmp_path / "a", expect=PAIR, digest=saved.digest)
    assert policy_digest(loaded.policy) == policy_digest(policy)
    assert loaded == saved
    assert loaded.digest == digest_of((tmp_path / "a" / "config.json").read_bytes())
    assert save_artifact(tmp_path / "b", policy, ORIGIN, card="# card\n") == saved
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for file in names:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert ("policy.onnx" in names) == (name in ("hetero", "c2t_ffn", "survival", "echo"))


def test_gates_round_up_so_that_less_than_decides_alike() -> None:
    # float32(0.3) is above 0.3, float32(0.7) below it: the gate `p < t` wants the next one up.
    gates = SparseGates(gate_levels=(1, 4), thresholds=(0.3, 0.7))
    assert gates.thresholds[0] == float(np.float32(0.3)) > 0.3
    assert gates.thresholds[1] == float(np.nextafter(np.float32(0.7), np.float32(1))) > 0.7


@pytest.mark.parametrize(
    ("policy", "origin", "card", "code", "field", "fix"),
    [
        (Policy(shape=FullTree(depth=64, top_k=16)), ORIGIN, "", "E_COST", "nodes", "do not"),
        (POLICIES["ar"], ORIGIN, "x" * (MAX_BYTES["README.md"] + 1), "E_SIZE", "README.md",
         "shorten it"),
        (Policy(shape=Chain(), acceptance=Mars()), Origin(PAIR), "", "E_CLASS", "evidence", "fit"),
        *(
            (POLICIES["ar"], replace(ORIGIN, fit=fit), "", "E_SCHEMA", "config.json", "nothing was")
            for fit in ({"\x1b[2J": 1}, {"note": "a\x00b"}, {"deep": [{"x": ["y\x9b"]}]})
        ),
    ],
)  # fmt: skip
def test_what_the_loader_would_refuse_is_not_written(
    policy: Policy, origin: Origin, card: str, code: str, field: str, fix: str,
    tmp_path: Path
) -> None:  # fmt: skip
    error = refused(code, save_artifact, tmp_path / "a", policy, origin, card=card)
    assert field in error.field
    assert fix in error.hint
    assert error.artifact == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"), [("README.md", "mine"), ("config.json", '{"model_type": "llama"}')]
)
def test_a_folder_of_something_else_is_not_touched(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(OutputError, match=UNTOUCHED):
        write_artifact(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: text}


def test_an_artifact_is_replaced_whole_unless_a_file_in_it_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    folder = write_artifact(tmp_path / "a", "hetero")
    write_artifact(folder, "chain")
    assert load_artifact(folder).policy == POLICIES["chain"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=UNTOUCHED):
        write_artifact(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OutputError, match=UNTOUCHED):
        write_artifact(tmp_path / "link")


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another output folder") as caught:
        write_artifact(tmp_path / "file" / "a")
    assert "\n" not in str(caught.value)


def test_a_failed_publication_keeps_the_older_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_artifact(tmp_path / "a", "chain")

    def refuse(*_: object, **__: object) -> None:
        raise ArtifactError("E_POLICY", "policy record", "expected x, found y")

    rename = Path.rename

    def full_disk(self: Path, target: Path) -> Path:
        if target == tmp_path / "a" and self.suffix != ".old":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    for owner, name, failing, error in (
        (save, "load_files", refuse, ArtifactError),
        (Path, "rename", full_disk, OutputError),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with pytest.raises(error):
                write_artifact(tmp_path / "a", "hetero")
        assert load_artifact(tmp_path / "a").policy == POLICIES["chain"]
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_facts_come_back(tmp_path: Path) -> None:
    metrics = {"rate": Metric.of(2.5, 2.0, 3.0, num_prompts=40), "plain": Metric(value=1.0)}
    evidence = EVIDENCE.model_copy(update={"metrics": metrics})
    origin = Origin(PAIR, evidence, domain=DOMAIN, parent=sha("f"), created=ORIGIN.created)
    save_artifact(tmp_path / "a", POLICIES["c2t_ffn"], origin, card="# c2t\n")
    found = load_artifact(tmp_path / "a").manifest
    assert (found.domain, found.evidence, found.lossless) == (DOMAIN, evidence, True)
    assert found.features == ("joint_logp", "parent_entropy", "depth")
    assert found.provenance.parent == sha("f")
    assert found.provenance.created == "2026-01-31T12:00:00Z"
    assert found.provenance.source_digest == source_digest()
    assert {"torch", "numpy", "onnx"} <= found.provenance.library_versions.keys()


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [(None, 1.0, 2.0), (1.0, None, 2.0), (1.0, float("nan"), 2.0), (float("nan"), 0.0, 1.0)],
)
def test_an_interval_without_its_ends_is_none(
    value: float | None, low: float | None, high: float | None
) -> None:
    found = Metric.of(value, low, high)
    assert (found.low, found.high, found.level, found.num_prompts) == (None,) * 4


def domain(**changes: Any) -> dict[str, Any]:
    return {"domain": {**Domain().model_dump(), **changes}}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("provenance", {"source_digest": "sha256:x"}),
        ("provenance", {"created": "2026-02-31T00:00:00Z"}),
        ("evidence", {"metrics": {"rate": 1.0}}),
        ("evidence", {"metrics": {"rate": {"value": 1.0}}}),
        ("evidence", {"metrics": {"a\u001b[2J": Metric(value=1.0).model_dump()}}),
        # A whole number in a float's place reads the same; its digest would be another.
        ("evidence", {"metrics": {"rate": Metric(value=3.0).model_dump() | {"value": 3}}}),
        ("evidence", {"metrics": {"rate": Metric(value=1.0).model_dump() | {"low": 2.0}}}),
        ("", {"domain": {"hardware": []}}),
        ("", domain(batch_size={"low": 2, "high": 1})),
        ("", domain(workload="\u0007")),
        ("", domain(prompt="hello")),
    ],
)
def test_other_fields_are_refused(part: str, change: dict[str, Any], folder: Path) -> None:
    tree = read_manifest(folder)
    (tree[part] if part else tree).update(change)
    with pytest.raises(ArtifactError) as refusal:
        parse_manifest(canonical_json(tree).encode())
    assert refusal.value.code == "E_SCHEMA"
    assert json.loads(canonical_json(tree)) == tree
