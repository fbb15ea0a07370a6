"""What is saved is what is loaded, bit for bit, for every kind of policy."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from rich.console import Console

from specctl.artifacts import Origin, codec, describe_artifact, load_artifact, save_artifact
from specctl.artifacts.describe import render
from specctl.artifacts.files import MAX_BYTES
from specctl.artifacts.manifest import digest_of
from specctl.artifacts.tensors import join_policy, policy_tensors, policy_tree
from specctl.errors import ArtifactError, OutputError
from specctl.policy.parse import policy_digest
from specctl.policy.records import (
    Acceptance,
    Budget,
    Chain,
    FullTree,
    Mars,
    Policy,
    Scorer,
    Shape,
    SparseGates,
)
from tests.artifacts.attacks import checked
from tests.artifacts.examples import ORIGIN, PAIR, POLICIES, read_manifest, write_artifact


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
    assert used == known


@pytest.mark.parametrize("name", POLICIES)
def test_round_trip_is_bit_exact(name: str, tmp_path: Path) -> None:
    policy = POLICIES[name]
    saved = save_artifact(tmp_path / "a", policy, ORIGIN, card="# card\n")
    loaded = load_artifact(tmp_path / "a", expect=PAIR, digest=saved.digest)
    assert policy_digest(loaded.policy) == policy_digest(policy)
    assert loaded == saved
    assert loaded.digest == digest_of((tmp_path / "a" / "config.json").read_bytes())


def test_a_policy_that_no_artifact_can_hold_is_the_writers_to_change(tmp_path: Path) -> None:
    """Lawful and cheap enough to run, but its made-up rounds are larger than their file may be."""
    place = tmp_path / "a"
    with pytest.raises(ArtifactError) as caught:
        save_artifact(place, Policy(shape=FullTree(depth=64, top_k=16)), ORIGIN, card="# a\n")
    error = checked(caught.value, "E_SIZE")
    assert error.field == "selftest.safetensors"
    assert "smaller policy" in error.fix
    assert "nothing was written" in error.fix
    assert error.artifact == str(place)
    assert list(tmp_path.iterdir()) == []


def test_a_card_that_is_too_long_is_the_writers_to_shorten(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        save_artifact(
            tmp_path / "a", POLICIES["ar"], ORIGIN, card="x" * (MAX_BYTES["README.md"] + 1)
        )
    error = checked(caught.value, "E_SIZE")
    assert (error.field, error.fix) == ("README.md", "shorten it; nothing was written")


@pytest.mark.parametrize("name", POLICIES)
def test_equal_inputs_give_equal_bytes(name: str, tmp_path: Path) -> None:
    first, second = (write_artifact(tmp_path / place, name) for place in ("a", "b"))
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for file in names:
        assert (first / file).read_bytes() == (second / file).read_bytes()


def test_fitted_fields_are_references_to_tensors_at_their_paths() -> None:
    policy = POLICIES["c2t_ffn"]
    tree, tensors = policy_tree(policy), policy_tensors(policy)
    assert tree["shape"]["scorer"]["w1"] == {"$tensor": "shape.scorer.w1"}
    assert tensors["shape.scorer.w1"].dtype == np.float32
    assert tensors["shape.scorer.w1"].shape == (2, 3)
    assert np.signbit(tensors["shape.scorer.w1"][1, 1])  # -0.0 keeps its sign
    assert join_policy(tree, tensors) == policy


def test_whole_numbers_are_int64_and_all_others_float32() -> None:
    assert policy_tensors(POLICIES["c2t_trees"])["shape.scorer.left"].dtype == np.int64
    assert policy_tensors(POLICIES["echo"])["shape.thresholds"].dtype == np.float32


def test_gates_round_up_so_that_less_than_decides_alike() -> None:
    # float32(0.3) is above 0.3, float32(0.7) below it: the gate `p < t` wants the next one up.
    gates = SparseGates(gate_levels=(1, 4), thresholds=(0.3, 0.7))
    assert gates.thresholds[0] == float(np.float32(0.3)) > 0.3
    assert gates.thresholds[1] == float(np.nextafter(np.float32(0.7), np.float32(1))) > 0.7


def test_what_was_learned_has_a_twin(tmp_path: Path) -> None:
    with_twin = {
        name
        for name in POLICIES
        if (write_artifact(tmp_path / name, name) / "policy.onnx").exists()
    }
    assert with_twin == {"hetero", "c2t_ffn", "c2t_trees", "echo"}


def test_an_older_artifact_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_artifact(tmp_path / "a", "hetero")
    write_artifact(tmp_path / "a", "chain")
    assert load_artifact(tmp_path / "a").policy == POLICIES["chain"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "files",
    [{"notes.txt": "mine"}, {"config.json": '{"model_type": "llama"}'}, {"README.md": "mine"}],
    ids=["text", "model", "readme"],
)
def test_a_foreign_folder_is_not_touched(files: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(OutputError, match="nothing was touched"):
        write_artifact(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_an_artifact_with_a_file_of_someone_else_is_not_replaced(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="nothing was touched"):
        write_artifact(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert load_artifact(write_artifact(tmp_path / "a")).policy == POLICIES["hetero"]


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another output folder") as caught:
        write_artifact(tmp_path / "file" / "a")
    assert "\n" not in str(caught.value)


def test_a_failed_publication_keeps_the_older_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_artifact(tmp_path / "a", "chain")

    def refuse(folder: Path) -> None:
        raise ArtifactError("E_POLICY", "policy record", expected="x", found="y")

    with monkeypatch.context() as patch:
        patch.setattr(codec, "_load_own", refuse)
        with pytest.raises(ArtifactError):
            write_artifact(tmp_path / "a", "hetero")
    assert load_artifact(tmp_path / "a").policy == POLICIES["chain"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_lossy_policy_without_evidence_is_not_published(tmp_path: Path) -> None:
    policy = Policy(shape=Chain(), acceptance=Mars())
    with pytest.raises(ArtifactError, match="E_CLASS"):
        save_artifact(tmp_path / "a", policy, Origin(pair=PAIR), card="")
    assert not (tmp_path / "a").exists()


def test_manifest_says_what_the_policy_reads(tmp_path: Path) -> None:
    manifest = read_manifest(write_artifact(tmp_path / "a", "c2t_ffn"))
    assert manifest["features"] == ["joint_logp", "parent_entropy", "depth"]
    assert manifest["lossless"] is True
    assert manifest["provenance"]["created"] == "2026-01-31T12:00:00Z"


@pytest.mark.parametrize("name", POLICIES)
def test_description_names_policy_pair_and_evidence(name: str, tmp_path: Path) -> None:
    description = describe_artifact(load_artifact(write_artifact(tmp_path / "a", name)))
    facts = dict(description.facts)
    assert ("LOSSY" in facts["policy"]) == (not POLICIES[name].lossless)
    assert facts["target"].startswith("toy target")
    assert facts["metrics"] == "held_out_mse 0.25 [0.125, 0.5], undefined undefined"
    assert all(len(row) == len(description.columns) for row in description.rows)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render(description))
    assert description.title.replace(" ", "") in "".join(console.export_text().split())


def test_loading_imports_no_library_of_the_trainer_and_no_unpickler(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    script = f"""
import sys, pickle, torch
def refuse(*args, **kwargs): raise AssertionError("unpickled")
pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse
from specctl.artifacts import load_artifact
load_artifact({str(folder)!r})
heavy = "polars pyarrow sklearn lightgbm rich matplotlib onnxruntime joblib".split()
assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
