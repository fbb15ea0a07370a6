"""Torch implementation of `policy_eval`, reading the same buffer."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from specctl.kernels.policy_eval import Bins, GateState, Pruned
from specctl.kernels.policy_eval import layout as at
from specctl.kernels.policy_eval.layout import PolicyBuffer
from specctl.kernels.tree_build import Best
from specctl.kernels.tree_build.reference import best_of
from specctl.tree import PAD, DraftPool


def choose_bins(params: PolicyBuffer, pool: DraftPool) -> Bins:
    words, header = params.storage, params.header
    by_condition = header[at.CONDITIONAL] != 0
    score = torch.where(by_condition, pool.draft_logp, pool.joint_logp)
    depth = pool.depth.masked_fill(pool.parent == PAD, -1)
    is_last = depth == depth.amax(1, keepdim=True)
    end = score.masked_fill(~is_last, -math.inf).argmax(1)
    assert pool.path_entropy is not None
    value = pool.path_entropy.gather(1, end[:, None])
    edges = words[at.EDGES : at.BIN_DEPTHS]
    used = torch.arange(len(edges), device=words.device) < header[at.NUM_EDGES]
    bins = (~(edges >= value) & used).sum(1)
    depths = header[at.BIN_DEPTHS : at.BIN_TOKENS]
    return Bins(bins, depths[bins].long(), header[at.BIN_TOKENS :][bins].long(), value[:, 0])


def close_gates(
    params: PolicyBuffer, best: Best, state: GateState, depth: int, width: int
) -> Tensor:
    if depth == 1:
        state.max_depth.copy_(params.header[at.FIRST_DEPTH])
        for column, value in ((state.stopped_at, 0), (state.num_kept, 0), (state.order, -math.inf)):
            column.fill_(value)
        state.order[:, 0] = 0.0
    confidence = best.joint_logp[:, 0]
    closed = (confidence < params.storage[at.BARS + depth]) & (confidence > -math.inf)
    state.stopped_at.masked_fill_(closed, depth)
    state.max_depth.copy_(state.max_depth.where(~closed, state.max_depth.clamp(max=depth)))
    is_first = torch.arange(best.index.shape[1], device=closed.device) < width
    kept = (best.joint_logp > -math.inf) & (is_first | closed[:, None])
    place = state.num_kept[:, None] + kept.cumsum(1)
    before = state.order.gather(1, best.index)
    state.order.scatter_(1, best.index, torch.where(kept, -place.float(), before))
    state.num_kept.add_(kept.sum(1))
    return (state.max_depth > depth)[:, None].repeat(1, width)


def prune_level(
    params: PolicyBuffer,
    pool: DraftPool,
    scores: Tensor,
    of_parent: Tensor | None,
    start: int,
    depth: int,
    width: int,
) -> Pruned:
    joint = pool.joint_logp[:, start:]
    level = pool.each(lambda column: column[:, start:])
    own = joint
    if params.layout.has_network:
        own = logsigmoid(_log_odds(params, _columns(level, depth))).float()
    own = own.masked_fill(joint == -math.inf, -math.inf)
    up = _of_parent(of_parent, own)
    combine = params.header[at.COMBINE]
    combined = torch.where(combine == 1, torch.where(up < own, up, own), own)
    combined = torch.where(combine == 2, up + own, combined)
    index, score = best_of(combined, start, width)
    best = torch.zeros_like(combined, dtype=torch.bool).scatter_(1, index - start, value=True)
    best = best | (params.header[at.KEEP_LEAVES] != 0)
    if start == 1:
        scores[:, 0] = math.inf
    scores[:, start : pool.parent.shape[1]] = combined.masked_fill(~best, -math.inf)
    return Pruned(index, score, score >= params.min_score, combined.isnan().any(1))


def _of_parent(of_parent: Tensor | None, own: Tensor) -> Tensor:
    if of_parent is None:
        return torch.zeros_like(own)
    return of_parent.repeat_interleave(own.shape[1] // of_parent.shape[1], 1)


def _columns(level: DraftPool, depth: int) -> Tensor:
    """`[B, C, 7]` float32, in the order of `layout.COLUMNS`."""
    joint = level.joint_logp
    columns = (
        joint.double().exp().float(),
        joint,
        level.draft_logp,
        level.entropy,
        level.topk_entropy,
        torch.full_like(joint, depth),
        level.sibling_rank.float(),
    )
    return torch.stack(columns, -1)


def _log_odds(params: PolicyBuffer, columns: Tensor) -> Tensor:
    """float64; unused features have weights of 0, but may be infinite, so they are left out."""
    words, header = params.storage.double(), params.header
    used = torch.arange(at.MAX_FEATURES, device=words.device) < header[at.NUM_FEATURES]
    features = columns[..., header[at.FEATURES : at.HEADER_WORDS].long()].double()
    features = features.masked_fill(~used, 0.0)
    hidden = features @ words[at.W1 : at.B1].view(at.MAX_FEATURES, at.MAX_HIDDEN)
    hidden = (hidden + words[at.B1 : at.W2]).relu()
    return hidden @ words[at.W2 : at.B2] + words[at.B2]
