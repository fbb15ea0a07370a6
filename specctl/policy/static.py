"""Shapes without anything learned: plain decoding, chains, EAGLE-2's tree."""

from __future__ import annotations

import torch

from specctl.policy.records import Chain, RootOnly, StaticTree
from specctl.policy.rules import BaseShape


def static_shape(record: RootOnly | Chain | StaticTree, device: torch.device) -> BaseShape:
    """The rule of a static record; a chain is a tree of width 1."""
    if isinstance(record, RootOnly):
        return BaseShape(max_depth=0, top_k=0, width=0, max_tokens=1, device=device)
    if isinstance(record, Chain):
        levels = record.num_draft_tokens
        return BaseShape(levels, top_k=1, width=1, max_tokens=levels + 1, device=device)
    return BaseShape(record.depth, record.top_k, record.top_k, record.num_tokens, device)
