"""C2T: a classifier prunes while the tree grows (arXiv:2502.13652, section 4.2).

Scores are natural logs of acceptance probabilities: conditionals then multiply by adding, and
the surest nodes, all 1.0 as float32 probabilities, keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from specctl.errors import UsageError
from specctl.features import DraftPool, check_registered, needs_text, node_features
from specctl.policy.pruning import (
    Combine,
    PrunedPlan,
    PrunedShape,
    Score,
    best_scores,
)
from specctl.policy.records import ScoredTree
from specctl.policy.rules import Plan
from specctl.policy.scorers import Scorer
from specctl.policy.scoring import LogOdds, build_log_odds, highest_log_odds
from specctl.policy.threshold import lowest_logp


@dataclass(kw_only=True)
class ScoredShape(PrunedShape):
    """Pruned by a classifier's score and, with `keep_leaves` false, by place in the level."""

    keep_leaves: bool = True

    def level_scores(self, of_parent: Tensor, pool: DraftPool, start: int) -> Tensor:
        scores = super().level_scores(of_parent, pool, start)
        if self.keep_leaves:
            return scores
        best, beam = best_scores(scores, self.width)
        return torch.full_like(scores, float("-inf")).scatter_(1, beam, best)

    def unsound(self, plan: Plan) -> Tensor | None:
        return cast(PrunedPlan, plan).scores.isnan().any(1)


def scored_shape(record: ScoredTree, device: torch.device) -> ScoredShape:
    """The rule of a fitted record, its scorer's tables on the device.

    Raises:
        UsageError: features that are not registered, or a beta that no node can reach.
    """
    _check_reachable(record)
    return ScoredShape(
        max_depth=record.depth,
        top_k=record.first_top_k,
        width=record.second_top_k,
        max_tokens=min(record.num_tokens or record.most_tokens, record.most_tokens),
        device=device,
        score=log_prob(record.scorer, device),
        min_score=lowest_logp(record.beta),
        combine=combination(record),
        root_score=0.0,
        keep_leaves=record.keep_leaves,
        needs_text=needs_text(record.scorer.features),
    )


def combination(record: ScoredTree) -> Combine | None:
    """How a node's log-probability joins its parent's: no better than any ancestor's, say."""
    if record.predicts == "conditional":
        return torch.add
    return torch.minimum if record.running_min else None


def log_prob(scorer: Scorer, device: torch.device) -> Score:
    """Log-probabilities of acceptance that a scorer gives the nodes of a pool; -inf if empty."""
    return score_by(scorer.features, build_log_odds(scorer, device))


def score_by(names: Sequence[str], log_odds: LogOdds) -> Score:
    """The same of whatever computes the log-odds of these features."""
    check_registered(names)

    def score(pool: DraftPool, start: int) -> Tensor:
        features = node_features(pool, names, start)
        scores = logsigmoid(log_odds(features.flatten(0, 1))).view(features.shape[:2])
        return scores.masked_fill_(pool.joint_logp[:, start:] == -math.inf, -math.inf)

    return score


def _check_reachable(record: ScoredTree) -> None:
    """Refuses a beta above all that the scorer can say, as far as its arrays tell."""
    highest = torch.tensor(highest_log_odds(record.scorer))
    if float(logsigmoid(highest)) < lowest_logp(record.beta):
        raise nothing_kept(record.beta, f"{float(highest.sigmoid()):.6g} as the highest possible")


def nothing_kept(beta: float, found: str) -> UsageError:
    """The refusal of a beta that keeps nothing: such a policy only drafts in vain."""
    return UsageError(
        f"beta {beta:g}",
        expected="a threshold that some node reaches",
        found=found,
        fix="lower beta, or fit it from these traces",
    )
