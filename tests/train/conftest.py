"""The log and the fits that several modules look at, made once."""

from __future__ import annotations

from typing import Any

import pytest

from specctl.logs.node_sample import LoggedNodes
from specctl.train.report import Fit
from tests.train.cases import FITS, NODE_PROMPTS, node_source


@pytest.fixture(scope="package")
def source(tmp_path_factory: pytest.TempPathFactory) -> LoggedNodes:
    """16 prompts of 128 positions."""
    folder = tmp_path_factory.mktemp("log") / "log"
    return node_source(folder, num_prompts=len(NODE_PROMPTS))


@pytest.fixture(scope="package")
def fits(source: LoggedNodes) -> dict[str, Fit[Any]]:
    """One quick fit of each family."""
    return {name: fit(source) for name, fit in FITS.items()}
