"""Torch implementation of `tree_attention`: two passes over a request's keys, and their merge."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prefixes: Tensor,
    offsets: Tensor,
    ancestors: Tensor,
    *,
    scaling: float,
    max_nodes: int,
    behind: int,
) -> Tensor:
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    bounds = pairwise(offsets.tolist())
    for row, (prefix, (start, end)) in enumerate(zip(prefixes.tolist(), bounds, strict=True)):
        written = slice(prefix + behind + end - start)
        output[start:end] = _cascade(
            query[start:end],
            keys[row, :, written],
            values[row, :, written],
            prefix,
            ancestors[start:end],
            scaling,
        )
    return output


def _cascade(
    query: Tensor, keys: Tensor, values: Tensor, prefix: int, ancestors: Tensor, scaling: float
) -> Tensor:
    """`[n, Hq, D]`: one request's tokens over its prefix and over its tail."""
    group = query.shape[1] // len(keys)
    wide = torch.promote_types(query.dtype, torch.float32)
    packed = query.to(wide).unflatten(1, (len(keys), group)).movedim(1, 0).flatten(1, 2)
    keys, values = keys.to(wide), values.to(wide)
    seen = seen_of(ancestors, keys.shape[1] - prefix).repeat_interleave(group, 0)
    parts = (
        _attend(packed, keys[:, :prefix], values[:, :prefix], None, scaling),
        _attend(packed, keys[:, prefix:], values[:, prefix:], seen, scaling),
    )
    merged = _merge(*parts)
    mean: Tensor = merged.unflatten(1, (len(query), group)).movedim(0, 1).flatten(1, 2)
    return mean.to(query.dtype)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Softmax mean `[H, m, D]` of the values seen, and log-sum-exp `[H, m]` of their scores.

    A token that sees nothing has a mean of 0 and a log-sum-exp of -inf.
    """
    scores = query @ keys.transpose(1, 2) * scaling
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(2)
    weights = (scores - _finite(lse)[..., None]).exp()
    return weights @ values, lse


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over both sets of entries."""
    (mean, lse), (more, more_lse) = one, other
    whole = _finite(torch.logaddexp(lse, more_lse))
    return mean * (lse - whole).exp()[..., None] + more * (more_lse - whole).exp()[..., None]


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)


def seen_of(ancestors: Tensor, num_tail: int) -> Tensor:
    """`[n, M]` bool of `[n, W]` int32 words; the inverse of `pack_ancestors`."""
    entry = torch.arange(num_tail, device=ancestors.device)
    return (ancestors[:, entry // 32] >> (entry % 32) & 1).bool()
