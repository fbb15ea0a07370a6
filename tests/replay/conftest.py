"""The embedded pair, loaded once, and the folder of a module's traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.logs.trace_set import TraceSet
from specctl.runtime.load import Pair, load_pair


@pytest.fixture(scope="package")
def pair() -> Pair:
    return load_pair("embedded", "embedded", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def folder(traces: TraceSet) -> Path:
    """Where the traces of a module lie."""
    return Path(traces.parts[0].place.name)
