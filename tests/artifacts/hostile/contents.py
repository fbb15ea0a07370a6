"""Families 3, 7, 12, 13, 22 to 35 and 38: manifests, tensors, records and texts.

An attacker lists each file as it is. Families at their largest stay within the caps of files: they
are refused before they cost memory or time, or break their rule with the very last value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specctl.artifacts.files import MIB
from specctl.artifacts.strict_json import MAX_KEY_CHARS, MAX_NESTING
from specctl.artifacts.tensors import (
    REFERENCE,
    policy_tensors,
    policy_tree,
    read_tensors,
    write_tensors,
)
from specctl.features import features_digest
from specctl.policy import FfnScorer, FullTree, Policy, ScoredTree
from tests.artifacts.examples import (
    FFN,
    HETERO,
    PAIR,
    read_manifest,
    replace_file,
    sha,
    write_manifest,
)
from tests.artifacts.hostile import Hostile, Make, broken, given, manifest_of, sound, telling, told
from tests.policy.scorers import copy_table

# ------------------------------------------------------------------ JSON and fields

V1 = b'{"artifact_version":1'
AMBIGUOUS = {
    "duplicate key": V1 + b',"lossless":true,"lossless":false}',
    "NaN": V1 + b',"x":NaN}',
    "1e999": V1 + b',"x":1e999}',
    "65 bit": V1 + b',"x":9223372036854775808}',
    "depth 33": V1 + b',"x":' + b"[" * 33 + b"]" * 33 + b"}",
    "depth 10^5": b"[" * 10**5,
    "not UTF-8": V1 + b',"x":"\xff"}',
    "byte order mark": b"\xef\xbb\xbf" + V1 + b"}",
    "white space": b'{"artifact_version": 1}',
    "unsorted": V1 + b',"b":1,"a":1}',
    "trailing text": V1 + b"}{}",
    "empty": b"",
    "60,000 keys": b"{" + b",".join(b'"%d":0' % i for i in range(60_000)) + b"}",
    "half a million values": V1 + b',"x":[' + b"0," * 499_999 + b"0]}",
    "a number of 900,000 digits": V1 + b',"x":[' + b"1" * 900_000 + b"]}",
}
ESCAPES = ("\x1b[2Jgone", "half \ud800 a pair", "two\nlines", "\u202eturned", "\u2028")
"""Texts that a terminal obeys, or that no terminal can print."""
MANY = json.dumps({f"k{i}": 0 for i in range(4096)}, sort_keys=True, separators=(",", ":")).encode()


def _without(name: str) -> Make:
    def write(folder: Path) -> None:
        manifest = read_manifest(folder)
        del manifest[name]
        write_manifest(folder, manifest)

    return broken(write)


def _schemas() -> Iterator[tuple[str, Make]]:
    for version in (0, 2, "1", 1.0, True, None, [1]):
        yield f"13 version {version!r}", telling(artifact_version=version)
    for name in ("lossless", "policy", "features", "feature_digest", "pair", "domain", "evidence",
                 "fit", "provenance", "files"):  # fmt: skip
        yield f"13 no {name}", _without(name)
    yield "13 unknown field", telling(trust_me=True)
    yield "3 a source elsewhere", telling(source="file:///etc/passwd")
    yield "12 objects in objects", manifest_of(V1 + b',"x":[' + b",".join([MANY] * 20) + b"]}")
    for text in (b"[]", b"null", b"1", b'"x"', b"{}"):
        yield f"13 only {text.decode()}", manifest_of(text)
    for i, text in enumerate(ESCAPES):
        yield f"38 field {i}", telling(**{text: 1})
        yield f"38 file {i}", told(lambda old, t=text: {"files": {**old["files"], t: 1}})
    for text in ("\x1b[2J", "a\0b", "\x9b1m"):
        yield f"38 name {text!a}", telling(pair={**PAIR.model_dump(), "target": text})
        yield f"38 fit {text!a}", telling(fit={"note": ["deep", text]})


FEATURES: dict[str, Make] = {
    "26 other units": telling(feature_digest=sha("e")),
    "26 twice": telling(features=["phi", "phi"]),
    "26 unknown": telling(features=["lucky_guess"]),
    "26 a name of 270 KB": telling(features=["phi" * 90_000]),
    "26 not those read": telling(features=["depth"], feature_digest=features_digest(["depth"])),
    "26 permuted": told(
        lambda old: {
            "features": (names := old["features"][::-1]),
            "feature_digest": features_digest(names),
        },
        "c2t_ffn",
    ),
}
# ------------------------------------------------------------------ tensors


def edges(values: Any, dtype: Any = np.float32) -> bytes:
    return write_tensors({"shape.edges": np.asarray(values, dtype=dtype)})


def header(text: bytes, length: int | None = None) -> bytes:
    """A safetensors file of a header alone, which may lie about its length."""
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def one_tensor(dtype: str, shape: list[int], end: int) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
    return header(json.dumps({"shape.edges": entry}).encode()) + bytes(max(0, min(end, 64)))


GOOD = np.float32(HETERO.edges)
TWO_THOUSAND = {f"shape.scorer.{name}": np.zeros(2_000, np.int64)
                for name in ("w1", "b1", "w2", "b2", "mean", "scale")}  # fmt: skip
TENSORS: dict[str, tuple[bytes, str]] = {
    "25 NaN": (edges([0.1, np.nan, 2]), "E_WEIGHTS"),
    "25 1e38": (edges([0.1, 1e38]), "E_WEIGHTS"),
    "25 denormal": (edges([1e-40, 1.0]), "E_WEIGHTS"),
    "25 needless float64": (edges(GOOD, np.float64), "E_WEIGHTS"),
    "25 whole numbers": (edges([1, 2, 3], np.int64), "E_WEIGHTS"),
    "30 matrix": (edges([[0.1, 0.2]]), "E_POLICY"),
    "30 equal": (edges([0.1, 0.1, 0.2]), "E_POLICY"),
    "30 no edges": (edges([]), "E_POLICY"),
    "25 other name": (write_tensors({"shape.edge": GOOD}), "E_WEIGHTS"),
    "25 one more": (write_tensors({"shape.edges": GOOD, "x": GOOD}), "E_WEIGHTS"),
    "26 other edges": (edges(GOOD + 1), "E_SELFTEST"),
    "38 a name that a terminal obeys": (
        write_tensors({"\x1b[2J": np.float32([np.nan])}), "E_WEIGHTS"
    ),
    "7 empty": (b"", "E_WEIGHTS"),
    "7 a header of 2^63": (header(b"{}", 2**63 - 1), "E_WEIGHTS"),
    "7 a header of 8 MiB": (header(b"{" * (8 * MIB - 8)), "E_WEIGHTS"),
    "7 a header with a tensor twice": (header(b'{"a":1,"a":1}'), "E_WEIGHTS"),
    "8 trailing": (edges(GOOD) + b"x", "E_WEIGHTS"),
    "8 shorter than its tensors": (one_tensor("F32", [2**20], 2**22), "E_WEIGHTS"),
    "22 a shape of 2^60": (one_tensor("F32", [2**30, 2**30], 2**62), "E_WEIGHTS"),
    "22 a shape of 0 and 2^62": (one_tensor("F32", [0, 2**62, 2**62], 0), "E_WEIGHTS"),
    "22 another dtype": (one_tensor("BOOL", [16], 16), "E_WEIGHTS"),
    "35 two million edges": (edges(np.arange(2_000_000)), "E_COST"),
    "35 12,000 numbers": (write_tensors(TWO_THOUSAND), "E_COST"),
}  # fmt: skip


def shape(policy: str = "hetero", **changes: Any) -> Make:
    return told(
        lambda old: {"policy": {**old["policy"], "shape": {**old["policy"]["shape"], **changes}}},
        policy,
    )


RECORDS: dict[str, tuple[Make, str]] = {
    "30 literal edges": (shape(edges=[0.1, 1.3, 2.7]), "E_WEIGHTS"),
    "30 reference elsewhere": (shape(edges={"$tensor": "shape.gammas"}), "E_WEIGHTS"),
    "30 reference with more": (shape(edges={"$tensor": "shape.edges", "x": 1}), "E_WEIGHTS"),
    "30 reference in a list": (shape(gammas=[{"$tensor": "shape.edges"}]), "E_POLICY"),
    "30 unknown kind": (shape(kind="oracle"), "E_POLICY"),
    "38 unknown field": (shape(**{"\x1b[2J\u202e\n": 1}), "E_POLICY"),
    "30 absurd depth": (shape(alpha=64), "E_POLICY"),
    "30 text for a number": (shape(index_base="0"), "E_POLICY"),
    "30 falling thresholds": (shape("echo", gate_levels=[4, 1]), "E_POLICY"),
}

# ------------------------------------------------------------------ whole policies


def by_hand(policy: Policy, *, features: list[str], base: str = "full") -> Make:
    """An artifact of a policy that nothing of ours would save; its self-test is another's."""

    def write(folder: Path) -> None:
        sound(folder, base)
        said = {"policy": policy_tree(policy), "lossless": policy.lossless, "features": features}
        said["feature_digest"] = features_digest(features)
        write_manifest(folder, {**read_manifest(folder), **said})
        old = read_tensors((folder / "policy.safetensors").read_bytes())
        selftest = {name: old[name] for name in old if name.startswith("selftest.")}
        data = write_tensors({**policy_tensors(policy), **selftest})
        replace_file(folder, "policy.safetensors", data)

    return write


def scored(scorer: Any, beta: float = 0.1) -> Policy:
    return Policy(shape=ScoredTree(scorer=scorer, beta=beta))


def selftest(name: str, change: Callable[[Any], Any], policy: Policy | str = "hetero") -> Make:
    """The self-test with other rows or answers, or without some."""

    def write(folder: Path) -> None:
        tensors = read_tensors((folder / "policy.safetensors").read_bytes())
        tensors[f"selftest.{name}"] = change(tensors[f"selftest.{name}"])
        left = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        replace_file(folder, "policy.safetensors", write_tensors(left))

    return broken(write, policy)


def wide_network(num_named: int) -> Make:
    """A network of 1,000 features, of which the manifest names so many."""
    names = ["depth"] * 1000
    w1 = tuple(tuple(row) for row in np.ones((2, 1000)).tolist())
    ones = (1.0,) * 1000
    wide = FFN.model_copy(update={"features": tuple(names), "mean": ones, "scale": ones, "w1": w1})
    return by_hand(scored(wide), features=names[:num_named], base="c2t_ffn")


def _long_references(folder: Path) -> None:
    """The places of these references take 300 MB."""
    tree: Any = {f"k{i}": {REFERENCE: "x"} for i in range(4000)}
    for _ in range(MAX_NESTING - 7):
        tree = {"a" * MAX_KEY_CHARS: tree}
    write_manifest(folder, {**read_manifest(folder), "policy": {f"{i}": tree for i in range(10)}})


DEAF = scored(FFN.model_copy(update={"w2": (0.0, 0.0)}), 0.4)
LOUD = scored(FfnScorer(**{**dict(FFN), "b1": (1e30, 1e30), "w2": (1e30, -1e30)}), 0.4)
FFN_FEATURES = list(FFN.features)
POLICY_FAMILIES: dict[str, tuple[Make, str]] = {
    "25 references under long names": (broken(_long_references), "E_WEIGHTS"),
    "35 90,000 features": (telling(features=["phi"] * 90_000), "E_COST"),
    "35 a network of 1,000 features": (wide_network(1000), "E_COST"),
    "35 the same, 3 of them named": (wide_network(3), "E_FEATURES"),
    "35 a pool of 8 million": (
        by_hand(Policy(shape=FullTree(depth=64, top_k=64)), features=[]), "E_COST"
    ),
    "35 a scorer that says nothing": (
        by_hand(DEAF, features=FFN_FEATURES, base="c2t_ffn"), "E_DEGENERATE"
    ),
    "35 a scorer that overflows": (
        by_hand(LOUD, features=FFN_FEATURES, base="c2t_ffn"), "E_DEGENERATE"
    ),
    "33 no answers": (selftest("found", lambda _: None), "E_SELFTEST"),
    "33 other answers": (selftest("found", lambda a: a + 1), "E_SELFTEST"),
    "33 fewer answers": (selftest("found", lambda a: a[:-1]), "E_SELFTEST"),
    "33 answers that are no whole numbers": (
        selftest("found", lambda a: a.astype(np.float32)), "E_SELFTEST"
    ),
    "33 other rows": (selftest("given", lambda a: a + 3), "E_SELFTEST"),
    "33 rows that no cell holds": (
        selftest("given", lambda a: a * 1000, scored(copy_table())), "E_SELFTEST"
    ),
    "31 a lossy one that says lossless": (telling("mars", lossless=True), "E_CLASS"),
    "31 a lossless one that says lossy": (telling(lossless=False), "E_CLASS"),
    "31 lossy without evidence": (telling("mars", evidence=None), "E_CLASS"),
}  # fmt: skip

# ------------------------------------------------------------------ reports


REPORTS = {
    "12 a report of 2 MiB": lambda: b"[" + b"0," * (MIB - 2) + b"0]",
    "12 a key of 1 MiB over 400 leaves": lambda: json.dumps({"a" * MIB: [0] * 400}).encode(),
    "12 lists in lists, no comma between": lambda: b"[" + b"[" * 30 + b"]" * 30 + b",[]" * 40_000,
    "12 a report with NaN": lambda: b'{"a":NaN}',
}


FAMILIES: dict[str, Hostile] = {
    **{f"12 {name}": Hostile(manifest_of(data), "E_MANIFEST") for name, data in AMBIGUOUS.items()},
    **{name: Hostile(make, "E_SCHEMA") for name, make in _schemas()},
    **{name: Hostile(make, "E_FEATURES") for name, make in FEATURES.items()},
    **{
        f"32 {name}": Hostile(telling(features=[name]), "E_PREDICTABLE")
        for name in ("drawn_token", "node_match", "target_logp", "later_entropy")
    },
    **{
        f"{name} (tensors)": Hostile(given("policy.safetensors", lambda data=data: data), code)
        for name, (data, code) in TENSORS.items()
    },
    **{name: Hostile(make, code) for name, (make, code) in (RECORDS | POLICY_FAMILIES).items()},
    **{name: Hostile(given("report.json", make), "E_MANIFEST") for name, make in REPORTS.items()},
}
