"""The fused walk on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specctl.kernels.dispatch import forced
from specctl.kernels.verify_tree import RunnerUp, verify_tree, walk_tree
from tests.kernels.cases_verify_tree import (
    ACCEPTANCES,
    Batch,
    check_first_two_of_more,
    check_verify,
    check_walk,
    judged,
    moved,
    random_batch,
    walked,
)
from tests.kernels.cases_walk_edges import check_edges
from tests.kernels.cuda.capture import CUDA, captured, overwrite

pytestmark = pytest.mark.cuda
SHAPES = {"chain": (8, 9, 1), "60 nodes": (32, 60, 12), "bushy": (60, 64, 30), "deep": (8, 250, 3)}
LARGE_VOCAB = 151936


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACCEPTANCES)
def test_walk_equals_the_loop(name: str, shape: str) -> None:
    with forced("fused"):
        for seed in range(3):
            check_walk(random_batch(seed, *SHAPES[shape]), name, CUDA)


@pytest.mark.parametrize("name", ACCEPTANCES)
def test_the_largest_trees(name: str) -> None:
    with forced("fused"):
        check_walk(random_batch(5, 4, 1024, 40), name, CUDA)


def test_verify_equals_the_loop() -> None:
    with forced("fused"):
        for shape in SHAPES.values():
            check_verify(random_batch(3, *shape), CUDA)
        check_edges(CUDA)
        check_first_two_of_more(CUDA)


def tree_of(batch: Batch) -> list[Tensor]:
    return [part.to(CUDA) for part in (batch.parent, batch.token_ids, batch.target_ids)]


@pytest.mark.parametrize("name", ACCEPTANCES)
def test_a_graph_sees_what_is_overwritten(name: str) -> None:
    """Trees, answers and thresholds change between replays, and nothing waits."""
    first, second = (random_batch(seed, 16, 60, 9) for seed in (1, 2))
    given, fresh = (ACCEPTANCES[name](batch) for batch in (first, second))
    depth = max(first.max_depth, second.max_depth)
    inputs, acceptance = tree_of(first), moved(given, CUDA)
    with forced("fused"):
        graph, found = captured(lambda: walk_tree(*inputs, depth, acceptance))
    for batch, values in ((first, given), (second, fresh)):
        overwrite(inputs, [part.cpu() for part in tree_of(batch)])
        if acceptance is not None:
            pairs = vars(acceptance), vars(moved(values, CUDA))
            kept = [key for key, value in pairs[0].items() if isinstance(value, Tensor)]
            overwrite(*([part[key] for key in kept] for part in pairs))
        graph.replay()
        wanted = walked(batch, values, depth + 1)
        for field, value in found._asdict().items():
            assert torch.equal(value.cpu(), getattr(wanted, field)), field


def test_verify_in_a_graph() -> None:
    first, second = (random_batch(seed, 16, 60, 9) for seed in (1, 2))
    depth = max(first.max_depth, second.max_depth)
    inputs = [first.parent.to(CUDA), judged(first).admitted.to(CUDA)]
    with forced("fused"):
        graph, path = captured(lambda: verify_tree(*inputs, depth))
    given = judged(second)
    overwrite(inputs, [second.parent.to(CUDA), given.admitted.to(CUDA)])
    graph.replay()
    assert torch.equal(path.cpu(), walked(second, given, depth + 1).path)


def test_offsets_beyond_31_bits() -> None:
    """A law of 32 x 512 x 151,936 numbers: tokens at the end of it are looked up."""
    rows, slots = 32, 512
    law = torch.zeros(1, device=CUDA, dtype=torch.bfloat16).expand(rows, slots, LARGE_VOCAB)
    law = law.contiguous() if torch.cuda.mem_get_info()[0] > 2**33 else law
    last = LARGE_VOCAB - 1
    parent = torch.arange(-1, slots - 1, device=CUDA).clamp(min=-1).expand(rows, -1)
    tokens = torch.full((rows, slots), last, device=CUDA)
    top_ids = torch.tensor([0, last], device=CUDA).expand(rows, slots, 2)
    logits = torch.ones(rows, slots, 2, device=CUDA)
    greedy = torch.ones(rows, dtype=torch.bool, device=CUDA)
    bound = torch.full((rows,), -1.0, device=CUDA)
    second = RunnerUp(top_ids, logits, greedy, bound, "difference", law=law)
    if law.is_contiguous():
        law[-1, 7, last] = float("-inf")
    with forced("fused"):
        found = walk_tree(parent, tokens, torch.zeros_like(tokens), 20, second)
    assert found.num_accepted.tolist() == [20] * (rows - 1) + [7 if law.is_contiguous() else 20]
