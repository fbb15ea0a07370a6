"""Rounds that stay on the device: static buffers, CUDA graphs, one small copy to the host.

`DecodeLoop(graphs=GraphSettings())` asks for it; on a CUDA device it is the default wherever the
policy, the drafter and the models allow (`unsupported`). The text is the ordinary loop's.
"""

from __future__ import annotations

import torch

from specctl.kernels.dispatch import has_triton, wanted_backend
from specctl.policy import Policy
from specctl.policy.rules import ShapeRule
from specctl.runtime.drafter import Drafter, Eagle3Drafter, SmallModelDrafter
from specctl.runtime.graphs.capture import Capture, GraphCounters, Recording
from specctl.runtime.graphs.deciders import unsupported_shape
from specctl.runtime.graphs.drafting import too_large
from specctl.runtime.graphs.relaxing import unsupported_acceptance
from specctl.runtime.graphs.round import GraphedRound, Played
from specctl.runtime.graphs.settings import GraphSettings
from specctl.runtime.graphs.state import SlotFacts

__all__ = [
    "Capture",
    "GraphCounters",
    "GraphSettings",
    "GraphedRound",
    "Played",
    "Recording",
    "SlotFacts",
    "on_device",
    "unsupported",
]


def on_device(device: torch.device) -> GraphSettings | None:
    """What a loop does unless it is told: graphs on a CUDA device with fused kernels, none
    elsewhere. The references ask the device, which no graph can hold."""
    fused = has_triton() and wanted_backend() != "reference"
    return GraphSettings() if device.type == "cuda" and fused else None


def unsupported(policy: Policy, rule: ShapeRule, drafter: Drafter | None) -> str | None:
    """Why a policy cannot be decoded in graphs with this drafter; None if it can.

    Args:
        rule: of its shape.
    """
    known = drafter is None or isinstance(drafter, Eagle3Drafter | SmallModelDrafter)
    kind = None if known else f"drafter {type(drafter).__name__} has no static passes"
    return (
        unsupported_shape(policy.shape)
        or unsupported_acceptance(policy.acceptance)
        or too_large(rule)
        or kind
    )
