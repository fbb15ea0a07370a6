"""Shapes that the kernels decide by, whose trees differ in size between rounds."""

from __future__ import annotations

from specctl.policy import (
    EntropyBins,
    FfnScorer,
    JointThreshold,
    ScoredTree,
    Shape,
    SparseGates,
    StaticTree,
)
from tests.kernels.drawn import BASE
from tests.policy.scorers import SCORED, random_network

RISING = FfnScorer(
    features=("draft_logp", "depth"),
    mean=(-1.0, 0.0),
    scale=(1.0, 1.0),
    w1=((1.0, 1.0), (-1.0, -1.0)),
    b1=(0.0, 0.0),
    w2=(1.0, -1.0),
    b2=(-2.0,),
)
"""Scores that grow with depth, so that what a path has lost counts only where it is carried on."""
SHAPES: dict[str, Shape] = {
    "eagle2": StaticTree(depth=4, top_k=4, num_tokens=20),
    "hetero": EntropyBins(base=BASE, edges=(3.0, 4.0), gammas=(0.5, 1.5), alpha=2),
    "hetero conditional": EntropyBins(
        base=BASE, edges=(2.5, 3.5), gammas=(0.6, 1.0), alpha=2, path="conditional"
    ),
    "echo": SparseGates(
        depth=5, width=3, max_width=6, gate_levels=(1, 2, 4), thresholds=(0.4, 0.3, 0.05),
        num_tokens=22,
    ),
    "threshold": JointThreshold(depth=4, top_k=5, min_prob=0.1, num_tokens=24),
    "threshold uncapped": JointThreshold(depth=3, top_k=3, min_prob=0.05),
    **{name: shape for name, shape in SCORED.items() if shape.scorer.kind == "ffn"},
    "c2t capped": SCORED["c2t joint"].model_copy(update={"num_tokens": 57}),
    "c2t rising": ScoredTree(
        scorer=RISING, beta=0.2, depth=4, first_top_k=4, second_top_k=3, num_tokens=36
    ),
    "c2t conditional": ScoredTree(
        scorer=random_network(7), predicts="conditional", beta=0.7, depth=4, first_top_k=4,
        second_top_k=3, num_tokens=30,
    ),
}  # fmt: skip
