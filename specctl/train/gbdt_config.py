"""How to fit boosted trees."""

from __future__ import annotations

from specctl.train.c2t_config import C2TConfig
from specctl.train.trees import TreesConfig

RICH_FEATURES = (
    "joint_logp",
    "parent_entropy",
    "depth",
    "sibling_rank",
    "draft_logp",
    "suffix_length",
    "suffix_offered",
    "suffix_support",
    "suffix_count",
)
"""All that told anything about acceptance on held-out prompts (docs/features.md)."""


class GbdtConfig(C2TConfig):
    """How to fit boosted trees in the place of C2T's network.

    Attributes:
        trees: how to boost.
        distill: publish a network trained on what the trees say, in their place.
        ffn: that network, and the one of labels that both are compared with.
    """

    trees: TreesConfig = TreesConfig()
    distill: bool = False
