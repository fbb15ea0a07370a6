"""Machine code of the building of trees, for chips that need not be there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specctl.kernels.aot import ARCHS, Case, compile_case
from specctl.kernels.tree_build.fused import AOT_CASES, LEVEL_WARPS, POOL_WARPS, TREE_WARPS
from tests.kernels.machine_code import assert_tight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", AOT_CASES, ids=lambda case: case.name)
def test_machine_code(case: Case, arch: int) -> None:
    assert_tight(case, compile_case(case, arch))


def test_every_tuned_size_is_compiled() -> None:
    blocks = [case.constexprs for case in AOT_CASES]
    assert {block["BLOCK_C"] for block in blocks if "BLOCK_C" in block} == set(LEVEL_WARPS)
    trees = [block for block in blocks if block.get("SELECT")]
    assert {block["BLOCK_P"] for block in trees} == set(POOL_WARPS)
    for selects in (True, False):
        sizes = {block["BLOCK_N"] for block in blocks if block.get("SELECT") is selects}
        assert sizes == set(TREE_WARPS)
