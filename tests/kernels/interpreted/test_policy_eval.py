"""Fused decisions as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.kernels.policy_eval import fused
from tests.kernels.cases_policy_eval import (
    check_bins,
    check_faults,
    check_gates,
    check_network,
    check_surest,
    check_threshold,
)
from tests.kernels.cases_policy_rounds import SHAPES, check_phi, check_round

CPU = torch.device("cpu")


def test_bins_of_100_000_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ROW_BLOCKS", {8192: 4})
    check_bins(5, CPU)


def test_as_many_bins_as_there_may_be() -> None:
    check_bins(255, CPU, num_rows=10_000)


def test_gates_of_100_000_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In larger blocks than a chip has registers for: here only their number costs."""
    monkeypatch.setattr(fused, "GATE_BLOCKS", {8192: 4})
    check_gates(CPU)


def test_a_threshold_on_15_000_nodes() -> None:
    check_threshold(CPU, rows=15)


def test_a_network_on_100_000_nodes() -> None:
    check_network(16, CPU)


@pytest.mark.parametrize("hidden", [2, 17, 48, 64])
def test_networks_of_other_sizes(hidden: int) -> None:
    check_network(hidden, CPU, rows=2, size=200)


@pytest.mark.parametrize("name", SHAPES)
def test_a_round_as_the_rule_decides_it(name: str) -> None:
    rows = 4 if name in ("echo", "hetero conditional") else 2
    sizes = {len(row) for row in check_round(name, CPU, rows).submitted}
    assert len(sizes) > 1 or name in ("eagle2", "c2t capped", "c2t rising")


def test_phi_where_rows_end_early() -> None:
    check_phi(CPU)


def test_the_surest_nodes_keep_their_order() -> None:
    check_surest(CPU)


def test_nan_is_told() -> None:
    check_faults(CPU)
