"""Torch reference of `js_distance`: that of the floor, where a policy decides by it."""

from __future__ import annotations

from torch import Tensor

from specctl import divergence


def js_distance(draft_logits: Tensor, target_logits: Tensor, target_ids: Tensor) -> Tensor:
    """See `specctl.kernels.js_distance.js_distance`."""
    draft, target = (x.float().log_softmax(-1) for x in (draft_logits, target_logits))
    return divergence.js_distance(draft, target, target_ids)
