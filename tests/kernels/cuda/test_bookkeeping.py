"""The fused bookkeeping on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.kernels.bookkeeping import (
    Laid,
    Opened,
    Settled,
    Walked,
    lay_out,
    open_level,
    open_tree,
    settle,
)
from specctl.kernels.dispatch import forced
from specctl.kernels.tree_build import BuiltTree, Pool
from tests.kernels import looped_bookkeeping as loops
from tests.kernels.cases_bookkeeping import (
    CASES,
    assert_buffers,
    both,
    check_lay_out,
    check_open_level,
    check_open_tree,
    check_settle,
)
from tests.kernels.cases_tree_build import assert_same, moved
from tests.kernels.cuda.capture import CUDA, captured, overwrite
from tests.kernels.drawn_bookkeeping import (
    CPU,
    Axis,
    Chosen,
    Level,
    Round,
    Tree,
    drawn_axis,
    drawn_level,
    drawn_round,
    junk_opened,
    junk_settled,
    settled_of,
    views,
)

pytestmark = pytest.mark.cuda
BATCHES = (1, 8, 32, 128)


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with forced("fused"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loops(name: str) -> None:
    CASES[name](CUDA)


@pytest.mark.parametrize("batch", BATCHES)
def test_real_sizes(batch: int) -> None:
    """EAGLE-2's trees of 60 nodes, eight levels of ten, in a pool of 711."""
    check_open_tree(Tree(batch, 711), CUDA)
    for depth in (1, 2, 7):
        parents, behind = (1, 0) if depth == 1 else (10, 10 * (depth - 1))
        check_open_level(Level(batch, 10, 3, depth, parents, 10, behind), CUDA, shared=True)
    check_lay_out(Axis(batch, 60, spare=batch), CUDA)
    check_settle(Round(batch, 9, 60, 711, 60, spare=batch), torch.bfloat16, CUDA)


def test_the_most_rows() -> None:
    check_lay_out(Axis(1024, 3, spare=700), CUDA)


# --------------------------------------------------------------------------- graphs


def tensors_of(*parts: object) -> list[Tensor]:
    """All tensors of some arguments, in order."""
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, tuple):
            found += tensors_of(*part)
    return found


def test_drafting_in_a_graph() -> None:
    """Roots and a deeper level, captured once; pools, choices and rows change in between."""
    case = Level(8, 10, 3, 3, 10, 10, 20)
    drawn = [drawn_level(case, seed) for seed in range(3)]
    sizes = drawn[0][1]
    fresh = [chosen._replace(above=_cut(chosen.above, case)) for chosen, _ in drawn]
    given = _there(fresh[0])
    opened = junk_opened(np.random.default_rng(0), 8, 10, 3)
    _, found = both(opened, CUDA)
    # The level reads what the roots leave of the pool, as all levels do.
    graph, _ = captured(
        lambda: (
            open_tree(given.pool, given.stable, given.vacant, Opened(*views(found, 8))),
            open_level(*given, Opened(*views(found, 8)), **sizes),
        )
    )
    for chosen in fresh[1:]:
        wanted, start = both(opened, CPU)
        overwrite(tensors_of(given), tensors_of(chosen))
        overwrite(found, start)
        graph.replay()
        loops.open_tree(chosen.pool, chosen.stable, chosen.vacant, Opened(*views(wanted, 8)))
        loops.open_level(*chosen, Opened(*views(wanted, 8)), **sizes)
        assert_buffers(Opened._fields, found, wanted)
        for name, column, expected in zip(Pool._fields, given.pool, chosen.pool, strict=True):
            assert torch.equal(column.cpu().nan_to_num(5.0), expected.nan_to_num(5.0)), name


def _cut(above: Tensor | None, case: Level) -> Tensor:
    assert above is not None
    return above[: case.rows, : case.parents].contiguous()


def _there(chosen: Chosen) -> Chosen:
    """On the device; a copy, so that what is drawn stays."""
    pool = Pool(*(column.clone().to(CUDA) for column in chosen.pool))
    return Chosen(pool, *(part.to(CUDA) for part in chosen[1:]))  # type: ignore[union-attr]


def test_laying_out_in_a_graph() -> None:
    """Trees share the axis otherwise from replay to replay; its length is the graph's."""
    drawn = [drawn_axis(Axis(8, 60), seed) for seed in range(3)]
    options = {"num_tokens": max(int(tree.num_nodes.sum()) for tree, _, _ in drawn) + 3}
    tree, prefix, positions = drawn[0]
    given = (BuiltTree(*moved(tree, CUDA)), prefix.to(CUDA), positions.to(CUDA))

    def run() -> Laid:
        return lay_out(*given, **options, last_place=77)

    graph, found = captured(run)
    for fresh in drawn[1:]:
        overwrite(tensors_of(*given), tensors_of(*fresh))
        graph.replay()
        assert_same(found, loops.lay_out(*fresh, **options, last_place=77), "replay")


def test_settling_in_a_graph() -> None:
    """Logits keep their places whatever the number of nodes; what is behind them is no number."""
    drawn = [drawn_round(Round(8, 9, 60, 711, 60), torch.bfloat16, seed) for seed in range(3)]
    best = [pad(of.best, (0, 480 - len(of.best)), value=math.nan) for of in drawn]
    drawn = [of._replace(best=logits) for of, logits in zip(drawn, best, strict=True)]
    given = Walked(*moved(drawn[0], CUDA))
    buffers = [part.to(CUDA) for part in junk_settled(8, 9)]
    graph, _ = captured(lambda: settle(given, settled_of(buffers)))
    for fresh in drawn[1:]:
        overwrite(given, fresh)
        graph.replay()
        wanted = list(junk_settled(8, 9))
        loops.settle(fresh, settled_of(wanted))
        assert_buffers(Settled._fields, buffers, wanted)
