"""`js_distance`: how far the drafter's next-token law is from the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.checks import require_tensor
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.js_distance import reference

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def js_distance(draft_logits: Tensor, target_logits: Tensor, target_ids: Tensor) -> Tensor:
    """Jensen-Shannon distance of two laws, the first of them over a part of the vocabulary.

    For each row, in words a reader can execute, with q = softmax(draft_logits) spread over the
    target's vocabulary (0 where the drafter has no such token) and p = softmax(target_logits):

        m        = (p + q) / 2
        JSD      = sum(p * log2(p / m)) / 2 + sum(q * log2(q / m)) / 2     # 0 log 0 counts as 0
        distance = sqrt(JSD)                                               # 0 equal, 1 disjoint

    The square root is a metric (Endres and Schindelin, IEEE Trans. Inf. Theory 49(7), 2003).
    Log-probabilities may be given as logits: softmax leaves them as they are. NaN or +inf in
    either row give NaN. Near 0 the root turns a sum's rounding of 1e-7 into 3e-4.

    Args:
        draft_logits: `[R, Vd]` float32, float16 or bfloat16; -inf is allowed, a row of nothing
            but -inf is not. Computed in float32.
        target_logits: `[R, V]`, likewise; another dtype is allowed.
        target_ids: `[Vd]` int64, distinct and below V (not checked, which would wait for the
            device): the target's id of each draft token.

    Returns:
        `[R]` float32 in [0, 1], square root of bits.

    Raises:
        UsageError: another shape or dtype, or a vocabulary above 2^20 in the fused kernel.
    """
    require_tensor("js_distance", "draft_logits", draft_logits, (None, None), *FLOATS)
    num_rows, draft_size = draft_logits.shape
    require_tensor("js_distance", "target_logits", target_logits, (num_rows, None), *FLOATS)
    require_tensor("js_distance", "target_ids", target_ids, (draft_size,), torch.int64)
    if not runs_fused("js_distance", draft_logits, target_logits, target_ids):
        return reference.js_distance(draft_logits, target_logits, target_ids)
    from specctl.kernels.js_distance import fused

    return fused.js_distance(draft_logits, target_logits, target_ids)
