"""Torch implementation of `token_ranks`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def token_ranks(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, is_none = logits.float(), tokens < 0
    is_idle = is_none.all(1)
    found = x.gather(1, tokens.clamp(min=0))
    larger = [(x > bound[:, None]).sum(1) for bound in found.unbind(1)]
    num_larger = torch.stack(larger, 1) if larger else torch.zeros_like(tokens)
    top_two = x.topk(min(2, x.shape[1]), 1).values
    if x.shape[1] == 1:
        top_two = pad(top_two, (0, 1), value=float("-inf"))
    # Half the time of `logsumexp` on a CPU.
    log_sum_exp = top_two[:, 0] - x.log_softmax(1).amax(1)
    return (
        log_sum_exp.masked_fill(is_idle, 0),
        top_two.masked_fill(is_idle[:, None], 0),
        found.masked_fill(is_none, 0),
        num_larger.masked_fill(is_none, 0),
    )
