"""Backends of the kernels' tests: a test that takes `device` runs on every one that is there.

reference     torch on the CPU
cuda          the fused kernels on a GPU; skipped without one
interpreter   the fused kernels as Python; alone in its process, which `test_interpreted.py`
              starts with TRITON_INTERPRET=1, as Triton reads it when it is imported
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from specctl.kernels.dispatch import forced

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = (
    ["interpreter"]
    if IS_INTERPRETED
    else ["reference", pytest.param("cuda", marks=pytest.mark.cuda)]
)

FUSED = pytest.mark.parametrize(
    "backend", [one for one in BACKENDS if one != "reference"], indirect=True
)
"""Of a test that the reference cannot fail, or has nothing to say of."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_INTERPRETED:
        items[:] = [item for item in items if "device" in getattr(item, "fixturenames", ())]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(backend: str) -> Iterator[torch.device]:
    """The backend's device, with its implementation forced."""
    with forced("reference" if backend == "reference" else "fused"):
        yield torch.device("cuda" if backend == "cuda" else "cpu")


@pytest.fixture
def is_quick(backend: str) -> bool:
    """Whether large sizes are affordable; the interpreter is some 1,000 times slower."""
    return backend != "interpreter"


@pytest.fixture(autouse=True, scope="session")
def _interpreter_as_a_gpu() -> Iterator[None]:
    if not IS_INTERPRETED:
        yield
        return
    from tests.kernels.interpreter import maxima_without_nan, products_of_bfloat16, quick

    with quick(), products_of_bfloat16(), maxima_without_nan():
        yield
