"""Machine code of the walk, for chips that need not be there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specctl.kernels.aot import ARCHS, Case, compile_case
from specctl.kernels.verify_tree.fused import AOT_CASES, TUNED
from tests.kernels.machine_code import assert_tight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", AOT_CASES, ids=lambda case: case.name)
def test_machine_code(case: Case, arch: int) -> None:
    assert_tight(case, compile_case(case, arch))


def test_every_tuned_size_is_compiled() -> None:
    assert {case.constexprs["BLOCK_N"] for case in AOT_CASES} == set(TUNED)
