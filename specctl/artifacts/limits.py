"""What a policy may cost before it is built (E_COST).

A record can obey its own laws and still ask for gigabytes: tables grow with the product of what
each law bounds alone. Everything here is arithmetic on the record; nothing is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specctl.errors import ArtifactError
from specctl.policy.records import FullTree, Policy, ScoredTree, Scorer, TreesScorer

MAX_FEATURES = 32
MAX_TREES = 4096
"""Fits make 1000 at most. A block of 256 nodes keeps some numbers for each tree: 40 MiB of them."""
MAX_TABLE_BYTES = 64 << 20
"""Of the look-up tables of boosted trees: every threshold of every tree, 8 bytes each."""
MAX_SLOTS = 1 << 18
"""Nodes that a round may draft: what 64 levels of 64 expanded nodes with 64 children need."""


def check_num_features(names: Sequence[str]) -> None:
    """Refuses more features than any policy may read, before each is looked up (E_COST)."""
    if len(names) > MAX_FEATURES:
        raise _too_much("features", len(names), MAX_FEATURES)


def check_cost(policy: Policy) -> None:
    """Refuses what would cost too much memory or time to build or to run (E_COST)."""
    shape = policy.shape
    if isinstance(shape, FullTree):
        _check("drafted nodes", full_slots(shape), MAX_SLOTS)
    if isinstance(shape, ScoredTree):
        check_num_features(shape.scorer.features)
        _check("trees", num_trees(shape.scorer), MAX_TREES)
        _check("bytes of the trees' tables", table_bytes(shape.scorer), MAX_TABLE_BYTES)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether nothing but memory was lacking; torch's allocator says that in words alone."""
    words = ("allocate memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def full_slots(shape: FullTree) -> int:
    """Nodes that a full tree drafts at most, root counted; as `policy.full` sizes its rule."""
    width = (shape.width or shape.top_k) + shape.nested * shape.top_k * (shape.top_k + 1) // 2
    return 1 + shape.top_k + (shape.depth - 1) * width * shape.top_k


def num_trees(scorer: Scorer) -> int:
    """Boosted trees; 0 for a network."""
    return len(scorer.roots) if isinstance(scorer, TreesScorer) else 0


def table_bytes(scorer: Scorer) -> int:
    """Bytes of the tables that `policy.scoring` builds of trees; 0 for a network."""
    if not isinstance(scorer, TreesScorer):
        return 0
    thresholds = Counter(
        feature
        for feature, _ in {*zip(scorer.feature, scorer.threshold, strict=True)}
        if feature >= 0
    )
    rows = sum(thresholds.values()) + len(scorer.features)
    return 8 * rows * len(scorer.roots)


def _check(what: str, found: int, most: int) -> None:
    if found > most:
        raise _too_much(f"policy record, {what}", found, most)


def _too_much(field: str, found: int, most: int) -> ArtifactError:
    return ArtifactError("E_COST", field, expected=f"at most {most}", found=str(found))
