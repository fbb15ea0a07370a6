"""The policies that are timed, with parameters made by hand for the drafter of `pair`.

They are of fitted ones' size and close, prune and spread about as fitted ones do on a trained head;
what they decide is worth nothing.
"""

from __future__ import annotations

import numpy as np

from specctl.policy import (
    Chain,
    ElasticBudget,
    EntropyBins,
    FfnScorer,
    PerRequest,
    Policy,
    RootOnly,
    ScoredTree,
    SparseGates,
    StaticTree,
)

EAGLE2 = StaticTree(depth=8, top_k=10, num_tokens=60)
EDGES = (7.0, 9.5, 10.5, 11.5, 12.5, 13.3, 14.0)
"""Of eight bins of Φ, nats: about its octiles with the head of `pair`."""
HIDDEN = 48
FEATURES = ("joint_logp", "parent_entropy", "depth")
BUDGET_TOKENS = 16
"""Nodes of a request that ECHO's budget holds, beyond one request."""


def policies(batch_size: int) -> dict[str, Policy]:
    """By name; ECHO shares a budget where there is somebody to share it with."""
    gates = SparseGates(
        depth=8, width=3, max_width=10, gate_levels=(1, 4, 6), thresholds=(0.3, 0.05, 0.02)
    )
    budget = (
        ElasticBudget(max_tokens=BUDGET_TOKENS * batch_size) if batch_size > 1 else PerRequest()
    )
    tree = ScoredTree(scorer=network(), beta=0.5, depth=8, num_tokens=60)
    return {
        "ar": Policy(shape=RootOnly()),
        "chain 4": Policy(shape=Chain(num_draft_tokens=4)),
        "eagle2 8-10-60": Policy(shape=EAGLE2),
        "hetero, 8 bins": Policy(shape=EntropyBins(base=EAGLE2, edges=EDGES)),
        f"c2t, FFN of {HIDDEN}": Policy(shape=tree),
        "echo, 3 gates": Policy(shape=gates, budget=budget),
    }


def network(bias: float = -9.0) -> FfnScorer:
    """Hidden units whose sum follows the drafter's joint log-probability.

    By itself it says yes to what the drafter gives at least two percent, by and large.
    """
    draws = np.random.default_rng(0)
    w1 = np.concatenate([np.ones((HIDDEN, 1)), 0.01 * draws.normal(size=(HIDDEN, 2))], 1)
    return FfnScorer(
        features=FEATURES,
        mean=(-10.0, 2.0, 3.0),
        scale=(1.0, 1.0, 1.0),
        w1=tuple(map(tuple, w1.tolist())),
        b1=(0.0,) * HIDDEN,
        w2=(1.5 / HIDDEN,) * HIDDEN,
        b2=(bias,),
    )
