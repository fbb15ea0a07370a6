"""Families 7, 12, 22, 23, 36 and 39 at their largest: what could take memory or time."""

from __future__ import annotations

import json

from specctl.artifacts.files import MIB
from specctl.policy.parse import canonical_json
from tests.artifacts.hostile.making import Hostile, given, manifest_of
from tests.artifacts.hostile.manifests import SECRETS
from tests.artifacts.hostile.policies import costly_trees


def declared(length: int, header: bytes = b"") -> bytes:
    """A safetensors file whose header says that it has this length."""
    return length.to_bytes(8, "little") + header


def header_of(**tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return declared(len(text), text)


def text_of(tree: object) -> bytes:
    return canonical_json(tree).encode()


MANY = {f"k{i}": 0 for i in range(4096)}
HUGE = {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 2**62]}
MANIFESTS = {
    "12 nesting": (lambda: b"[" * MIB, "E_MANIFEST"),
    "12 many keys": (lambda: text_of({f"{i}": 0 for i in range(60_000)}), "E_MANIFEST"),
    "12 half a million values": (
        lambda: text_of({"artifact_version": 1, "x": [0] * 500_000}), "E_MANIFEST"
    ),
    "12 huge numbers": (
        lambda: b'{"artifact_version":1,"x":[' + b"1" * 900_000 + b"]}", "E_MANIFEST"
    ),
    "12 objects in objects": (
        lambda: text_of({"artifact_version": 1, "x": [MANY] * 20}), "E_SCHEMA"
    ),
}  # fmt: skip
TENSORS = {
    "7 header of 2^63": lambda: declared(2**63 - 1),
    "7 header of 8 MiB": lambda: declared(8 * MIB - 8, b"{" * (8 * MIB - 8)),
    "22 shape of 2^60": lambda: header_of(x=HUGE),
}
CARD = b"aws_secret=://" * 74_000 + SECRETS["aws"].encode()

FAMILIES: dict[str, Hostile] = {
    **{name: Hostile(manifest_of(make), code) for name, (make, code) in MANIFESTS.items()},
    **{
        name: Hostile(given("policy.safetensors", make), "E_WEIGHTS")
        for name, make in TENSORS.items()
    },
    "35 3 GB of tables": Hostile(costly_trees, "E_COST"),
    "12 report of 2 MiB": Hostile(
        given("report.json", lambda: b"[" + b"0," * (MIB - 2) + b"0]"), "E_MANIFEST"
    ),
    "39 card of 1 MiB": Hostile(given("README.md", lambda: CARD), "E_PRIVACY"),
}
