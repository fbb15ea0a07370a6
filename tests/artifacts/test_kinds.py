"""What a folder is that is no artifact's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl.artifacts.kinds import check_is_artifact
from specctl.errors import ArtifactError


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.json").touch()
    with pytest.raises(ArtifactError, match="a trace set"):
        check_is_artifact(tmp_path)


def test_a_folder_that_cannot_be_listed_is_left_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed to us, or was moved away just now: the loader has typed errors for that."""

    def closed(_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", closed)
    check_is_artifact(tmp_path)
