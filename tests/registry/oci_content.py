"""An artifact's bytes in an OCI registry."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from specctl.artifacts.manifest import digest_of
from specctl.artifacts.signing import envelope_bytes
from specctl.artifacts.signing.statement import STATEMENT_TYPE, statement_bytes
from specctl.registry.oci import OciContent

FOLDER = Path(__file__).parents[2] / "golden" / "artifacts-v1" / "hetero"


@pytest.fixture
def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in FOLDER.iterdir()}


@pytest.fixture
def digest(files: dict[str, bytes]) -> str:
    return digest_of(files["config.json"])


@pytest.fixture
def content(oci_host: str) -> OciContent:
    return OciContent(f"oci://{oci_host}/team/{uuid.uuid4().hex}")


def statement(digest: str, name: str) -> bytes:
    """An envelope that nobody signed."""
    payload = statement_bytes(digest, name, "2026-01-01T00:00:00Z", None)
    return envelope_bytes(STATEMENT_TYPE, payload)


def ignore(size_bytes: int) -> None:
    assert size_bytes > 0
