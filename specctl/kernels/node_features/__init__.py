"""`node_features`: what drafting reads from a row of logits, in one pass over it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specctl.kernels.node_features import reference


class NodeFeatures(NamedTuple):
    """Statistics of R rows of logits.

    Attributes:
        top_ids: `[..., K]` int64, likeliest tokens, best first.
        top_logp: `[..., K]` float32, their natural log-probabilities, at most 0.
        entropy: `[...]` float32, nats, over the whole vocabulary.
        topk_entropy: `[...]` float32, nats, of the `entropy_top_k` likeliest, renormalised.
    """

    top_ids: Tensor
    top_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor


def node_features(logits: Tensor, top_k: int, entropy_top_k: int) -> NodeFeatures:
    """Top-k, log-probabilities and entropies of each row.

    For each row x of V logits, in words a reader can execute:

        lse     = log(sum(exp(x)))
        logp    = x - lse
        top     = the top_k largest logp
        entropy = -sum(exp(logp) * logp)              # 0 · (-inf) counts as 0
        q       = softmax of the entropy_top_k largest x
        topk_entropy = -sum(q * log(q))

    Args:
        logits: `[..., V]` float32, float16 or bfloat16; computed in float32. -inf is allowed,
            a row of nothing but -inf is not.
        top_k: K, at most V. entropy_top_k: clipped to V.
    """
    return NodeFeatures(*reference.node_features(logits, top_k, entropy_top_k))
