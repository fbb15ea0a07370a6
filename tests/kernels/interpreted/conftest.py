"""Every test of this folder forces the fused kernels; without the interpreter none is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from specctl.kernels.dispatch import forced


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and os.environ.get("TRITON_INTERPRET") != "1":
        return True
    return None


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    from tests.kernels.interpreted.quick import quick

    with quick():
        yield


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with forced("fused"):
        yield
