"""How to fit C2T."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from specctl.policy.base import NumTokens, Probability
from specctl.policy.records import Record
from specctl.train.ffn import FfnConfig
from specctl.train.nodes import NodeConfig


class C2TConfig(Record):
    """How to fit C2T.

    Attributes:
        nodes: which logged nodes, which features and label. ffn: the network.
        beta: the threshold; none: the highest that keeps `recall` on the training prompts.
        recall: share of accepted tokens that the threshold has to keep.
        num_tokens, keep_leaves, running_min: see `ScoredTree`.
        held_out_frac: share of prompts kept for the report. seed: of the split.
    """

    nodes: NodeConfig = NodeConfig()
    ffn: FfnConfig = FfnConfig()
    beta: Probability | None = None
    recall: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.8
    num_tokens: NumTokens | None = None
    keep_leaves: bool = True
    running_min: bool = True
    held_out_frac: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
