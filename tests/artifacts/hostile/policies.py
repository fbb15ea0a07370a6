"""Families 25, 30, 33 and 35: numbers, records and vectors that are not those of a sound policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.artifacts.tensors import policy_tensors, policy_tree, read_tensors, write_tensors
from specctl.features import features_digest
from specctl.policy.records import FullTree, Policy, ScoredTree, TreesScorer
from tests.artifacts.examples import FFN, HETERO, read_manifest, replace_file, write_manifest
from tests.artifacts.hostile.making import Hostile, Make, broken, given, of_policy, sound


def edges_file(values: Any, dtype: Any = np.float32) -> bytes:
    return write_tensors({"shape.edges": np.asarray(values, dtype=dtype)})


EDGES = np.float32(HETERO.edges)
TENSORS = {
    "25 NaN": (edges_file([0.1, np.nan, 2]), "E_WEIGHTS"),
    "25 infinite": (edges_file([0.1, np.inf]), "E_WEIGHTS"),
    "25 1e38": (edges_file([0.1, 1e38]), "E_WEIGHTS"),
    "25 denormal": (edges_file([1e-40, 1.0]), "E_WEIGHTS"),
    "25 float16": (edges_file(EDGES, np.float16), "E_WEIGHTS"),
    "25 needless float64": (edges_file(EDGES, np.float64), "E_WEIGHTS"),
    "25 float64 that floors": (edges_file([0.1, 0.2], np.float64), "E_WEIGHTS"),
    "25 whole numbers": (edges_file([1, 2, 3], np.int64), "E_WEIGHTS"),
    "30 matrix": (edges_file([[0.1, 0.2]]), "E_WEIGHTS"),
    "30 scalar": (edges_file(0.1), "E_WEIGHTS"),
    "30 falling": (edges_file(EDGES[::-1]), "E_POLICY"),
    "30 equal": (edges_file([0.1, 0.1, 0.2]), "E_POLICY"),
    "30 no edges": (edges_file([]), "E_POLICY"),
    "30 too few bins": (edges_file([0.5]), "E_POLICY"),
    "25 other name": (write_tensors({"shape.edge": EDGES}), "E_WEIGHTS"),
    "25 one more": (write_tensors({"shape.edges": EDGES, "x": EDGES}), "E_WEIGHTS"),
    "25 none": (write_tensors({}), "E_WEIGHTS"),
    "26 other edges": (edges_file(EDGES + 1), "E_TWIN"),
    "38 tensor": (write_tensors({"\x1b[2J": np.float32([np.nan])}), "E_WEIGHTS"),
    "7 empty": (b"", "E_WEIGHTS"),
    "7 endless header": (b"\xff" * 8 + b"{}", "E_WEIGHTS"),
    "8 trailing": (edges_file(EDGES) + b"x", "E_WEIGHTS"),
}
RECORDS: dict[str, tuple[Make, str]] = {
    "30 literal edges": (of_policy(edges=[0.1, 1.3, 2.7]), "E_WEIGHTS"),
    "30 reference elsewhere": (of_policy(edges={"$tensor": "shape.gammas"}), "E_WEIGHTS"),
    "30 reference with more": (of_policy(edges={"$tensor": "shape.edges", "x": 1}), "E_WEIGHTS"),
    "30 reference to nothing": (of_policy(gammas={"$tensor": "shape.gammas"}), "E_WEIGHTS"),
    "30 reference in a list": (of_policy(gammas=[{"$tensor": "shape.edges"}]), "E_POLICY"),
    "30 unknown kind": (of_policy(kind="oracle"), "E_POLICY"),
    "30 unknown field": (of_policy(hook="os.system"), "E_POLICY"),
    "38 unknown field": (of_policy(**{"\x1b[2J\u202e\n": 1}), "E_POLICY"),
    "30 absurd depth": (of_policy(alpha=64), "E_POLICY"),
    "30 negative gamma": (of_policy(gammas=[-1.0]), "E_POLICY"),
    "30 text for a number": (of_policy(index_base="0"), "E_POLICY"),
    "30 other plan than the twin": (of_policy(cap_tokens=True), "E_TWIN"),
    "30 k above the most": (of_policy("eagle2", top_k=10**6), "E_POLICY"),
    "30 falling thresholds": (of_policy("echo", gate_levels=[4, 1]), "E_POLICY"),
}


def _trees(**changes: list[float]) -> Make:
    """Boosted trees with other nodes than a tree can have."""

    def write(folder: Path) -> None:
        tensors = read_tensors((folder / "policy.safetensors").read_bytes())
        for name, values in changes.items():
            path = f"shape.scorer.{name}"
            tensors[path] = np.asarray(values, dtype=tensors[path].dtype)
        replace_file(folder, "policy.safetensors", write_tensors(tensors))

    return broken(write, "c2t_trees")


TREES = {
    "30 a tree with a cycle": _trees(left=[0, -1, -1, -1]),
    "30 a node with two parents": _trees(left=[2, -1, -1, -1]),
    "30 a child outside": _trees(right=[99, -1, -1, -1]),
    "30 other count": _trees(threshold=[0.35]),
}


def stumps(count: int) -> TreesScorer:
    """Trees of one split each, on as many thresholds: small to store, quadratic to build."""
    return TreesScorer(
        features=("joint_prob",),
        roots=tuple(range(0, 3 * count, 3)),
        feature=(0, -1, -1) * count,
        threshold=tuple(v for i in range(count) for v in (i / count, 0.0, 0.0)),
        left=tuple(v for i in range(count) for v in (3 * i + 1, -1, -1)),
        right=tuple(v for i in range(count) for v in (3 * i + 2, -1, -1)),
        value=(0.0, -0.5, 0.5) * count,
    )


def written_by_hand(folder: Path, policy: Policy, features: list[str]) -> None:
    """An artifact of a policy that nothing of ours would save; its twin is another's."""
    sound(folder, "c2t_trees")
    changes = {"policy": policy_tree(policy), "features": features}
    changes["feature_digest"] = features_digest(features)
    write_manifest(folder, {**read_manifest(folder), **changes})
    replace_file(folder, "policy.safetensors", write_tensors(policy_tensors(policy)))


def _by_hand(policy: Policy, *features: str) -> Make:
    return lambda folder: written_by_hand(folder, policy, list(features))


def costly_trees(folder: Path) -> None:
    """Lawful numbers whose tables would take three gigabytes."""
    written_by_hand(
        folder, Policy(shape=ScoredTree(scorer=stumps(21_000), beta=0.1)), ["joint_prob"]
    )


def _vectors(**changes: Any) -> Make:
    """The self-test with other decisions, and listed as it is."""

    def write(folder: Path) -> None:
        vectors = read_tensors((folder / "selftest.safetensors").read_bytes())
        for name, change in changes.items():
            path = name.replace("__", ".")
            vectors[path] = change(vectors[path])
        replace_file(folder, "selftest.safetensors", write_tensors(vectors))

    return broken(write)


def _no_vectors(folder: Path) -> None:
    (folder / "selftest.safetensors").unlink()
    manifest = read_manifest(folder)
    del manifest["files"]["selftest.safetensors"]
    write_manifest(folder, manifest)


DEAF = Policy(shape=ScoredTree(scorer=FFN.model_copy(update={"w2": (0.0, 0.0)}), beta=0.4))


def _deaf(folder: Path) -> None:
    """A network that says the same of every node, whole but for that."""
    twin = twin_bytes(DEAF)
    assert twin is not None
    replace_file(folder, "policy.onnx", twin)
    replace_file(folder, "policy.safetensors", write_tensors(policy_tensors(DEAF)))


FAMILIES: dict[str, Hostile] = {
    **{
        f"{name} (tensors)": Hostile(given("policy.safetensors", lambda data=data: data), code)
        for name, (data, code) in TENSORS.items()
    },
    **{f"{name} (record)": Hostile(make, code) for name, (make, code) in RECORDS.items()},
    **{name: Hostile(make, "E_POLICY") for name, make in TREES.items()},
    "35 a pool of 8 million": Hostile(
        _by_hand(Policy(shape=FullTree(depth=64, top_k=64))), "E_COST"
    ),
    "35 a scorer that says nothing": Hostile(broken(_deaf, "c2t_ffn"), "E_DEGENERATE"),
    "33 no vectors": Hostile(broken(_no_vectors), "E_MISSING"),
    "33 vectors of other decisions": Hostile(
        _vectors(rows__depth=lambda depth: depth + 1), "E_SELFTEST"
    ),
}
