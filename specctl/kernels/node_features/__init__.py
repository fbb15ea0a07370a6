"""`node_features`: top-k, entropies and the two best logits of rows, in one pass over them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS, refuse, require_at_least, require_at_most
from specctl.kernels.dispatch import implementation

OP = "node_features"


class NodeFeatures(NamedTuple):
    """Statistics of R rows of logits."""

    top_ids: Tensor  # `[..., K]` int64, likeliest tokens, best first; of equal logits the lower id
    top_logp: Tensor  # `[..., K]` float32, their natural log-probabilities, at most 0
    entropy: Tensor  # `[...]` float32, nats, over the whole vocabulary
    topk_entropy: Tensor  # `[...]` float32, nats, of the `entropy_top_k` likeliest, renormalised
    log_sum_exp: Tensor  # `[...]` float32, nats: a raw logit less this is its log-probability
    top_two: Tensor  # `[..., 2]` float32, the two largest raw logits; -inf where there is one token


def node_features(logits: Tensor, top_k: int, entropy_top_k: int) -> NodeFeatures:
    """Top-k, log-probabilities, entropies and the two best logits of each row.

    For each row x of V logits, as a loop:

        lse     = log(sum(exp(x)))
        logp    = x - lse
        top     = sorted(range(V), key=lambda i: (-x[i], i))
        entropy = -sum(exp(logp) * logp)              # 0 · (-inf) counts as 0
        q       = softmax of x[top[:entropy_top_k]]
        topk_entropy = -sum(q * log(q))
        top_two = x[top[0]], x[top[1]]

    In a row with NaN or +inf the log-probabilities, entropies and sum are NaN, the ids lie in the
    vocabulary, and nothing else is promised. The fused kernel reads any strides between rows;
    rows whose own logits are strided are copied first.

    Args:
        logits: `[..., V]` float32, float16 or bfloat16, for the reference float64 too; computed
            in float32. -inf is allowed, a row of nothing but -inf is not.
        top_k: K, at most V. entropy_top_k: clipped to V. Both at most 32 in the fused kernel,
            which takes vocabularies of up to 2^20.

    Raises:
        UsageError: another dtype, K outside of 1..V, or more than the fused kernel takes.
    """
    if logits.dtype not in (*FLOATS, torch.float64):
        found = str(logits.dtype).removeprefix("torch.")
        refuse(OP, f"logits must be float32, float16 or bfloat16, not {found}", "convert them")
    require_at_least(OP, "top_k", top_k, 1)
    require_at_least(OP, "entropy_top_k", entropy_top_k, 1)
    require_at_most(OP, "top_k", top_k, logits.shape[-1])
    module = implementation(__name__, OP, logits)
    return NodeFeatures(*module.node_features(logits, top_k, entropy_top_k))


def best_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`top_logp[..., 0]` and `entropy` of `node_features`, to the last bit, in half the time on a
    CPU: `[...]` float32 each, nats."""
    logp, entropy = implementation(__name__, OP, logits).best_and_entropy(logits)
    return logp, entropy
