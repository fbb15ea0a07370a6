"""Machine code of tree attention, for chips that need not be there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specctl.kernels.aot import ARCHS, Case, compile_case
from specctl.kernels.tree_attention.cases import aot_cases
from tests.kernels.machine_code import assert_tight

CASES = [(case, arch) for arch in ARCHS for case in aot_cases(arch)]
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""What each chip's matrix units are told."""


@pytest.mark.parametrize(
    ("case", "arch"), CASES, ids=[f"{case.name}-sm_{arch}" for case, arch in CASES]
)
def test_machine_code(case: Case, arch: int) -> None:
    found = compile_case(case, arch)
    assert_tight(case, found)
    if case.name.startswith("attend"):
        assert "cp.async.cg.shared.global" in found.ptx, "keys must arrive while others are used"
    if "bf16" in case.name and case.constexprs["QUERIES"] >= 64:
        assert PRODUCTS[arch] in found.ptx, "slower than the chip's own matrix products"
