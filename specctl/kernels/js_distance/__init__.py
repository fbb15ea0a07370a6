"""`js_distance`: how far the drafter's next-token law is from the target's."""

from __future__ import annotations

from torch import Tensor

from specctl.kernels.js_distance import reference


def js_distance(draft_logp: Tensor, target_logp: Tensor, target_ids: Tensor) -> Tensor:
    """Jensen-Shannon distance of two laws, the first of them over a part of the vocabulary.

    For each row, in words a reader can execute, with q spread over the target's vocabulary
    (0 where the drafter has no such token):

        m        = (p + q) / 2
        JSD      = sum(p * log2(p / m)) / 2 + sum(q * log2(q / m)) / 2     # 0 log 0 counts as 0
        distance = sqrt(JSD)                                               # 0 equal, 1 disjoint

    The square root is a metric (Endres and Schindelin, IEEE Trans. Inf. Theory 49(7), 2003).

    Args:
        draft_logp: `[R, Vd]` float, natural log, each row normalised; -inf is allowed.
        target_logp: `[R, V]` float, likewise.
        target_ids: `[Vd]` int64, distinct: the target's id of each draft token.

    Returns:
        `[R]` float32 in [0, 1].
    """
    return reference.js_distance(draft_logp, target_logp, target_ids)
