"""From labelled trees to rows of the two trace tables, all trees of a chunk at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.collect.dense.labels import Labels
from specctl.collect.dense.laws import Laws
from specctl.collect.rows import Columns, nullable, repeat, table_of
from specctl.features import DraftPool
from specctl.policy import FullTree
from specctl.runtime.observe import Request
from specctl.trace import TABLES
from specctl.tree import ROOT, gather


@dataclass(frozen=True)
class Chunk:
    """The trees of P consecutive roots of one text, drafted and labelled.

    Attributes:
        roots: their indices in the text. text: `[T]` int64, prompt and response.
        pool: `[P, N]`. labels: `[P, N]`. js_distance: `[P, D]`, by depth of the node on the path.
        laws: of the target, after every token that a node on a path stands for.
    """

    request: Request
    roots: range
    text: Tensor
    pool: DraftPool
    labels: Labels
    js_distance: Tensor
    laws: Laws


def to_tables(chunk: Chunk, shape: FullTree, policy_digest: str) -> dict[str, Any]:
    """`pyarrow.Table` by name, in the columns, order and types of the trace format."""
    rounds = round_columns(chunk, shape, policy_digest)
    columns = {"rounds": rounds, "nodes": node_columns(chunk)}
    return {name: table_of(name, columns[name]) for name in TABLES}


def round_columns(chunk: Chunk, shape: FullTree, policy_digest: str) -> Columns:
    """The `rounds` table of a chunk; what only a live round has is null, its times are 0."""
    request, size = chunk.request, len(chunk.roots)
    root = np.arange(chunk.roots.start, chunk.roots.stop)
    accepted = chunk.labels.num_accepted.cpu()
    remaining = len(chunk.text) - 1 - root
    none = torch.zeros(size, dtype=torch.bool)
    bonus_at = torch.from_numpy(root) + accepted + 1
    ended = bonus_at >= len(chunk.text)
    text = chunk.text.cpu()
    shared = {
        "request_id": request.request_id,
        "prompt_id": request.prompt_id,
        "category": request.category,
        "kind": "dense",
        "policy_digest": policy_digest,
    }
    numbers = {
        "turn": request.turn,
        "offered_depth": shape.depth,
        "offered_width": shape.width or shape.top_k,
        "top_k": shape.top_k,
        "batch_size": 1,
    }
    times = dict.fromkeys(("draft_us", "verify_us", "policy_us", "other_us"), 0.0)
    unknown = dict.fromkeys(("tcr", "phi", "phi_depth"), nullable(torch.zeros(size), none))
    return {
        **{name: [value] * size for name, value in shared.items()},
        **{name: np.full(size, value) for name, value in (numbers | times).items()},
        **unknown,
        "round_idx": root - len(request.prompt_ids),
        "position": root - len(request.prompt_ids) + 1,
        "context_tokens": root + 1,
        "root_token_id": text[chunk.roots.start : chunk.roots.stop].numpy(),
        "bonus_token_id": nullable(text[bonus_at.clamp(max=len(text) - 1)], ~ended),
        "num_drafted": (chunk.pool.tree.num_nodes - 1).cpu().numpy(),
        "num_verified": (accepted + 1).numpy(),
        "num_accepted": accepted.numpy(),
        "num_emitted": np.minimum(accepted.numpy() + 1, remaining),
        "fully_accepted": (accepted == shape.depth).numpy(),
    }


def node_columns(chunk: Chunk) -> Columns:
    """The `nodes` table of a chunk: one row a node, trees one after another, no gaps."""
    pool, tree, labels = chunk.pool, chunk.pool.tree, chunk.labels
    place = tree.valid.cumsum(1) - 1
    flat = tree.valid.flatten().nonzero()[:, 0]

    def host(values: Tensor) -> Tensor:
        return values.flatten()[flat].cpu()

    row = torch.div(flat, tree.num_slots, rounding_mode="floor").cpu()
    round_idx = chunk.roots.start - len(chunk.request.prompt_ids) + row
    on_path = host(labels.on_path)
    return {
        "request_id": repeat([chunk.request.request_id] * len(chunk.roots), row),
        "round_idx": round_idx.numpy(),
        "node_idx": host(place).numpy(),
        "parent_idx": host(gather(place, tree.parent, ROOT)).numpy(),
        "depth": host(tree.depth).numpy(),
        "token_id": host(tree.token_ids).numpy(),
        "sibling_rank": host(pool.sibling_rank).numpy(),
        "draft_logp": host(tree.draft_logp).numpy(),
        "joint_logp": host(pool.joint_logp).numpy(),
        "parent_entropy": host(pool.entropy).numpy(),
        "parent_topk_entropy": host(pool.topk_entropy).numpy(),
        "expanded": host(pool.expanded).numpy(),
        "verified": on_path.numpy(),
        # Among the verified, which are one path, a rank says nothing.
        "confidence_rank": nullable(row, torch.zeros_like(on_path)),
        "node_match": nullable(on_path, host(labels.told)),
        "path_accepted": nullable(on_path, ~host(labels.unknown)),
        **_target_columns(chunk, host(labels.seen)),
    }


def _target_columns(chunk: Chunk, seen: Tensor) -> Columns:
    """What the target says of the nodes below the path; null elsewhere."""
    tree, laws = chunk.pool.tree, chunk.laws
    row, node = chunk.labels.seen.nonzero(as_tuple=True)
    above, token = tree.depth[row, node] - 1, tree.token_ids[row, node]
    at = chunk.roots.start - laws.first + row + above
    best = laws.ordered[:, -2:]
    top1, top2 = best[at, 1], best[at, 0]
    found = {
        "target_logp": laws.logp[at, token],
        "target_rank": _rank(laws, at, token),
        "target_top1_logit": top1,
        "target_top2_logit": top2,
        "target_ratio": top2 / top1,
        "target_margin": top1 - top2,
        "target_entropy": laws.entropy[at],
        "js_distance": chunk.js_distance[row, above],
    }
    return {name: _spread(values.cpu(), seen) for name, values in found.items()}


def _rank(laws: Laws, at: Tensor, token: Tensor) -> Tensor:
    """1 + number of strictly larger logits, found in the sorted row of each law.

    Args:
        at: `[M]` int64, row of the law. token: `[M]` int64.
    """
    order = at.argsort(stable=True)
    counts = torch.bincount(at, minlength=len(laws.logits))
    behind = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[at[order]]
    slot = torch.empty_like(at).scatter_(0, order, behind)  # of each node among those of its law
    table = laws.logits.new_zeros(len(counts), int(counts.max()))
    table[at, slot] = laws.logits[at, token]
    not_larger = torch.searchsorted(laws.ordered, table, right=True)[at, slot]
    return laws.ordered.shape[1] - not_larger + 1


def _spread(values: Tensor, seen: Tensor) -> Any:
    """A column with `values` where `seen`, in order, and null elsewhere."""
    column = values.new_zeros(len(seen))
    column[seen] = values
    return nullable(column, seen)
