"""Every decision backend decides alike, on 100,000 rows of each kind."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.cases_decisions import (
    check_bins,
    check_gates,
    check_network,
    check_sigmoid_border,
    check_trees,
)

pytest.importorskip("onnxruntime")
CPU = torch.device("cpu")


@pytest.mark.parametrize("num_edges", [1, 7, 255])
def test_bins(num_edges: int) -> None:
    check_bins(num_edges, CPU)


def test_gates() -> None:
    check_gates(CPU)


@pytest.mark.parametrize("hidden", [2, 16, 48, 64])
def test_networks(hidden: int) -> None:
    check_network(hidden, CPU)


def test_the_border_of_the_sigmoid() -> None:
    check_sigmoid_border(CPU)


def test_trees() -> None:
    check_trees(CPU)
