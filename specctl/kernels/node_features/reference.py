"""Torch implementation of `node_features`."""

from __future__ import annotations

import torch
from torch import Tensor

FAINTEST = -87.0
"""Natural log of about the smallest normal float32. On a CPU `exp` of smaller numbers takes five
times as long, and a drafter with a vocabulary of its own says -inf of most tokens."""
FAINT = 2e-38
"""Weights up to this stand for none, so that the entropy of a certain token is 0."""
SPARE = 16
"""Values beyond the K best that are compared where some of these are equal."""


def node_features(logits: Tensor, top_k: int, entropy_top_k: int) -> tuple[Tensor, ...]:
    x = logits.float()
    best, ids = _best_logits(x, max(top_k, entropy_top_k, 2), top_k)
    first = best[..., :1]
    shifted, weights = _weights(x, first)
    total = weights.sum(-1)
    log_total = total.log()
    shares = best[..., :entropy_top_k].log_softmax(-1)
    top_two = best[..., :2]
    if x.shape[-1] == 1:
        top_two = torch.cat([best, torch.full_like(best, float("-inf"))], -1)
    return (
        ids[..., :top_k],
        (best[..., :top_k] - first) - log_total[..., None],
        log_total - torch.linalg.vecdot(weights, shifted) / total,
        -(shares.exp() * shares.clamp(min=-1e30)).sum(-1),
        first[..., 0] + log_total,
        top_two,
    )


def best_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.float()
    shifted, weights = _weights(x, x.amax(-1, keepdim=True))
    total = weights.sum(-1)
    log_total = total.log()
    return -log_total, log_total - torch.linalg.vecdot(weights, shifted) / total


def _weights(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Logits below the largest, and their exponentials; -inf logits weigh nothing, and clamping
    them keeps 0 · (-inf) from becoming NaN."""
    shifted = (x - first).clamp_(min=FAINTEST)
    return shifted, torch.nn.functional.threshold(shifted.exp(), FAINT, 0.0)


def _best_logits(x: Tensor, count: int, num_ids: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of float32, and their places; of the first `num_ids`
    places, ties by the lower place.

    `topk` leaves the order of ties open, and at the end of its list which of them it names. One
    value more than needed shows whether there are any: in float32 hardly ever, in bfloat16
    mostly. Elsewhere than on a CPU looking costs a synchronisation.
    """
    values, ids = x.topk(min(count + 1, x.shape[-1]), dim=-1)
    border = values[..., : num_ids + 1]
    if x.is_cpu and not bool((border[..., 1:] == border[..., :-1]).any()):
        return values[..., :count], ids[..., :count]
    return _best_of_ties(x, min(count, x.shape[-1]))


def _best_of_ties(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """By keys of a few more values, if they hold all ties of the last, else of whole rows."""
    values, ids = x.topk(min(count + SPARE, x.shape[-1]), dim=-1)
    if not x.is_cpu or bool((values[..., count - 1] == values[..., -1]).any()):
        values, ids = x, torch.arange(x.shape[-1], device=x.device).expand_as(x)
    order = _ordered_keys(values, ids).topk(count, dim=-1).indices
    return values.gather(-1, order), ids.gather(-1, order)


def _ordered_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64, all different: larger values above smaller, then lower ids above higher."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(values.isnan(), 0x7FFFFFFF)
    return (bits.long() << 32) - ids
