"""An artifact to attack, and what every refusal has in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import load_artifact
from specctl.errors import ArtifactError
from tests.artifacts.hostile import sound

Refused = Callable[..., ArtifactError]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound artifact of HeteroSpec's bins, which has every kind of file but reports."""
    return sound(tmp_path / "artifact")


@pytest.fixture
def refused() -> Refused:
    """Asserts that loading a folder stops with one line of a code and the folder."""

    def load(folder: Path, code: str, **options: Any) -> ArtifactError:
        with pytest.raises(ArtifactError) as caught:
            load_artifact(folder, **options)
        assert caught.value.artifact == str(folder)
        return check_refusal(caught.value, code)

    return load


def check_refusal(error: ArtifactError, code: str) -> ArtifactError:
    """Asserts that a refusal says its facts, in one line that is printable and not endless."""
    assert error.code == code, str(error)
    assert all((error.field, error.expected, error.found, error.fix)), vars(error)
    assert str(error).startswith(f"{code} {error.what}: expected {error.expected}, found ")
    assert error.exit_code == 3
    assert str(error).isprintable()
    assert len(str(error)) < 1500
    return error


@pytest.fixture
def checked() -> Callable[[ArtifactError, str], ArtifactError]:
    """Asserts of a refusal that was caught already; see `check_refusal`."""
    return check_refusal
