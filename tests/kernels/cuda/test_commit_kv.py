"""The fused compaction on a GPU, where its threads run apart."""

from __future__ import annotations

import pytest
import torch

from specctl.kernels.commit_kv import commit_kv
from specctl.kernels.dispatch import forced
from tests.kernels.cases_commit_kv import DTYPES, SHAPES, check_commit, looped, random_paths
from tests.kernels.cuda.capture import CUDA, captured, overwrite

pytestmark = pytest.mark.cuda
LLAMA_8B = (16, 8, 8, 300, 128)
"""A quarter of its layers: one looks like another."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_steps", [1, 6, 16, 40])
def test_equals_the_loop(num_steps: int, dtype: torch.dtype) -> None:
    with forced("fused"):
        for seed, shape in enumerate(SHAPES.values()):
            check_commit(shape, num_steps, dtype, CUDA, seed)


@pytest.mark.parametrize("num_steps", [12, 65])
def test_the_shape_of_8b(num_steps: int) -> None:
    """Dense paths, whose entries move by a slot or two: a thread that does not wait would show."""
    with forced("fused"):
        for seed in range(5):
            check_commit((*LLAMA_8B[:3], 2 * num_steps, 128), num_steps, torch.bfloat16, CUDA, seed)


def test_a_graph_sees_what_is_overwritten() -> None:
    storage = torch.randn(LLAMA_8B, device=CUDA, dtype=torch.bfloat16)
    offset = torch.zeros(8, dtype=torch.int64, device=CUDA)
    path = torch.full((8, 12), -1, device=CUDA)
    with forced("fused"):
        graph, _ = captured(lambda: commit_kv(storage, offset, path))
    for seed in range(3):
        starts = torch.randint(0, 200, (8,), generator=torch.Generator().manual_seed(seed))
        paths, before = random_paths(seed, 8, 60, 12), storage.clone().cpu()
        overwrite([offset, path], [starts, paths])
        graph.replay()
        assert torch.equal(storage.cpu(), looped(before, starts, paths))


def test_offsets_beyond_31_bits() -> None:
    """A cache of 2^32 numbers; its last head moves like its first."""
    if torch.cuda.mem_get_info()[0] < 5 * 2**30:
        pytest.skip("needs 5 GiB of free memory")
    storage = torch.zeros(64, 32, 8, 2048, 128, dtype=torch.int8, device=CUDA)
    storage[-1, -1, -1, 2040:] = torch.arange(8, device=CUDA, dtype=torch.int8)[:, None]
    offset = torch.full((32,), 2040, device=CUDA)
    path = torch.tensor([0, 3, 7], device=CUDA).expand(32, -1)
    with forced("fused"):
        commit_kv(storage, offset, path)
    assert storage[-1, -1, -1, 2040:, 5].tolist() == [0, 3, 7, 3, 4, 5, 6, 7]
    assert not storage[:-1].any()
