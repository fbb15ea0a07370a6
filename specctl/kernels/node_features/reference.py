"""Torch reference of `node_features`."""

from __future__ import annotations

import torch
from torch import Tensor


def node_features(
    logits: Tensor, top_k: int, entropy_top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specctl.kernels.node_features.node_features`."""
    x = logits.float()
    num_best = min(max(top_k, entropy_top_k), x.shape[-1])
    best, ids = x.topk(num_best, dim=-1)
    # -inf logits weigh 0; clamping them keeps 0 · (-inf) from becoming NaN.
    shifted = (x - best[..., :1]).clamp_(min=-1e30)
    weights = shifted.exp()
    total = weights.sum(-1)
    log_total = total.log()
    mean = torch.linalg.vecdot(weights, shifted) / total
    top_logp = (best[..., :top_k] - best[..., :1]) - log_total[..., None]
    return ids[..., :top_k], top_logp, log_total - mean, _renormalised_entropy(best, entropy_top_k)


def _renormalised_entropy(best: Tensor, entropy_top_k: int) -> Tensor:
    logp = best[..., :entropy_top_k].log_softmax(-1)
    return -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
