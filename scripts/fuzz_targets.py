"""What fuzzers throw bytes at, and what counts as a finding.

A target takes bytes and gives back nothing. It may raise `ArtifactError` or `TraceError`; any
other exception is a finding. So is an `AssertionError` of its own: bytes that were accepted and do
not stand for themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load as load_safetensors

from specctl.artifacts.files import MAX_BYTES
from specctl.artifacts.load import load_files
from specctl.artifacts.manifest import MANIFEST, FileEntry, manifest_bytes, parse_manifest
from specctl.artifacts.signing import SigningKey, parse_envelope
from specctl.artifacts.strict_json import parse_strict
from specctl.artifacts.tensors import read_tensors
from specctl.errors import ArtifactError, TraceError
from specctl.logs.trace_files import TraceHeader, parse_record
from specctl.records import canonical_json
from tests.artifacts.examples import POLICIES, write_artifact
from tests.collect.rounds import header

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


@cache
def artifacts() -> list[dict[str, bytes]]:
    """The files of one artifact of each kind."""
    with TemporaryDirectory() as room:
        folders = [write_artifact(Path(room) / name, name) for name in POLICIES]
        return [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]


def manifest(data: bytes) -> None:
    """An accepted manifest is its own canonical form: no two texts share a meaning."""
    assert manifest_bytes(parse_manifest(data)) == data, "accepted, but not canonical"


def strict_json(data: bytes) -> None:
    """The standard parser reads alike what the strict one accepts."""
    assert parse_strict(data) == json.loads(data)


def safetensors(data: bytes) -> None:
    """Our reader and the library agree on what is there, to the last byte."""
    tensors, theirs = read_tensors(data), load_safetensors(data)
    assert tensors.keys() == theirs.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        assert np.array_equal(tensor, theirs[name])


def trace_header(data: bytes) -> None:
    parse_record("trace.json", data, TraceHeader)


def envelope(data: bytes) -> None:
    parse_envelope(data)


def artifact(data: bytes) -> None:
    """A whole artifact as one text: an attacker lists each file correctly.

    The first two bytes choose the artifact and the file whose content follows.
    """
    if len(data) < 2:
        return
    files = dict(artifacts()[data[0] % len(artifacts())])
    names = sorted(name for name in files if name != MANIFEST)
    name = names[data[1] % len(names)]
    files[name] = data[2:][: MAX_BYTES[name]]
    tree = json.loads(files[MANIFEST])
    tree["files"][name] = FileEntry.of(files[name]).model_dump()
    files[MANIFEST] = canonical_json(tree).encode()
    load_files(files)


def _artifact_corpus() -> list[bytes]:
    found = []
    for i, files in enumerate(artifacts()):
        names = sorted(name for name in files if name != MANIFEST)
        found += [bytes([i, place]) + files[name] for place, name in enumerate(names)]
    return found


def _all(name: str) -> list[bytes]:
    return [files[name] for files in artifacts()]


TARGETS = {
    "manifest": Target(manifest, _all(MANIFEST), 8),
    "strict_json": Target(strict_json, _all(MANIFEST), 4),
    "safetensors": Target(safetensors, _all("policy.safetensors"), 8),
    "trace_header": Target(trace_header, [header().to_bytes()], 4),
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
