"""What every refusal of an artifact has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import load_artifact
from specctl.errors import ArtifactError


def refused(folder: Path, code: str, **options: Any) -> ArtifactError:
    """Asserts that loading stops with one line of this code and folder, and returns it."""
    with pytest.raises(ArtifactError) as caught:
        load_artifact(folder, **options)
    assert caught.value.artifact == str(folder)
    return checked(caught.value, code)


def checked(error: ArtifactError, code: str) -> ArtifactError:
    """Asserts that a refusal says its facts, in one line that is printable and not endless."""
    assert error.code == code, str(error)
    assert all((error.field, error.expected, error.found, error.fix)), vars(error)
    assert str(error).startswith(f"{code} {error.what}: expected {error.expected}, found ")
    assert error.exit_code == 3
    assert str(error).isprintable()
    assert len(str(error)) < 1500
    return error
