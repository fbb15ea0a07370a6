"""C2T: a classifier prunes while the tree grows (arXiv:2502.13652, section 4.2).

Scores are natural logs of acceptance probabilities, so that conditionals multiply by addition and
the surest nodes, whose float32 probabilities are all 1.0, keep their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast

from pydantic import model_validator

from specctl.errors import UsageError
from specctl.features import check_registered, needs_text, node_features
from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import (
    MAX_TOKENS,
    Depth,
    NumTokens,
    Shape,
    ShapeFamily,
    TopK,
    grid,
    prunes,
)
from specctl.policy.pruning import PrunedPlan, PrunedShape, Score, best_scores, lowest_logp
from specctl.policy.rules import Plan
from specctl.policy.scorers import (
    AcceptanceTable,
    LogOdds,
    Scorer,
    build_log_odds,
    highest_log_odds,
    table_log_odds,
)
from specctl.records import Probability, require
from specctl.tree import DraftPool


class ScoredTree(Shape):
    """A tree that a classifier prunes while it grows: C2T (arXiv:2502.13652) and its variants.

    With `first_top_k` and `second_top_k` of 1 it is a chain that stops at its first node below beta
    (section 5.5); a wider first Top-K makes the chain follow the best scored child.
    """

    kind: Literal["c2t"] = "c2t"
    scorer: Scorer  # predicts acceptance of nodes
    predicts: Literal["joint", "conditional"] = "joint"
    """The joint acceptance of the paper, or the conditional one, multiplied along the path."""
    beta: Probability  # a node below this probability is neither expanded nor submitted
    depth: Depth = 11  # drafted levels at most (the paper: 11)
    first_top_k: TopK = 10  # children of an expanded node that are scored, likeliest first
    second_top_k: TopK = 10  # nodes kept per level, best score first
    keep_leaves: bool = True
    """Submit all nodes that reach beta, also those outside the second Top-K; the paper's false
    drops the latter (section 4.2.2)."""
    num_tokens: NumTokens | None = None
    """Cap on submitted nodes, root counted; none as in the paper."""
    min_level_prob: Probability = 0.0
    """Drafting stops if the nodes to expand are together less likely, see `JointThreshold`."""

    @property
    def reads(self) -> tuple[str, ...]:
        return self.scorer.features

    @property
    def combine(self) -> Literal["add", "min", "none"]:
        """The operation that joins a node's score with its parent's. Joint scores are limited to
        the parent's, so that a capped selection is a tree and one pass of a log is exact for every
        beta; the paper's rule, without a cap, leaves them."""
        if self.predicts == "conditional":
            return "add"
        return "min" if self.keep_leaves or self.num_tokens is not None else "none"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(
            self.num_tokens is not None or self.most_tokens <= MAX_TOKENS,
            f"may submit {self.most_tokens} nodes, more than {MAX_TOKENS}: give num_tokens",
        )
        return self

    @property
    def most_tokens(self) -> int:
        """Nodes that a round can submit without the cap, root counted."""
        total, scored = 1, self.first_top_k
        for _ in range(self.depth):
            kept = min(self.second_top_k, scored)
            total += scored if self.keep_leaves else kept
            scored = kept * self.first_top_k
        return total


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


def scored_shape(record: ScoredTree, device: Device) -> ScoredShape:
    """The rule of a fitted record, its scorer's tables on the device."""
    highest = torch.tensor(highest_log_odds(record.scorer))
    if float(torch.nn.functional.logsigmoid(highest)) < lowest_logp(record.beta):
        raise nothing_kept(record.beta, f"{float(highest.sigmoid()):.6g} as the highest possible")
    most = min(record.num_tokens or record.most_tokens, record.most_tokens)
    return ScoredShape(
        *(record.depth, record.first_top_k, record.second_top_k, most),
        device,
        score=log_prob(record.scorer, device),
        min_score=lowest_logp(record.beta),
        combine={"add": torch.add, "min": torch.minimum, "none": None}[record.combine],
        root_score=0.0,
        min_level_prob=record.min_level_prob,
        keep_leaves=record.keep_leaves,
        needs_text=needs_text(record.scorer.features),
    )


def log_prob(scorer: Scorer, device: Device) -> Score:
    """The score of a scorer: log-probabilities of acceptance, -inf in empty slots."""
    if isinstance(scorer, AcceptanceTable):
        return table_score(scorer, device)
    return score_by(scorer.features, build_log_odds(scorer, device))


def table_score(scorer: AcceptanceTable, device: Device) -> Score:
    """The score of a table, which looks cells up without stacking its two features."""
    table = table_log_odds(scorer, device)
    logp = torch.nn.functional.logsigmoid(table.log_odds)

    def score(pool: DraftPool, start: int) -> Tensor:
        assert pool.copied is not None, "the rule says that it needs the text"
        cells = table.cells(pool.draft_logp[:, start:], pool.copied[:, start:])
        joint = pool.joint_logp[:, start:]  # -inf in empty slots; NaN stays for the round's check
        return torch.where(joint > -math.inf, logp[cells], joint)

    return score


def score_by(names: Sequence[str], log_odds: LogOdds) -> Score:
    """The score of a function from features to log-odds."""
    check_registered(names)

    def score(pool: DraftPool, start: int) -> Tensor:
        features = node_features(pool, names, start)
        odds = log_odds(features.flatten(0, 1)).view(features.shape[:2])
        scores = torch.nn.functional.logsigmoid(odds)
        return scores.masked_fill_(pool.joint_logp[:, start:] == -math.inf, -math.inf)

    return score


def nothing_kept(beta: float, found: str) -> UsageError:
    """The error for a beta that keeps no node."""
    return UsageError(
        f"beta {beta:g} is reached by no node: {found}",
        hint="lower beta, or fit it from these traces",
    )


C2T = ShapeFamily(
    record=ScoredTree,
    rule=scored_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=True,
    is_ranked=lambda record: record.first_top_k == 1,
    kernel="pruned",
    withholds=prunes,
    fitted_grid=grid(
        beta="0.01 0.03 0.06 0.1 0.2 0.4", depth="4 8", min_level_prob="0 0.4 0.6 0.8"
    ),
    shared_fitted_grid=grid(beta="0.01 0.05 0.2", depth="4"),
    chain=lambda record: record.model_copy(update={"first_top_k": 1, "second_top_k": 1}),
)
