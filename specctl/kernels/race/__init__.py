"""`race`: the target's own token of every row, drawn or likeliest, without asking the device."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.checks import require_at_most, require_tensor
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.race import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def race(law: Tensor, keys: Tensor, greedy: Tensor) -> Tensor:
    """Draws a token of each row by an exponential race; greedy rows take the likeliest.

    In words a reader can execute, with the numbers of `specctl.noise`, so that a draw is a
    function of its key and its law alone:

        for r in range(R):
            for v in range(V):
                u = the midpoint that key and token name, in (0, 1)
                score[v] = law[r, v] if greedy[r] else law[r, v] - log(-log(u))
            ids[r] = argmax(score)              # the lowest of ids that tie

    in float64: ties do not happen by chance. -inf is allowed and never drawn; a row of nothing but
    -inf yields 0, one with NaN any token, so refuse those before.

    Args:
        law: `[R, V]` logits after temperature, top-k and top-p, float32, bfloat16 or float16.
        keys: `[R]` int64 from `noise_keys` of the row's seed and output position.
        greedy: `[R]` bool.

    Returns:
        `[R]` int64.

    Raises:
        UsageError: other dtypes or shapes, several devices, 2^31 tokens or more.
    """
    require_tensor("race", "law", law, (None, None), *DTYPES)
    require_tensor("race", "keys", keys, (len(law),), torch.int64)
    require_tensor("race", "greedy", greedy, (len(law),), torch.bool)
    if not runs_fused("race", law, keys, greedy):
        return reference.race(law, keys, greedy)
    require_at_most("race", "tokens", law.shape[1], 2**31 - 1)
    from specctl.kernels.race import fused

    return fused.race(law, keys, greedy)
