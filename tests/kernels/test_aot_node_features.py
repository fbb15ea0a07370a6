"""Machine code of `node_features`, for chips that need not be there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specctl.kernels.aot import ARCHS, Case, compile_case
from specctl.kernels.node_features.fused import AOT_CASES, BLOCKS, LARGE_AOT_CASES, config_of
from tests.kernels.machine_code import assert_tight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", AOT_CASES, ids=lambda case: case.name)
def test_machine_code(case: Case, arch: int) -> None:
    assert_tight(case, compile_case(case, arch))


@pytest.mark.parametrize("case", LARGE_AOT_CASES, ids=lambda case: case.name)
def test_machine_code_of_more_merges(case: Case) -> None:
    # Two to four seconds each: one chip stands for all.
    assert_tight(case, compile_case(case, 90))


def test_the_cut_fills_the_chip_and_hangs_on_few_things() -> None:
    vocabularies, rows = (32_000, 128_256, 151_936, 262_144), (1, 8, 60, 240, 600)
    for vocab_size in vocabularies:
        configs = [config_of(num_rows, vocab_size, 16) for num_rows in rows]
        assert configs[0].scan_block < configs[-1].scan_block == BLOCKS[0]
        assert 8 * -(-vocab_size // configs[1].scan_block) >= 256  # two each for 128 processors
        # Two shapes of the merge and at most three of the scan are ever compiled.
        assert len({config._replace(scan_block=0) for config in configs}) == 2
        assert configs[0].num_slots <= 256
