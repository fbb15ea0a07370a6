"""`sample_tokens`: the target's token of every row, drawn or likeliest, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS, require_tensor
from specctl.kernels.dispatch import implementation


def sample_tokens(logits: Tensor, keys: Tensor, greedy: Tensor) -> Tensor:
    """Draws a token of each row by Gumbel-max sampling; greedy rows take the likeliest.

    As a loop, with the numbers of `specctl.noise`, so that a draw is a function of its key and its
    logits alone:

        for r in range(R):
            for v in range(V):
                u = the midpoint in (0, 1) of key and token
                score[v] = logits[r, v] if greedy[r] else logits[r, v] - log(-log(u))
            ids[r] = argmax(score)              # the lowest of ids that tie

    in float64, where ties do not happen by chance. -inf is allowed and never drawn. A row of -inf
    alone yields 0, one with NaN any token; the caller rejects such rows.

    Args:
        logits: `[R, V]` after temperature, top-k and top-p, float32, bfloat16 or float16.
        keys: `[R]` int64 from `noise_keys` of the row's seed and output position.
        greedy: `[R]` bool.

    Returns:
        `[R]` int64.

    Raises:
        UsageError: other dtypes or shapes, several devices, 2^31 tokens or more.
    """
    op = "sample_tokens"
    require_tensor(op, "logits", logits, (None, None), *FLOATS)
    require_tensor(op, "keys", keys, (len(logits),), torch.int64)
    require_tensor(op, "greedy", greedy, (len(logits),), torch.bool)
    module = implementation(__name__, op, logits, keys, greedy)
    ids: Tensor = module.sample_tokens(logits, keys, greedy)
    return ids
