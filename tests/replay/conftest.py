"""The embedded pair, loaded once."""

from __future__ import annotations

import pytest

from specctl.runtime.load import Pair, load_pair


@pytest.fixture(scope="package")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu", dtype="float32")
