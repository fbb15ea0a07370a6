"""Families 12, 25, 33, 35, 36 and 39 where work is out of proportion: many things, or a large one.

Each file is within its cap. What a bound refuses is refused at once; what none does goes through
every search, and breaks its rule with the very last value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from specctl.artifacts.checks import policy_features
from specctl.artifacts.files import MAX_BYTES, MIB
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.artifacts.selftest.rounds import OUTPUTS, round_inputs
from specctl.artifacts.strict_json import MAX_KEY_CHARS, MAX_NESTING
from specctl.artifacts.tensors import REFERENCE, policy_tensors, policy_tree, write_tensors
from specctl.features import features_digest
from specctl.policy import build_shape
from specctl.policy.records import FullTree, JensenShannon, Policy, ScoredTree
from specctl.policy.scorers import MAX_LEAVES, MAX_TREE_NODES
from tests.artifacts.examples import read_manifest, replace_file, write_manifest
from tests.artifacts.hostile.making import Hostile, Make, broken, given, sound, telling
from tests.artifacts.hostile.manifests import SECRETS
from tests.policy.scorers import leaning

HELD_OUT = {"value": 0.25, "low": 0.125, "high": 0.5}
"""The figure of `examples.EVIDENCE`, as a report has it."""


def text_of(tree: object) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


def under(keys: list[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


UNREAD = {
    "12 a key of 1 MiB over 400 leaves": lambda: text_of(
        {"a" * MIB: [{f"k{i}": 0 for i in range(400)}]}
    ),
    "12 lists in lists, no comma between": lambda: (
        b"[" + b",".join([b"[" * 30 + b"]" * 30] * 33_000) + b"]"
    ),
}

# ------------------------------------------------------------------ places and texts


def leaked_last(folder: Path, report: object, card: bytes = b"") -> None:
    """A clean report, and a card whose end is a secret."""
    replace_file(folder, "report.json", text_of({"held_out_mse": HELD_OUT, "x": report}))
    replace_file(folder, "README.md", card + b"\n" + SECRETS["aws"].encode())
    assert all((folder / name).stat().st_size <= MAX_BYTES[name] for name in MAX_BYTES
               if (folder / name).exists())  # fmt: skip


def leaves_under_long_keys(folder: Path) -> None:
    """The place of each of these leaves is a text of 7 KB."""
    keys = [f"{i:2}" + "k" * (MAX_KEY_CHARS - 2) for i in range(MAX_NESTING - 6)]
    leaves = [{f"k{i}": f"v{i}" for i in range(4000)} for _ in range(24)]
    leaked_last(folder, under(keys, leaves))


def texts_at_their_caps(folder: Path) -> None:
    """Dashes, which most patterns must look at one by one."""
    write_manifest(folder, {**read_manifest(folder), "fit": {"note": "-" * (MIB - 8192)}})
    leaked_last(folder, "-" * (2 * MIB - 200), b"-" * (MIB - 200))


def long_references(folder: Path) -> None:
    """The places of these references take 300 MB."""
    references = {f"k{i}": {REFERENCE: "x"} for i in range(4000)}
    places = under(["a" * MAX_KEY_CHARS] * (MAX_NESTING - 7), references)
    write_manifest(folder, {**read_manifest(folder), "policy": {f"{i}": places for i in range(10)}})


# ------------------------------------------------------------------ tensors


def tensors(prefix: str, **found: np.ndarray) -> bytes:
    return write_tensors({f"{prefix}.{name}": tensor for name, tensor in found.items()})


def wide_network(num_named: int) -> Make:
    """A network of 30,000 features, of which the manifest names so many."""

    def write(folder: Path) -> None:
        manifest, names = read_manifest(folder), ["depth"] * 30_000
        manifest["policy"]["shape"]["scorer"]["features"] = names
        manifest["features"] = names[:num_named]
        manifest["feature_digest"] = features_digest(names[:num_named])
        write_manifest(folder, manifest)
        w1 = np.random.default_rng(0).normal(0, 1, (64, 30_000)).astype(np.float32)
        data = tensors("shape.scorer", mean=w1[0], scale=np.ones_like(w1[0]), w1=w1,
                       b1=w1[:, 0], w2=w1[:, 1], b2=w1[0, :1])  # fmt: skip
        replace_file(folder, "policy.safetensors", data)

    return broken(write, "c2t_ffn")


def two_million_edges() -> bytes:
    return tensors("shape", edges=np.arange(2_000_000, dtype=np.float32))


def trees_of_one_leaf() -> bytes:
    """Every node that is scored keeps some numbers for each of the trees."""
    none, zeros = np.full(MAX_TREE_NODES, -1), np.zeros(MAX_TREE_NODES, np.float32)
    return tensors("shape.scorer", roots=np.arange(MAX_TREE_NODES), feature=none, left=none,
                   right=none, threshold=zeros, value=zeros)  # fmt: skip


# ------------------------------------------------------------------ the self-test


def with_vectors_that_lie(folder: Path, policy: Policy, base: str) -> None:
    """A lawful policy that its own vectors belie, which is known once it has decided."""
    sound(folder, base)
    features = policy_features(policy)
    said = {"policy": policy_tree(policy), "lossless": policy.lossless, "features": features}
    said["feature_digest"] = features_digest(features)
    write_manifest(folder, {**read_manifest(folder), **said})
    inputs = round_inputs(policy, build_shape(policy.shape), 0)
    vectors = {**inputs, **dict.fromkeys(OUTPUTS, np.zeros((1, 1), np.int64))}
    replace_file(folder, "selftest.safetensors", tensors("rounds", **vectors))
    replace_file(folder, "policy.safetensors", write_tensors(policy_tensors(policy)))
    if (twin := twin_bytes(policy)) is not None:
        replace_file(folder, "policy.onnx", twin)


def as_many_trees_as_deep_as_may_be(folder: Path) -> None:
    scorer = leaning(520, MAX_LEAVES)
    policy = Policy(shape=ScoredTree(scorer=scorer, beta=0.1))
    with_vectors_that_lie(folder, policy, "c2t_trees")


def quarter_of_a_million_nodes(folder: Path) -> None:
    """Drafted and judged, for two requests: in the child more than its memory, elsewhere not."""
    shape = FullTree(depth=64, top_k=64, width=63, nested=False)
    with_vectors_that_lie(folder, Policy(shape=shape, acceptance=JensenShannon()), "full")


FAMILIES: dict[str, Hostile] = {
    **{name: Hostile(given("report.json", make), "E_MANIFEST") for name, make in UNREAD.items()},
    "25 references under long names": Hostile(broken(long_references), "E_WEIGHTS"),
    "35 90,000 features": Hostile(telling({"features": ["phi"] * 90_000}), "E_COST"),
    "35 a network of 30,000 features": Hostile(wide_network(30_000), "E_COST"),
    "35 the same, 3 of them named": Hostile(wide_network(3), "E_COST"),
    "35 two million edges": Hostile(given("policy.safetensors", two_million_edges), "E_COST"),
    "35 65,536 trees": Hostile(
        given("policy.safetensors", trees_of_one_leaf, "c2t_trees"), "E_COST"
    ),
    "33 trees as deep as may be": Hostile(as_many_trees_as_deep_as_may_be, "E_SELFTEST"),
    "39 96,000 texts under long keys": Hostile(broken(leaves_under_long_keys), "E_PRIVACY"),
    "39 texts at their caps": Hostile(broken(texts_at_their_caps), "E_PRIVACY"),
}
