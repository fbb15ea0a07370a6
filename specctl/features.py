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
from functools import cached_property

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.suffix import (
    MAX_COUNT,
    RECENT_TOKENS,
    SUFFIX_TOKENS,
    SuffixMatch,
    suffix_match,
)
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
        recent: `[B, RECENT_TOKENS]` int64, the end of the text that was emitted, the root last,
            `NO_TEXT` before it begins; None unless the shape asks for it.
    """

    tree: TokenTree
    joint_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    sibling_rank: Tensor
    expanded: Tensor
    recent: Tensor | None = None


NODE_TENSORS = ("joint_logp", "entropy", "topk_entropy", "sibling_rank", "expanded")
"""Fields of a `DraftPool` that hold a value a node, besides the tree."""


@dataclass(frozen=True)
class NodeView:
    """The nodes of a pool from index `start` on, as features read them: C of them a row."""

    pool: DraftPool
    start: int

    def of(self, values: Tensor) -> Tensor:
        """`[B, C]` of `[B, P]`."""
        return values[:, self.start :]

    @cached_property
    def suffix(self) -> SuffixMatch:
        """How each path goes on from the recent text."""
        if self.pool.recent is None:
            raise UsageError(
                "features of the text",
                expected="rounds that carry the recent text",
                found="rounds without it",
                fix="collect dense traces, or leave these features out",
            )
        tree = self.pool.tree
        return suffix_match(tree.token_ids, tree.parent, self.pool.recent, self.start)


@dataclass(frozen=True)
class Feature:
    """One named column.

    Attributes:
        compute: `[B, C]` of a view.
        reads_text: it compares tokens with the recent text.
        version: raised when its meaning changes under the same name.
    """

    name: str
    unit: str
    meaning: str
    compute: Callable[[NodeView], Tensor]
    dtype: str = "float32"
    reads_text: bool = False
    version: int = 1


_DRAFT = (
    Feature(
        "joint_prob",
        "probability",
        "product of path probabilities",
        lambda v: v.of(v.pool.joint_logp).exp(),
    ),
    Feature("joint_logp", "nats", "log of joint_prob", lambda v: v.of(v.pool.joint_logp)),
    Feature(
        "draft_logp",
        "nats",
        "log-probability given the parent",
        lambda v: v.of(v.pool.tree.draft_logp),
    ),
    Feature(
        "parent_entropy",
        "nats",
        "entropy of the parent's distribution",
        lambda v: v.of(v.pool.entropy),
    ),
    Feature(
        "parent_topk_entropy",
        "nats",
        "the same over renormalised top-K",
        lambda v: v.of(v.pool.topk_entropy),
    ),
    Feature("depth", "levels", "edges from the root", lambda v: v.of(v.pool.tree.depth)),
    Feature(
        "sibling_rank", "rank", "0 for the likeliest sibling", lambda v: v.of(v.pool.sibling_rank)
    ),
)
_TEXT = (
    Feature(
        "suffix_length",
        "tokens",
        "longest suffix of text and path, this node its last token, found in the recent text",
        lambda v: v.suffix.length,
        reads_text=True,
    ),
    Feature(
        "suffix_offered",
        "tokens",
        "the same of the parent, where some token follows",
        lambda v: v.suffix.offered,
        reads_text=True,
    ),
    Feature(
        "suffix_support",
        "share",
        "of the parent's longest matches, those that this token follows; -1 without any",
        lambda v: v.suffix.support,
        reads_text=True,
    ),
    Feature(
        "suffix_count",
        "matches",
        "places of the recent text where the parent's token and this one stand, at most 4",
        lambda v: v.suffix.repeats,
        reads_text=True,
    ),
)

NODE_FEATURES = {feature.name: feature for feature in (*_DRAFT, *_TEXT)}
"""Features of a node, by name."""

ROUND_FEATURES = {"phi": ("nats", "cumulative meta-path top-K entropy, HeteroSpec Eq. 1")}
"""Features of a round: name to (unit, meaning); computed by the function of the same name."""


def node_features(pool: DraftPool, names: Sequence[str], start: int = 0) -> Tensor:
    """The named features of every node from pool index `start` on.

    Returns:
        `[B, P - start, F]` float32, F in the order of `names`.

    Raises:
        UsageError: a name that is not registered.
    """
    features, view = _registered(names), NodeView(pool, start)
    return torch.stack([feature.compute(view).float() for feature in features], -1)


def check_registered(names: Sequence[str]) -> None:
    """Refuses names that `node_features` does not know (UsageError)."""
    _registered(names)


def needs_text(names: Sequence[str]) -> bool:
    """Whether one of these features compares tokens with the recent text."""
    return any(feature.reads_text for feature in _registered(names))


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
    window = [RECENT_TOKENS, SUFFIX_TOKENS, MAX_COUNT] if feature.reads_text else []
    return [name, "node", feature.unit, feature.meaning, feature.dtype, feature.version, *window]


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
