"""Rounds of equal shape as one: the background thread reads many at the price of a few calls.

Every tensor call of that thread competes with decoding for the interpreter lock. A static policy
makes round after round of one shape, so stacking them divides the number of calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.features import NODE_TENSORS, DraftPool
from specctl.runtime.observe import RoundRecord
from specctl.tree import TokenTree

MAX_STACK_BYTES = 32 << 20
"""Logits copied into one stack at most; larger rounds are read one by one."""
MAX_CUDA_STACK_BYTES = 256 << 20
"""The same on CUDA, where the copy takes a tenth of a millisecond and each call a launch."""


def alike(records: Iterable[RoundRecord]) -> Iterator[list[RoundRecord]]:
    """Runs of rounds that `stack` can join, in order, each within the bound of its device."""
    for _, run in groupby(records, _signature):
        rounds = list(run)
        logits = rounds[0].target_logits
        limit = MAX_CUDA_STACK_BYTES if logits.is_cuda else MAX_STACK_BYTES
        size = max(1, limit // max(1, logits.nbytes))
        yield from (rounds[start : start + size] for start in range(0, len(rounds), size))


def stack(records: Sequence[RoundRecord]) -> RoundRecord:
    """One record with the rows of all, which must be alike. Times are those of the first."""
    if len(records) == 1:
        return records[0]
    first = records[0]
    logits = _cat(record.target_logits for record in records)
    greedy = first.target_logp_source is first.target_logits
    tree = TokenTree(*_columns([record.tree for record in records]))
    pools = [record.pool for record in records]
    grown = TokenTree(*_columns([pool.tree for pool in pools]))
    pool = DraftPool(
        grown, **{name: torch.cat([getattr(pool, name) for pool in pools]) for name in NODE_TENSORS}
    )
    return replace(
        first,
        requests=[request for record in records for request in record.requests],
        round_idx=_cat(record.round_idx for record in records),
        position=_cat(record.position for record in records),
        context_tokens=_cat(record.context_tokens for record in records),
        pool=pool,
        offered_depth=_cat(record.offered_depth for record in records),
        submitted=_cat(record.submitted for record in records),
        tree=tree,
        target_logits=logits,
        target_logp_source=logits
        if greedy
        else _cat(record.target_logp_source for record in records),
        target_ids=_cat(record.target_ids for record in records),
        path=_cat_paths([record.path for record in records]),
        num_emitted=_cat(record.num_emitted for record in records),
    )


def _signature(record: RoundRecord) -> tuple[object, ...]:
    tensors = (record.pool.joint_logp, record.submitted, record.target_logits)
    greedy = record.target_logp_source is record.target_logits
    return (greedy, record.top_k, *(tensor.shape[1:] for tensor in tensors))


def _cat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _cat_paths(paths: Sequence[Tensor]) -> Tensor:
    """Paths are as wide as their round's tree is deep: padded to the widest."""
    widest = max(path.shape[1] for path in paths)
    return torch.cat([pad(path, (0, widest - path.shape[1]), value=-1) for path in paths])


def _columns(trees: Sequence[TokenTree]) -> list[Tensor]:
    """The fields of equal trees, each joined along the rows, in field order."""
    names = [field.name for field in fields(trees[0])]
    return [torch.cat([getattr(tree, name) for tree in trees]) for name in names]
