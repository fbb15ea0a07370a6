"""Families 3, 12, 13, 26 to 29, 31, 32, 36, 38 and 39: what `config.json` and the report say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from specctl.artifacts.compatibility import Expectation
from specctl.artifacts.facts import Domain, Range
from specctl.features import features_digest
from tests.artifacts.examples import PAIR, read_manifest, sha, write_manifest
from tests.artifacts.hostile.making import (
    Hostile,
    Make,
    broken,
    given,
    manifest_of,
    sound,
    telling,
    told,
)

AMBIGUOUS = {
    "duplicate key": b'{"artifact_version":1,"lossless":true,"lossless":false}',
    "nested duplicate": b'{"artifact_version":1,"pair":{"target":"a","target":"b"}}',
    "NaN": b'{"artifact_version":1,"x":NaN}',
    "infinity": b'{"artifact_version":1,"x":-Infinity}',
    "1e999": b'{"artifact_version":1,"x":1e999}',
    "huge int": b'{"artifact_version":1,"x":' + b"9" * 5000 + b"}",
    "65 bit": b'{"artifact_version":1,"x":9223372036854775808}',
    "depth 10^4": b'{"artifact_version":1,"x":' + b"[" * 10**4 + b"]" * 10**4 + b"}",
    "depth 33": b'{"artifact_version":1,"x":' + b"[" * 33 + b"]" * 33 + b"}",
    "depth 10^5": b"[" * 10**5,
    "not UTF-8": b'{"artifact_version":1,"x":"\xff"}',
    "byte order mark": b'\xef\xbb\xbf{"artifact_version":1}',
    "white space": b'{"artifact_version": 1}',
    "trailing newline": b'{"artifact_version":1}\n',
    "unsorted": b'{"artifact_version":1,"b":1,"a":1}',
    "trailing text": b'{"artifact_version":1}{}',
    "empty": b"",
}
ESCAPES = ("\x1b[2Jgone", "half \ud800 a pair", "two\nlines", "\u202eturned", "\u2028")
"""Texts that a terminal obeys, or that no terminal can print."""
REQUIRED = ("lossless", "policy", "features", "feature_digest", "pair", "domain", "evidence", "fit",
            "provenance", "files")  # fmt: skip


def _without(name: str) -> Make:
    def write(folder: Path) -> None:
        manifest = read_manifest(folder)
        del manifest[name]
        write_manifest(folder, manifest)

    return broken(write)


def _schemas() -> Iterator[tuple[str, Make]]:
    for version in (0, 2, "1", 1.0, True, None, [1]):
        yield f"13 version {version!r}", telling({"artifact_version": version})
    for name in REQUIRED:
        yield f"13 no {name}", _without(name)
    yield "13 unknown field", telling({"trust_me": True})
    yield "3 a source elsewhere", telling({"source": "file:///etc/passwd"})
    for text in (b"[]", b"null", b"1", b'"x"', b"{}"):
        yield f"13 only {text.decode()}", manifest_of(lambda text=text: text)
    for i, text in enumerate(ESCAPES):
        yield f"38 field {i}", telling({text: 1})
        yield f"38 file {i}", told(lambda old, t=text: {"files": {**old["files"], t: 1}})
    for text in ("\x1b[2J", "a\0b", "\x9b1m"):
        named = {"pair": {**PAIR.model_dump(), "target": text}}
        yield f"38 name {text!a}", telling(named)
        yield f"38 fit {text!a}", telling({"fit": {"note": ["deep", text]}})


def _featured(*names: str) -> Make:
    return telling({"features": names, "feature_digest": features_digest(names)})


FEATURES: dict[str, Make] = {
    "26 other units": telling({"feature_digest": sha("e")}),
    "26 renamed": telling({"features": ["depth"]}),
    "26 twice": telling({"features": ["phi", "phi"]}),
    "26 unknown": telling({"features": ["lucky_guess"]}),
    "26 a name of 270 KB": telling({"features": ["phi" * 90_000]}),
    "26 none": telling({"features": []}),
    "26 not those read": _featured("depth"),
    "26 permuted": told(
        lambda old: {
            "features": (names := old["features"][::-1]),
            "feature_digest": features_digest(names),
        },
        "c2t_ffn",
    ),
}


SECRETS = {
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "github": "ghp_" + "a1B2" * 9,
    "private key": "-----BEGIN " + "PRIVATE KEY-----",
    "prompt": "<|im_start|>user\nWhat is my salary?",
}
"""One of each kind; `test_attacks_content` knows more."""


def _secrets() -> Iterator[tuple[str, Make]]:
    for name, secret in SECRETS.items():
        yield f"39 {name} in the card", given("README.md", lambda s=secret: s.encode())
        report = json.dumps({"held_out_mse": 0.25, "rows": [secret]})
        yield f"39 {name} in the report", given("report.json", lambda r=report: r.encode())
        if "\n" not in secret:
            yield f"39 {name} in fit", telling({"fit": {"note": secret}})


HERE = Domain(hardware=("NVIDIA H200",), dtype="bfloat16", batch_size=Range(low=4, high=4))
OTHERS: dict[str, tuple[str, Expectation]] = {
    **{
        f"{family} another {part}": (code, Expectation(PAIR.model_copy(update={field: sha("1")})))
        for family, part, code in (
            (27, "tokenizer", "E_TOKENIZER"), (28, "target", "E_TARGET"),
            (28, "drafter", "E_TARGET"),
        )
        for field in (f"{part}_digest",)
    },
    **{
        f"29 another {name}": (
            "W_DOMAIN", Expectation(PAIR, HERE.model_copy(update={name: value}))
        )
        for name, value in {
            "hardware": ("NVIDIA H200 NVL",),
            "dtype": "float16",
            "batch_size": Range(low=9, high=9),
        }.items()
    },
}  # fmt: skip
"""What is about to run where the artifact was not made for."""

FAMILIES: dict[str, Hostile] = {
    **{
        f"12 {name}": Hostile(manifest_of(lambda data=data: data), "E_MANIFEST")
        for name, data in AMBIGUOUS.items()
    },
    **{name: Hostile(make, "E_SCHEMA") for name, make in _schemas()},
    **{name: Hostile(make, "E_FEATURES") for name, make in FEATURES.items()},
    **{name: Hostile(sound, code, expect=expect) for name, (code, expect) in OTHERS.items()},
    **{
        f"32 {name}": Hostile(telling({"features": [name]}), "E_PREDICTABLE")
        for name in ("drawn_token", "node_match", "target_logp", "later_entropy")
    },
    "31 a lossy one that says lossless": Hostile(telling({"lossless": True}, "mars"), "E_CLASS"),
    "31 a lossless one that says lossy": Hostile(telling({"lossless": False}), "E_CLASS"),
    "31 lossy without evidence": Hostile(telling({"evidence": None}, "mars"), "E_CLASS"),
    **{name: Hostile(make, "E_PRIVACY") for name, make in _secrets()},
}
