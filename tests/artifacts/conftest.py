"""Artifacts to attack."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.artifacts.hostile.making import sound


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound artifact of the bins of HeteroSpec, which has every kind of file but reports."""
    return sound(tmp_path / "artifact")
