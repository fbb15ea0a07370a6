"""Machine code of the decisions, for chips that need not be there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specctl.kernels.aot import ARCHS, Case, compile_case
from specctl.kernels.policy_eval.fused import (
    AOT_CASES,
    GATE_BLOCKS,
    LEVEL_WARPS,
    POOL_WARPS,
    ROW_BLOCKS,
)
from tests.kernels.machine_code import assert_tight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", AOT_CASES, ids=lambda case: case.name)
def test_machine_code(case: Case, arch: int) -> None:
    assert_tight(case, compile_case(case, arch))


def test_every_tuned_size_is_compiled() -> None:
    rows = ROW_BLOCKS | GATE_BLOCKS
    for name, sizes in (("BLOCK_P", POOL_WARPS), ("BLOCK_C", LEVEL_WARPS), ("BLOCK_R", rows)):
        found = {case.constexprs[name] for case in AOT_CASES if name in case.constexprs}
        assert found == set(sizes)
