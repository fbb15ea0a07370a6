"""What a policy may look at: one registry of named features, one function that computes them.

The same code serves fit, replay and runtime; `features_digest` of the names that a policy uses
is written into its artifact and the runtime refuses any other. All features are *predictable*:
they come from the drafter's distributions and from committed text, never from the coins that
verification will throw (notes/reliability.md, finding 1), so a policy built on them is lossless.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.tree import TokenTree, gather, path_sum

ENTROPY_TOP_K = 10
"""K of the renormalised top-K entropy (HeteroSpec, Eq. 1). Thresholds do not carry over to
another K, therefore K is part of every digest."""


@dataclass(frozen=True)
class DraftPool:
    """Every node that a round drafted, and what the drafter said of it.

    Level order, root at index 0; `expanded` marks nodes whose children were drafted.

    Attributes:
        tree: the nodes, `[B, P]`.
        joint_logp: `[B, P]` float32, nats; -inf in empty slots.
        entropy: `[B, P]` float32, nats: full-vocabulary entropy of the *parent's* distribution,
            the one that the node was drawn from; 0 at the root.
        topk_entropy: `[B, P]` float32, nats: the same over the `ENTROPY_TOP_K` likeliest tokens,
            renormalised.
        sibling_rank: `[B, P]` int64: 0 for the likeliest child of its parent.
        expanded: `[B, P]` bool.
    """

    tree: TokenTree
    joint_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    sibling_rank: Tensor
    expanded: Tensor


@dataclass(frozen=True)
class Feature:
    """One named column. `version` is raised when its meaning changes under the same name."""

    name: str
    unit: str
    meaning: str
    compute: Callable[[DraftPool], Tensor]
    dtype: str = "float32"
    version: int = 1


NODE_FEATURES = {
    feature.name: feature
    for feature in (
        Feature(
            "joint_prob",
            "probability",
            "product of path probabilities",
            lambda p: p.joint_logp.exp(),
        ),
        Feature("joint_logp", "nats", "log of joint_prob", lambda p: p.joint_logp),
        Feature(
            "draft_logp", "nats", "log-probability given the parent", lambda p: p.tree.draft_logp
        ),
        Feature(
            "parent_entropy", "nats", "entropy of the parent's distribution", lambda p: p.entropy
        ),
        Feature(
            "parent_topk_entropy",
            "nats",
            "the same over renormalised top-K",
            lambda p: p.topk_entropy,
        ),
        Feature("depth", "levels", "edges from the root", lambda p: p.tree.depth),
        Feature("sibling_rank", "rank", "0 for the likeliest sibling", lambda p: p.sibling_rank),
    )
}
"""Features of a node, by name."""

ROUND_FEATURES = {"phi": ("nats", "cumulative meta-path top-K entropy, HeteroSpec Eq. 1")}
"""Features of a round: name to (unit, meaning); computed by the function of the same name."""


def node_features(pool: DraftPool, names: Sequence[str]) -> Tensor:
    """The named features of every node.

    Returns:
        `[B, P, F]` float32, F in the order of `names`.

    Raises:
        UsageError: a name that is not registered.
    """
    columns = [feature.compute(pool).float() for feature in _registered(names)]
    return torch.stack(columns, -1)


def meta_path(pool: DraftPool, *, conditional: bool = False) -> Tensor:
    """The node where the meta path P* ends: the best node of the deepest level drafted.

    HeteroSpec writes "highest final-token confidence"; the settled reading is the highest
    cumulative score, what EAGLE ranks by (notes/state-of-the-art.md, section 6).

    Args:
        conditional: rank by the final token's own probability instead.

    Returns:
        `[B]` int64, index into the pool.
    """
    score = pool.tree.draft_logp if conditional else pool.joint_logp
    deepest = pool.tree.depth.masked_fill(~pool.tree.valid, -1)
    last_level = deepest == deepest.max(1, keepdim=True).values
    return score.masked_fill(~last_level, float("-inf")).argmax(1)


def phi(pool: DraftPool, *, conditional: bool = False) -> Tensor:
    """Cumulative meta-path top-K entropy (HeteroSpec, Eq. 1): entropies summed along P*.

    The root's distribution is included, the one below the last token is not: T drafted tokens,
    T entropies. It grows with depth, so it is only comparable between trees of equal depth.

    Returns:
        `[B]` float32, nats.
    """
    depth = int(pool.tree.depth.max())
    totals = path_sum(pool.topk_entropy, pool.tree.parent, depth)
    return gather(totals, meta_path(pool, conditional=conditional)[:, None], 0.0)[:, 0]


def features_digest(names: Sequence[str]) -> str:
    """Identity of an ordered choice of features: names, units, dtypes, meanings, versions, K.

    Returns:
        `sha256:<hex>`.
    """
    described = [_describe(name) for name in names]
    text = json.dumps({"features": described, "entropy_top_k": ENTROPY_TOP_K}, sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _describe(name: str) -> list[str | int]:
    if name in ROUND_FEATURES:
        unit, meaning = ROUND_FEATURES[name]
        return [name, "round", unit, meaning, "float32", 1]
    [feature] = _registered([name])
    return [name, "node", feature.unit, feature.meaning, feature.dtype, feature.version]


def _registered(names: Sequence[str]) -> list[Feature]:
    unknown = [name for name in names if name not in NODE_FEATURES]
    if unknown:
        raise UsageError(
            "features",
            expected=f"names among {sorted([*NODE_FEATURES, *ROUND_FEATURES])}",
            found=repr(unknown),
            fix="fit the policy again with this version of specctl",
        )
    return [NODE_FEATURES[name] for name in names]
