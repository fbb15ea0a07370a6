"""Machine code of the bookkeeping, for chips that need not be there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specctl.kernels.aot import ARCHS, Case, compile_case
from specctl.kernels.bookkeeping.fused import AOT_CASES, ROW_BLOCKS, STEP_BLOCKS
from tests.kernels.machine_code import assert_tight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", AOT_CASES, ids=lambda case: case.name)
def test_machine_code(case: Case, arch: int) -> None:
    assert_tight(case, compile_case(case, arch))


def test_every_tuned_size_is_compiled() -> None:
    for name, sizes in (("BLOCK_B", ROW_BLOCKS), ("BLOCK_D", STEP_BLOCKS)):
        found = {case.constexprs[name] for case in AOT_CASES if name in case.constexprs}
        assert found == set(sizes)
