"""Artifacts that ask for work out of proportion: many small things times one large thing.

Each is within the caps of its files. What is refused by a bound is refused at once; what no bound
refuses goes through every search, and breaks its rule with the very last value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specctl.artifacts.files import MAX_BYTES, MIB
from specctl.artifacts.strict_json import MAX_KEY_CHARS, MAX_NESTING
from specctl.artifacts.tensors import REFERENCE, write_tensors
from specctl.features import features_digest
from tests.artifacts.examples import read_manifest, replace_file, write_artifact, write_manifest
from tests.artifacts.hostile.making import Hostile, Make

HELD_OUT = {"value": 0.25, "low": 0.125, "high": 0.5}
"""The figure of `examples.EVIDENCE`, as a report has it."""
KEY = "aws_secret_access_key = " + "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


def metric(value: float) -> dict[str, Any]:
    return {**dict.fromkeys(("low", "high", "level", "num_prompts")), "value": value}


def reported(report: Any, **metrics: float) -> Make:
    """A report, and metrics beside the one that it holds; the last of them is false."""

    def write(folder: Path) -> None:
        data = json.dumps(report, separators=(",", ":")).encode()
        assert len(data) <= MAX_BYTES["report.json"]
        replace_file(write_artifact(folder), "report.json", data)
        manifest = read_manifest(folder)
        others = {name: metric(value) for name, value in metrics.items()}
        manifest["evidence"]["metrics"] |= {**others, "zz": metric(99.0)}
        write_manifest(folder, manifest)

    return write


def last_key_leaks(folder: Path, report: Any) -> None:
    """The report is clean, and so is all of the card but its end."""
    write_artifact(folder)
    replace_file(folder, "report.json", json.dumps(report, separators=(",", ":")).encode())
    replace_file(folder, "README.md", f"# a card\n{KEY}\n".encode())


def under(keys: list[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def leaves_under_long_keys(folder: Path) -> None:
    """The place of each of these leaves is a text of 7 KB."""
    keys = [f"{i}" + "k" * (MAX_KEY_CHARS - 2) for i in range(MAX_NESTING - 5)]
    leaves = [{f"k{i}": f"v{i}" for i in range(4000)} for _ in range(24)]
    last_key_leaks(folder, {"held_out_mse": HELD_OUT, **under(keys, leaves)})


def texts_at_their_caps(folder: Path) -> None:
    """Dashes, which most patterns must look at one by one."""
    last_key_leaks(folder, {"held_out_mse": HELD_OUT, "x": "-" * (2 * MIB - 100)})
    card = "-" * (MIB - len(KEY) - 1) + "\n" + KEY
    replace_file(folder, "README.md", card.encode())
    manifest = read_manifest(folder)
    manifest["fit"] = {"note": "-" * (MIB - 8192)}
    write_manifest(folder, manifest)
    assert (folder / "config.json").stat().st_size <= MIB


def long_references(folder: Path) -> None:
    """The places of these references take 300 MB."""
    references = {f"k{i}": {REFERENCE: "x"} for i in range(4000)}
    places = under(["a" * MAX_KEY_CHARS] * (MAX_NESTING - 7), references)
    manifest = read_manifest(write_artifact(folder))
    write_manifest(folder, {**manifest, "policy": {f"{i}": places for i in range(10)}})


def wide_network(folder: Path, num_features: int, num_named: int) -> None:
    """A network of so many features, of which the manifest names so many."""
    write_artifact(folder, "c2t_ffn")
    names = ["depth"] * num_features
    manifest = read_manifest(folder)
    manifest["policy"]["shape"]["scorer"]["features"] = names
    manifest["features"] = names[:num_named]
    manifest["feature_digest"] = features_digest(names[:num_named])
    write_manifest(folder, manifest)
    floats = np.random.default_rng(0).normal(0, 1, (64, num_features)).astype(np.float32)
    tensors = {
        "mean": floats[0],
        "scale": np.ones_like(floats[0]),
        "w1": floats,
        "b1": floats[:, 0],
        "w2": floats[:, 1],
        "b2": floats[0, :1],
    }
    named = {f"shape.scorer.{name}": tensor for name, tensor in tensors.items()}
    replace_file(folder, "policy.safetensors", write_tensors(named))


def two_million_edges(folder: Path) -> None:
    edges = np.arange(2_000_000, dtype=np.float32)
    replace_file(
        write_artifact(folder), "policy.safetensors", write_tensors({"shape.edges": edges})
    )


def many_trees(folder: Path) -> None:
    """65,536 trees of one leaf each: every node of a round keeps a number for each of them."""
    none, zeros = np.full(1 << 16, -1), np.zeros(1 << 16, np.float32)
    tensors = {
        "roots": np.arange(1 << 16),
        "feature": none,
        "left": none,
        "right": none,
        "threshold": zeros,
        "value": zeros,
    }
    named = {f"shape.scorer.{name}": tensor for name, tensor in tensors.items()}
    replace_file(write_artifact(folder, "c2t_trees"), "policy.safetensors", write_tensors(named))


def listed_features(folder: Path) -> None:
    manifest = read_manifest(write_artifact(folder))
    write_manifest(folder, {**manifest, "features": ["phi"] * 90_000})


def raw_report(make: Callable[[], bytes]) -> Make:
    return lambda folder: replace_file(write_artifact(folder), "report.json", make())


MANY = {f"m{i}": 0.5 for i in range(4000)}
LEVELS = {f"held_out_auc_level_{i}": 0.5 for i in range(4000)}
CHOSEN = {f"held_out_x{i}": 0.5 for i in range(4000)}
COSTS: dict[str, tuple[Make, str]] = {
    "12 a key of 1 MiB over 400 leaves": (
        raw_report(lambda: json.dumps({"a" * MIB: [{f"k{i}": 0 for i in range(400)}]}).encode()),
        "E_MANIFEST",
    ),
    "12 lists in lists, no comma between": (
        raw_report(lambda: b"[" + b",".join([b"[" * 30 + b"]" * 30] * 33_000) + b"]"),
        "E_MANIFEST",
    ),
    "12 90,000 features": (listed_features, "E_COST"),
    "25 references under long names": (long_references, "E_WEIGHTS"),
    "35 a network of 30,000 features": (
        lambda folder: wide_network(folder, 30_000, 30_000),
        "E_COST",
    ),
    "35 the same, 3 of them named": (lambda folder: wide_network(folder, 30_000, 3), "E_COST"),
    "35 two million edges": (two_million_edges, "E_COST"),
    "35 65,536 trees": (many_trees, "E_COST"),
    "36 4000 metrics over 90,000 numbers": (
        reported([HELD_OUT, 0.5, [0] * 90_000], **MANY),
        "E_EVIDENCE",
    ),
    "36 4000 metrics of one value, 12,000 intervals": (
        reported([HELD_OUT, 0.5, [{"a": 0.5, "low": 0, "high": i} for i in range(12_000)]], **MANY),
        "E_EVIDENCE",
    ),
    "36 4000 metrics of 30,000 levels": (
        reported([HELD_OUT, 0.5, {"levels": [{"level": -1}] * 30_000}], **LEVELS),
        "E_EVIDENCE",
    ),
    "36 4000 metrics of the chosen of 30,000": (
        reported(
            {
                "held_out_mse": HELD_OUT,
                "x": 0.5,
                "chosen": "z" * 100_000,
                "policies": [{"policy": "a"}] * 30_000,
            },
            **CHOSEN,
        ),
        "E_EVIDENCE",
    ),
    "39 96,000 texts under long keys": (leaves_under_long_keys, "E_PRIVACY"),
    "39 texts at their caps": (texts_at_their_caps, "E_PRIVACY"),
}
FAMILIES = {name: Hostile(make, code) for name, (make, code) in COSTS.items()}
