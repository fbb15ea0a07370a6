"""Every decision backend decides alike: the torch rule, onnxruntime, for networks the kernels' op.

100,000 rows of each kind, on a CPU and, where there is one, on CUDA; `tests/kernels` holds the ops
to the rules of bins, gates and trees. Rows are random, and on thresholds, one float32 beside them,
infinite, NaN, zero, denormal and huge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from specctl.kernels.policy_eval import prune_level
from specctl.policy import (
    FfnScorer,
    ScoredTree,
    Shape,
    StaticTree,
    build_shape,
)
from specctl.policy.scorers import folded_layer
from specctl.runtime.twins import by_twin
from specctl.tree import DraftPool
from tests.kernels.drawn import buffer_of, edge_rows, level_pool
from tests.runtime.onnx_devices import DEVICES, NEEDS_ONNXRUNTIME, open_device

pytestmark = NEEDS_ONNXRUNTIME
BASE = StaticTree(depth=2, top_k=4, num_tokens=12)
ROWS, SIZE = 98, 1024
"""Nodes of a pool of one level: 100,352 of them."""
ROUNDING = 2.0**-24
"""Of a float32 operation, relative."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return open_device(request.param)


def rules(shape: Shape, device: torch.device) -> tuple[Any, Any]:
    """The rule of a shape, and the same one asking onnxruntime."""
    rule = build_shape(shape, device)
    asking = by_twin(shape, rule, device)
    assert asking is not rule
    return rule, asking


# --------------------------------------------------------------------------- networks


@dataclass(frozen=True)
class Scores:
    """What three backends say of the nodes of a level, `[B, C]`, and by what they decide."""

    torch: Tensor
    onnx: Tensor
    kernel: Tensor
    bar: float

    def __iter__(self) -> Any:
        return iter((self.torch, self.onnx, self.kernel))


def scores_of(scorer: FfnScorer, beta: float, pool: DraftPool, device: torch.device) -> Scores:
    shape = ScoredTree(scorer=scorer, beta=beta, depth=3, first_top_k=4, second_top_k=4)
    rule, asking = rules(shape, device)
    there = pool.each(lambda one: one.to(device))
    kernel = torch.full_like(there.joint_logp, math.nan)
    prune_level(buffer_of(shape, device), there, kernel, None, start=1, depth=1, width=4)
    drafted = there
    found = (rule.score(drafted, 1), asking.score(drafted, 1), kernel[:, 1:])
    return Scores(*(scores.cpu() for scores in found), rule.min_score)


def wide_network(hidden: int) -> FfnScorer:
    """Reads probabilities, log-probabilities, entropies and ranks."""
    draw = np.random.default_rng(hidden)
    return FfnScorer(
        features=("joint_prob", "joint_logp", "parent_entropy", "parent_topk_entropy"),
        mean=(0.5, -2.0, 1.0, 1.0),
        scale=(0.3, 1.5, 0.8, 0.8),
        w1=tuple(map(tuple, draw.normal(size=(hidden, 4)).tolist())),
        b1=tuple(draw.normal(size=hidden).tolist()),
        w2=tuple((draw.normal(size=hidden) / math.sqrt(hidden)).tolist()),
        b2=(float(draw.normal()),),
    )


def node_rows(seed: int) -> DraftPool:
    """A level whose columns all hold odd numbers, in rows of their own; none is positive nats."""
    joint = edge_rows(torch.tensor([-1.0, -2.0]), seed, ROWS * SIZE).clamp(max=0.0)
    joint = joint.nan_to_num(-0.5, neginf=-math.inf)
    pool = level_pool(joint.where(joint == -math.inf, joint.clamp(min=-1e4)).view(ROWS, SIZE), seed)
    odd = torch.tensor([0.0, 1e-45, 1e-38, 1e30, -1e30, 3.4e38, math.inf, math.nan])
    pool.entropy[: len(odd), 1] = odd
    pool.topk_entropy[: len(odd), 2] = odd
    return pool


@pytest.mark.parametrize("hidden", [2, 16, 48, 64])
def test_networks(hidden: int, device: torch.device) -> None:
    """Equal decisions wherever the score is further from the bar than float32 may compute it.

    By the worst case 2 to 37 rows of 100,352 are nearer; a typical error is far smaller, and on the
    machine of docs/LOG.md those rows were decided alike too.
    """
    scorer, pool = wide_network(hidden), node_rows(hidden)
    exact, error, overflows = exact_scores(scorer, pool)
    middle = float(exact.nanmedian().exp())
    scores = scores_of(scorer, round(middle, 3), pool, device)
    empty, plain = pool.joint_logp[:, 1:] == -math.inf, ~(overflows | exact.isnan())
    for found in scores:
        assert bool((found[empty] == -math.inf).all())
        assert bool(found[exact.isnan() & ~empty].isnan().all())
        assert bool(((found.double() - exact).abs() <= error)[plain & ~empty].all())
    assert int((overflows & ~exact.isnan()).sum()) <= 4
    border = plain & ((exact - scores.bar).abs() <= error)
    keeps = [found >= scores.bar for found in scores]
    assert 0.05 < float(keeps[0].float().mean()) < 0.95
    assert int(border.sum()) < 1e-3 * border.numel()
    for kept in keeps[1:]:
        assert torch.equal(kept[plain & ~border], keeps[0][plain & ~border])


def exact_scores(scorer: FfnScorer, pool: DraftPool) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, C]` scores in float64, how far float32 may be from them, and where it overflows.

    A sum of n float32 products in any order is off by n + 1 roundings of the sum of their sizes
    at most (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, to first order;
    the factor 1.01 covers the rest). The sigmoid's logarithm adds a few units in the last place.
    """
    joint = pool.joint_logp[:, 1:]
    columns = (joint.exp(), joint, pool.entropy[:, 1:], pool.topk_entropy[:, 1:])
    x = torch.stack(columns, -1).double()
    w1, b1 = (torch.from_numpy(part).double() for part in folded_layer(scorer))
    w2 = torch.tensor(scorer.w2, dtype=torch.float64)
    size = x.abs() @ w1.abs() + b1.abs()
    before, off = x @ w1 + b1, 1.01 * (len(w1) + 1) * ROUNDING * size
    hidden, off = before.relu(), off.where(before > -off, 0.0)  # far below zero a unit is silent
    whole = (hidden + off) @ w2.abs() + abs(scorer.b2[0])
    score = logsigmoid(hidden @ w2 + scorer.b2[0])
    error = off @ w2.abs() + 1.01 * (len(w2) + 1) * ROUNDING * whole + 8 * ROUNDING * score.abs()
    overflows = torch.maximum(size.amax(-1), size @ w2.abs()) > float(np.finfo(np.float32).max)
    return score, error, overflows


def test_the_border_of_the_sigmoid(device: torch.device) -> None:
    """Log-odds of exactly 0 against beta 0.5 are kept; others stand in steps of 1/16 around.

    Weights and features are small multiples of 1/4, so no backend rounds before the sigmoid.
    """
    scorer = FfnScorer(
        features=("sibling_rank", "joint_logp"),
        mean=(0.0, 0.0),
        scale=(1.0, 1.0),
        w1=((0.25, 0.0), (0.0, -0.5), (0.25, 0.25)),
        b1=(0.0, 0.0, -4.0),
        w2=(1.0, -0.5, 0.25),
        b2=(0.0,),
    )
    draw = torch.Generator().manual_seed(0)
    joint = -torch.randint(0, 64, (ROWS, SIZE), generator=draw) / 4
    scores = scores_of(scorer, 0.5, level_pool(joint, 0), device)
    assert torch.equal(scores.torch, scores.onnx)
    on_it = scores.torch == float(np.float32(math.log(0.5)))
    assert int(on_it.sum()) > 500
    for found in scores:
        assert bool((found >= scores.bar)[on_it].all())
        assert torch.equal(found >= scores.bar, scores.torch >= scores.bar)
