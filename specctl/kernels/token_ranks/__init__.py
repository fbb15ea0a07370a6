"""`token_ranks`: the ranks of a few tokens in a row of logits, in one pass over it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS, require_tensor
from specctl.kernels.dispatch import implementation


class TokenRanks(NamedTuple):
    """Ranks of K tokens in R rows; 0 in rows without a token, and where a token is missing."""

    log_sum_exp: Tensor  # `[R]` float32, nats: a raw logit less this is its log-probability
    top_two: Tensor  # `[R, 2]` float32, the two largest logits; -inf where there is one
    logits: Tensor  # `[R, K]` float32, of the tokens
    num_larger: Tensor  # `[R, K]` int64, logits of the row above the token's


def token_ranks(logits: Tensor, tokens: Tensor) -> TokenRanks:
    """The ranks of some tokens in their row, and the row's normaliser.

    For each row x of V logits and its tokens t, as a loop:

        if max(t) < 0: everything is 0                      # and the row is not read
        log_sum_exp   = log(sum(exp(x)))
        top_two       = sorted(x)[-1], sorted(x)[-2]
        logits[k]     = x[t[k]]                             # 0 where t[k] < 0
        num_larger[k] = sum(value > x[t[k]] for value in x) # 0 where t[k] < 0

    A collector calls this for every verified node; half of a draft tree are leaves, whose rows have
    no drafted child.

    Args:
        logits: `[R, V]` float32, float16 or bfloat16, free of NaN and +inf; -inf is allowed, a
            row of nothing but -inf is not. Computed in float32.
        tokens: `[R, K]` int64 below V (not checked, which would wait for the device), -1 for none.

    Raises:
        UsageError: another shape or dtype, or K above 32 in the fused kernel.
    """
    require_tensor("token_ranks", "logits", logits, (None, None), *FLOATS)
    require_tensor("token_ranks", "tokens", tokens, (len(logits), None), torch.int64)
    module = implementation(__name__, "token_ranks", logits, tokens)
    return TokenRanks(*module.token_ranks(logits, tokens))
