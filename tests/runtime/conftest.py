"""What several tests of the runtime follow."""

from __future__ import annotations

import pytest

from specctl.runtime.load import Pair
from tests.runtime import captured


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The embedded pair with the EAGLE-3 head, in float32 on the CPU, loaded once."""
    return captured.pair()
