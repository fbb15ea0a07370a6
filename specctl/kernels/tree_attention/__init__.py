"""`tree_attention`: attention of draft tree nodes over a cache, prefix and tree apart."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.checks import FLOATS, refuse, require_at_most, require_tensor
from specctl.kernels.dispatch import implementation

OP = "tree_attention"
MAX_HEAD_DIM = 256
_INTEGERS = (torch.int32, torch.int64)


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
    behind: int = 0,
) -> Tensor:
    """Attention of packed tree nodes over their requests' cached prefixes and over each other.

    The entries of a request's slot are its prefix, visible to all of its tokens, and the tail,
    visible as the bits state. As a loop:

        for b in range(B):
            for i in range(offsets[b], offsets[b + 1]):
                seen = list(range(prefixes[b]))
                for j in range(behind + offsets[b + 1] - offsets[b]):
                    if ancestors[i, j // 32] >> (j % 32) & 1:
                        seen.append(prefixes[b] + j)
                for h in range(Hq):
                    g = h // (Hq // Hkv)
                    weights = softmax(keys[b, g, seen] @ query[i, h] * scaling)
                    out[i, h] = weights @ values[b, g, seen]

    The prefix is read without a mask, in splits side by side, as many for each request as its
    length needs, and merged with the tail by log-sum-exp (cascade attention). Scores and sums
    are float32. A token that sees nothing is 0, and so are tokens of no request, from `offsets[B]`
    on. NaN in an entry reaches every token that sees it; in the tail also those that do not.

    Sliding windows and capped scores are not supported: the runtime rejects contexts longer than a
    model's window, and models that cap.

    Padded rows `[B, N, Hq, D]` are packed ones of equal size: `query.flatten(0, 1)`, offsets
    0, N, 2 N, ...

    Args:
        query: `[T, Hq, D]` bf16, fp16 or fp32 (the reference also fp64), D at most 256.
        keys, values: `[B, Hkv, S, D]` of the query's dtype, any strides, D contiguous: one layer
            of the cache, tail included. Hq is a multiple of Hkv.
        prefixes: `[B]` int32 or int64, entries before the tail.
        offsets: `[B + 1]` int32 or int64, ascending from 0: where each request's tokens start,
            and the end. A request may have none.
        ancestors: `[T, W]` int32, bit j % 32 of word j // 32 set where tail entry j is seen; see
            `pack_ancestors`. Bits beyond the tail are not read.
        scaling: of the scores, mostly D ** -0.5.
        max_nodes: the most tokens of a request, known on the host; more would be left out. 1 or
            more.
        behind: tail entries before a request's own tokens, which earlier passes wrote.

    Returns:
        `[T, Hq, D]` contiguous, of the query's dtype.

    Raises:
        UsageError: shapes, dtypes or devices that do not fit, before anything runs.
    """
    require_tensor(OP, "query", query, (None, None, None), *FLOATS, torch.float64)
    num_tokens, heads, dim = query.shape
    require_at_most(OP, "head size", dim, MAX_HEAD_DIM)
    require_tensor(OP, "keys", keys, (None, None, None, dim), query.dtype)
    require_tensor(OP, "values", values, tuple(keys.shape), query.dtype)
    rows, key_heads = keys.shape[:2]
    require_tensor(OP, "prefixes", prefixes, (rows,), *_INTEGERS)
    require_tensor(OP, "offsets", offsets, (rows + 1,), *_INTEGERS)
    require_tensor(OP, "ancestors", ancestors, (num_tokens, None), torch.int32)
    require_at_most(OP, "tail entries", behind + max_nodes, 32 * ancestors.shape[1])
    is_dense = query.stride(2) == keys.stride(3) == values.stride(3) == 1
    whole = ancestors.is_contiguous() and prefixes.is_contiguous() and offsets.is_contiguous()
    for fits, problem in (
        (heads % key_heads == 0, f"{heads} query heads are no multiple of {key_heads} key heads"),
        (is_dense, "query, keys and values must have dense heads"),
        (whole, "ancestors, prefixes and offsets must be contiguous"),
    ):
        if not fits:
            refuse(OP, problem)
    args = (query, keys, values, prefixes, offsets, ancestors)
    if num_tokens == 0:
        return query.new_empty(query.shape)
    out: Tensor = implementation(__name__, OP, *args).tree_attention(
        *args, scaling=scaling, max_nodes=max_nodes, behind=behind
    )
    return out


def pack_ancestors(visible: Tensor) -> Tensor:
    """Packs the visibility of tail entries, `[..., M]` bool, into `[..., ceil(M / 32)]` int32: bit
    j % 32 of word j // 32 is `visible[..., j]`."""
    padded = torch.nn.functional.pad(visible, (0, -visible.shape[-1] % 32))
    bits = padded.unflatten(-1, (-1, 32)).int()
    words: Tensor = (bits << torch.arange(32, device=visible.device)).sum(-1).int()
    return words
