"""What several tests of the runtime follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.registries import VERSIONS, Shared, open_shared


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    """A registry with all versions, of which no alias names one yet."""
    shared = open_shared(tmp_path)
    shared.publish(tmp_path, *VERSIONS)
    return shared
