"""What fuzzers throw bytes at, and what counts as a finding.

A target takes bytes and gives back nothing. It may raise `ArtifactError` or `TraceError`; any
other exception is a finding. So is an `AssertionError` of its own: bytes that were accepted and do
not stand for themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from specctl.artifacts.files import MAX_BYTES
from specctl.artifacts.loading import LoadRequest, checked
from specctl.artifacts.manifest import manifest_bytes, parse_manifest
from specctl.artifacts.signing.dsse import parse_envelope
from specctl.artifacts.signing.keys import SigningKey
from specctl.artifacts.strict_json import parse_strict
from specctl.artifacts.tensors import read_tensors
from specctl.errors import ArtifactError, TraceError
from specctl.logs.trace_files import TraceHeader, parse_record
from specctl.policy.parse import canonical_json

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
TYPED = (ArtifactError, TraceError)


class Target(NamedTuple):
    """One parser.

    Attributes:
        corpus: sound inputs to start from.
        share: of the executions, relative to the others.
    """

    run: Callable[[bytes], None]
    corpus: list[bytes]
    share: int


def manifest(data: bytes) -> None:
    """An accepted manifest is its own canonical form: no two texts share a meaning."""
    assert manifest_bytes(parse_manifest(data)) == data, "accepted, but not canonical"


def strict_json(data: bytes) -> None:
    """What one parser reads, the standard one reads alike."""
    assert parse_strict(data) == json.loads(data)


def safetensors(data: bytes) -> None:
    """Our header reader and the library agree on what is there, to the last byte."""
    tensors = read_tensors(data)
    size = int.from_bytes(data[:8], "little")
    assert sum(tensor.nbytes for tensor in tensors.values()) == len(data) - 8 - size


def trace_header(data: bytes) -> None:
    parse_record("trace.json", data, TraceHeader)


def envelope(data: bytes) -> None:
    parse_envelope(data)


def artifact(data: bytes) -> None:
    """A whole artifact as one text: an attacker lists each file correctly.

    The first bytes choose the file whose content follows.
    """
    files = dict(ARTIFACTS[data[0] % len(ARTIFACTS)]) if data else {}
    names = sorted(name for name in files if name != "config.json")
    if len(data) < 2:
        return
    name = names[data[1] % len(names)]
    files[name] = data[2:][: MAX_BYTES[name]]
    tree = json.loads(files["config.json"])
    digest = "sha256:" + hashlib.sha256(files[name]).hexdigest()
    tree["files"][name] = {"digest": digest, "size_bytes": len(files[name])}
    files["config.json"] = canonical_json(tree).encode()
    checked(files, LoadRequest())


def _golden(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob(pattern))]


def _artifacts() -> list[dict[str, bytes]]:
    folders = sorted(path for path in GOLDEN.glob("artifacts-v*/*") if path.is_dir())
    return [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]


def _artifact_corpus() -> list[bytes]:
    found = []
    for i, files in enumerate(ARTIFACTS):
        names = sorted(name for name in files if name != "config.json")
        found += [bytes([i, place]) + files[name] for place, name in enumerate(names)]
    return found


ARTIFACTS = _artifacts()
TARGETS = {
    "manifest": Target(manifest, _golden("artifacts-v*/*/config.json"), 8),
    "strict_json": Target(strict_json, _golden("artifacts-v*/*/config.json"), 4),
    "safetensors": Target(
        safetensors,
        [*_golden("artifacts-v*/*/policy.safetensors"), *_golden("artifacts-v*/*/selftest.*")],
        8,
    ),
    "trace_header": Target(trace_header, _golden("traces-v*/trace.json"), 4),
    "envelope": Target(
        envelope, [SigningKey.generate().sign("application/x", b'{"created":null}')], 3
    ),
    "artifact": Target(artifact, _artifact_corpus(), 1),
}


def run_one(target: Target, data: bytes) -> str | None:
    """Runs a target once; a finding in words, or None."""
    try:
        target.run(data)
    except TYPED:
        return None
    except Exception as error:  # the oracle: whatever else comes out is a hole
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None
