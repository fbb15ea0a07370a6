"""What several tests of the runtime follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.runtime.load import Pair
from tests.runtime import captured
from tests.runtime.registries import VERSIONS, Shared, open_shared


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The embedded pair with the EAGLE-3 head, in float32 on the CPU, loaded once."""
    return captured.pair()


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    """A registry with all versions, of which no alias names one yet."""
    shared = open_shared(tmp_path)
    shared.publish(tmp_path, *VERSIONS)
    return shared
