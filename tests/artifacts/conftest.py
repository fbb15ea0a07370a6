"""An artifact to attack, and what every refusal has in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import ArtifactError
from tests.artifacts.hostile import sound


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound artifact of HeteroSpec's bins, which has every kind of file but reports."""
    return sound(tmp_path / "artifact")


def refused(code: str, attempt: Callable[..., Any], *given: Any, **options: Any) -> ArtifactError:
    """The refusal of an attempt, which says its facts in one line, printable and not endless."""
    with pytest.raises(ArtifactError) as caught:
        attempt(*given, **options)
    error = caught.value
    assert error.code == code, str(error)
    assert all((error.field, error.problem, error.hint)), vars(error)
    assert str(error).startswith(f"{code} {error.field}")
    assert str(error).endswith(f": {error.problem}; {error.hint}")
    assert error.exit_code == 3
    assert str(error).isprintable()
    assert len(str(error)) < 1500
    return error
