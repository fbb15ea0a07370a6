"""Artifacts to attack."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts.manifest import digest_of
from specctl.artifacts.verified import mark_verified
from tests.artifacts.hostile.making import sound


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound artifact of the bins of HeteroSpec, which has every kind of file but reports."""
    found = sound(tmp_path / "artifact")
    mark_verified(digest_of((found / "config.json").read_bytes()))
    return found
