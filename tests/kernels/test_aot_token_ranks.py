"""Machine code of `token_ranks`, for chips that need not be there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specctl.kernels.aot import ARCHS, Case, compile_case
from specctl.kernels.token_ranks.fused import AOT_CASES
from tests.kernels.machine_code import assert_tight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", AOT_CASES, ids=lambda case: case.name)
def test_machine_code(case: Case, arch: int) -> None:
    assert_tight(case, compile_case(case, arch))
