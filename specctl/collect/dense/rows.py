"""From labelled trees to rows of the two trace tables, all trees of a chunk at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specctl.collect.dense.labels import Labels
from specctl.collect.dense.laws import Laws
from specctl.collect.round_rows import Columns, Masked, nullable, repeat, table_of
from specctl.features import DraftPool
from specctl.policy import FullTree
from specctl.runtime.observe import Request
from specctl.trace import TABLES
from specctl.tree import ROOT, gather

if TYPE_CHECKING:
    from specctl.logs.trace_set import Tables


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


@dataclass(frozen=True)
class ChunkHeading:
    """What the host knows of a chunk while its columns are on their way."""

    request: Request
    roots: range

    @property
    def first_idx(self) -> int:
        """`round_idx` of the first tree."""
        return self.roots.start - len(self.request.prompt_ids)


def heading_of(chunk: Chunk) -> ChunkHeading:
    """Without the tensors, which may then be freed."""
    return ChunkHeading(chunk.request, chunk.roots)


def leaving(chunk: Chunk) -> dict[str, Tensor]:
    """What the rows of a chunk need of its device, by name.

    Returns:
        `text` `[T]`; `num_drafted` and `num_accepted` `[P]`; values of the M nodes, trees one
        after another, no gaps; `target_*` of those S nodes that the target spoke about.
    """
    tree, labels = chunk.pool.tree, chunk.labels
    place = tree.valid.cumsum(1) - 1
    flat = tree.valid.flatten().nonzero()[:, 0]
    slots = {
        "node_idx": place,
        "parent_idx": gather(place, tree.parent, ROOT),
        "depth": tree.depth,
        "token_id": tree.token_ids,
        "sibling_rank": chunk.pool.sibling_rank,
        "draft_logp": tree.draft_logp,
        "joint_logp": chunk.pool.joint_logp,
        "parent_entropy": chunk.pool.entropy,
        "parent_topk_entropy": chunk.pool.topk_entropy,
        "expanded": chunk.pool.expanded,
        **vars(labels),
    }
    return {
        "text": chunk.text,
        "num_drafted": tree.num_nodes - 1,
        "num_accepted": labels.num_accepted,
        "row": torch.div(flat, tree.num_slots, rounding_mode="floor"),
        **{name: values.flatten()[flat] for name, values in slots.items()},
        **_target_values(chunk),
    }


def to_tables(
    heading: ChunkHeading, tensors: dict[str, Tensor], shape: FullTree, policy_digest: str
) -> Tables:
    """In the columns, order and types of the trace format.

    Args:
        tensors: of `leaving`, on the host.
    """
    rounds = round_columns(heading, tensors, shape, policy_digest)
    columns = {"rounds": rounds, "nodes": node_columns(heading, tensors)}
    return {name: table_of(name, columns[name]) for name in TABLES}


def round_columns(
    heading: ChunkHeading, tensors: dict[str, Tensor], shape: FullTree, policy_digest: str
) -> Columns:
    """The `rounds` table of a chunk; what only a live round has is null, its times are 0."""
    request, size = heading.request, len(heading.roots)
    root = np.arange(heading.roots.start, heading.roots.stop)
    accepted, text = tensors["num_accepted"], tensors["text"]
    remaining = len(text) - 1 - root
    none = torch.zeros(size, dtype=torch.bool)
    bonus_at = torch.from_numpy(root) + accepted + 1
    ended = bonus_at >= len(text)
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
        "round_idx": heading.first_idx + np.arange(size),
        "position": heading.first_idx + np.arange(size) + 1,
        "context_tokens": root + 1,
        "root_token_id": text[heading.roots.start : heading.roots.stop].numpy(),
        "bonus_token_id": nullable(text[bonus_at.clamp(max=len(text) - 1)], ~ended),
        "num_drafted": tensors["num_drafted"].numpy(),
        "num_verified": (accepted + 1).numpy(),
        "num_accepted": accepted.numpy(),
        "num_emitted": np.minimum(accepted.numpy() + 1, remaining),
        "fully_accepted": (accepted == shape.depth).numpy(),
    }


AS_SENT = (
    "node_idx",
    "parent_idx",
    "depth",
    "token_id",
    "sibling_rank",
    "draft_logp",
    "joint_logp",
    "parent_entropy",
    "parent_topk_entropy",
    "expanded",
)
"""Columns of `nodes` that need nothing but their tensor."""


def node_columns(heading: ChunkHeading, tensors: dict[str, Tensor]) -> Columns:
    """The `nodes` table of a chunk: one row a node, trees one after another, no gaps."""
    row, on_path, seen = tensors["row"], tensors["on_path"], tensors["seen"]
    return {
        "request_id": repeat([heading.request.request_id] * len(heading.roots), row),
        "round_idx": (heading.first_idx + row).numpy(),
        **{name: tensors[name].numpy() for name in AS_SENT},
        "verified": on_path.numpy(),
        # Among the verified, which are one path, a rank says nothing.
        "confidence_rank": nullable(row, torch.zeros_like(on_path)),
        "node_match": nullable(on_path, tensors["told"]),
        "path_accepted": nullable(on_path, ~tensors["unknown"]),
        **{name: _spread(tensors[name], seen) for name in TARGET_COLUMNS},
    }


TARGET_COLUMNS = (
    "target_logp",
    "target_rank",
    "target_top1_logit",
    "target_top2_logit",
    "target_ratio",
    "target_margin",
    "target_entropy",
    "js_distance",
)


def _target_values(chunk: Chunk) -> dict[str, Tensor]:
    """What the target says of the nodes below the path, in the order of the nodes."""
    tree, laws = chunk.pool.tree, chunk.laws
    row, node = chunk.labels.seen.nonzero(as_tuple=True)
    above, token = tree.depth[row, node] - 1, tree.token_ids[row, node]
    at = chunk.roots.start - laws.first + row + above
    best = laws.ordered[:, -2:]
    top1, top2 = best[at, 1], best[at, 0]
    values = (
        laws.logp[at, token],
        _rank(laws, at, token),
        top1,
        top2,
        top2 / top1,
        top1 - top2,
        laws.entropy[at],
        chunk.js_distance[row, above],
    )
    return dict(zip(TARGET_COLUMNS, values, strict=True))


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


def _spread(values: Tensor, seen: Tensor) -> Masked:
    """A column with `values` where `seen`, in order, and null elsewhere."""
    column = values.new_zeros(len(seen))
    column[seen] = values
    return nullable(column, seen)
