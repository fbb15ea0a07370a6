"""What tests of stores share."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries come one after the other."""
    monkeypatch.setattr("specctl.stores.creating.FIRST_WAIT_S", 0.0)
