"""Rows to fit a node scorer to: features and labels of logged nodes (`node_sample` takes them).

    log ─grow─► batches of trees ─features, labels─► positives, sampled negatives ─► NodeRows

**Which nodes.** Those that a run would score if it ranked by joint probability: `first_top_k`
children of every node that was expanded, the `second_top_k` likeliest of each level expanded. A
fitted scorer ranks otherwise, so its own frontier differs a little (the log's support decides
how much of it is known); drafting again with the fitted scorer is not done.

**Labels.** Joint: the whole path to the node was accepted, where the log tells (null is not
false). Conditional: the node was accepted, among children of accepted nodes.

**Negatives.** All positives stay, and of the negatives a uniform share r. That multiplies the
odds by 1/r, so a model fitted to these rows says logit + log(1/r), and the true logit is its own
plus log r (below 0): `NodeRows.log_kept`. A threshold found without that correction, as the
paper's, is not comparable with ours: beta' = beta r / (1 - beta + beta r).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from specctl.errors import UsageError
from specctl.features import NODE_FEATURES, DraftPool, needs_text
from specctl.policy.base import Depth, TopK
from specctl.policy.records import Record
from specctl.policy.rules import BaseShape, ShapeRule

Singles = NDArray[np.float32]
Bools = NDArray[np.bool_]
Codes = NDArray[np.int32]


class NodeBatch(Protocol):
    """What a shape drafts at B positions; `replay.logged_nodes.NodeBatch` is one."""

    @property
    def pool(self) -> DraftPool: ...
    @property
    def scores(self) -> Tensor | None: ...
    @property
    def accepted(self) -> Tensor: ...
    @property
    def known(self) -> Tensor: ...
    @property
    def labelled(self) -> Tensor: ...
    @property
    def longest(self) -> Tensor: ...
    @property
    def num_missing(self) -> Tensor: ...
    @property
    def prompt_id(self) -> Any: ...
    @property
    def category(self) -> Any: ...


class Support(Protocol):
    """How far a log goes: children of an expanded node, nodes expanded per level, levels."""

    @property
    def top_k(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def depth(self) -> int: ...


class NodeSource(Protocol):
    """Logged nodes, as often as they are asked for; `replay.logged_nodes.LoggedNodes` is one."""

    @property
    def support(self) -> Support: ...

    def batches(
        self, rule: ShapeRule, prompt_ids: Iterable[str] | None = None
    ) -> Iterator[Any]: ...


DEFAULT_FEATURES = {
    "joint": ("joint_prob", "parent_entropy", "depth"),
    "conditional": ("draft_logp", "parent_entropy", "depth"),
}
"""By label: the paper's three; and, for acceptance given the parent's, the token's own probability
in the place of the path's, which cannot tell siblings far from the root apart."""


class NodeConfig(Record):
    """Which nodes to take, and what of them.

    Attributes:
        features: registry names, in the order that the scorer reads.
        predicts: acceptance of the whole path, or of the node given its parent's.
        depth: levels. first_top_k: children of an expanded node. second_top_k: nodes expanded
            per level.
        negatives: per positive; 0 keeps all.
        max_rows: rows held in memory at most.
        seed: of the sample.
    """

    features: tuple[str, ...] = Field(default=DEFAULT_FEATURES["conditional"], min_length=1)
    predicts: Literal["joint", "conditional"] = "conditional"
    depth: Depth = 11
    first_top_k: TopK = 10
    second_top_k: TopK = 10
    negatives: Annotated[float, Field(ge=0.0, le=1e6)] = 10.0
    max_rows: Annotated[int, Field(ge=1000)] = 10_000_000
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


@dataclass(frozen=True)
class NodeRows:
    """M nodes, in the order of the log.

    Attributes:
        features: `[M, F]` float32. accepted: `[M]` bool, by the configured label.
        depth: `[M]` int32. prompt, category: `[M]` int32 codes into the names.
        num_positives, num_negatives: in the log, before sampling.
        num_unknown: nodes that were left out because the log does not tell.
        kept_frac: r, share of the negatives that was kept.
    """

    features: Singles
    accepted: Bools
    depth: Codes
    prompt: Codes
    category: Codes
    prompt_ids: tuple[str, ...]
    categories: tuple[str, ...]
    num_positives: int
    num_negatives: int
    num_unknown: int
    kept_frac: float

    @property
    def log_kept(self) -> float:
        """log r, to be added to the logit of a model that was fitted to these rows."""
        return math.log(self.kept_frac)

    def take(self, chosen: Bools | NDArray[np.int64]) -> NodeRows:
        """Some rows; what was left out and the share kept stay those of the whole."""
        names = ("features", "accepted", "depth", "prompt", "category")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def with_features(self, features: Singles) -> NodeRows:
        """The same nodes with other columns, `[M, F]` float32."""
        return replace(self, features=features)


def frontier_rule(config: NodeConfig) -> BaseShape:
    """Expands by joint probability and submits nothing but the root, since nobody looks."""
    return BaseShape(
        config.depth,
        config.first_top_k,
        config.second_top_k,
        max_tokens=1,
        needs_text=needs_text(config.features),
    )


def check_features(names: tuple[str, ...]) -> None:
    """Refuses names that the registry lacks, and repeated ones."""
    unknown = [name for name in names if name not in NODE_FEATURES]
    if unknown or len(set(names)) < len(names):
        raise UsageError(
            "--features",
            expected=f"different names among {', '.join(sorted(NODE_FEATURES))}",
            found=", ".join(unknown or names),
            fix="correct it",
        )
