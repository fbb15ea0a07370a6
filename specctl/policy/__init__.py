"""Policies: compositions of three independent parts, each a frozen record of parameters.

- **shape**: growth of a draft tree, and choice of the nodes submitted to the target;
- **budget**: sharing of verification in a batch;
- **acceptance**: draft tokens that the target's logits admit.

A family is one file: its record, its rule, its words on the command line and the values that tuning
searches. `families` is their table and turns records into rules; `rules` is the contract of rules
(tensors in, tensors out, batch first). Fit, replay and runtime all decide by the same rule.
"""

from specctl.policy.adasd import EntropyStop, JensenShannon
from specctl.policy.budgets import (
    Calibration,
    MarginalBudget,
    PerRequest,
    StepCost,
    SurvivalBudget,
    check_costs,
)
from specctl.policy.c2t import ScoredTree
from specctl.policy.echo import ElasticBudget, SparseGates
from specctl.policy.families import (
    Acceptance,
    Budget,
    Policy,
    Shape,
    StepCosts,
    as_chain,
    build_acceptance,
    build_budget,
    build_shape,
    parse_policy,
    policy_digest,
    policy_json,
    with_costs,
)
from specctl.policy.hetero import EntropyBins
from specctl.policy.mars import Mars
from specctl.policy.own import OwnShape
from specctl.policy.pruning import JointThreshold
from specctl.policy.ratio import Ratio
from specctl.policy.rules import ShapeRule
from specctl.policy.scorers import AcceptanceTable, FfnScorer, Scorer
from specctl.policy.static import (
    Chain,
    ChainSchedule,
    FullTree,
    RootOnly,
    StaticTree,
    at_batch_size,
)
from specctl.policy.stops import DynamicDepth, OptTree, SignalStop, TopProbability
from specctl.policy.verification import Strict

__all__ = [
    "Acceptance",
    "AcceptanceTable",
    "Budget",
    "Calibration",
    "Chain",
    "ChainSchedule",
    "DynamicDepth",
    "ElasticBudget",
    "EntropyBins",
    "EntropyStop",
    "FfnScorer",
    "FullTree",
    "JensenShannon",
    "JointThreshold",
    "MarginalBudget",
    "Mars",
    "OptTree",
    "OwnShape",
    "PerRequest",
    "Policy",
    "Ratio",
    "RootOnly",
    "ScoredTree",
    "Scorer",
    "Shape",
    "ShapeRule",
    "SignalStop",
    "SparseGates",
    "StaticTree",
    "StepCost",
    "StepCosts",
    "Strict",
    "SurvivalBudget",
    "TopProbability",
    "as_chain",
    "at_batch_size",
    "build_acceptance",
    "build_budget",
    "build_shape",
    "check_costs",
    "parse_policy",
    "policy_digest",
    "policy_json",
    "with_costs",
]
