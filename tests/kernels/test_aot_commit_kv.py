"""Machine code of the compaction, for chips that need not be there."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from specctl.kernels.aot import ARCHS, Case, compile_case
from specctl.kernels.commit_kv.fused import AOT_CASES
from tests.kernels.machine_code import assert_tight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", AOT_CASES, ids=lambda case: case.name)
def test_machine_code(case: Case, arch: int) -> None:
    found = compile_case(case, arch)
    assert_tight(case, found)
    # The interpreter runs a program's threads as one, so only the code shows that they wait.
    moves = re.findall(r"(ld\.global\.v4|bar\.sync|st\.global)", found.ptx)
    assert re.fullmatch(r"L+BS+", "".join(WORDS[move] for move in moves))


WORDS = {"ld.global.v4": "L", "bar.sync": "B", "st.global": "S"}
