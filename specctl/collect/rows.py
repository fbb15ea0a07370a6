"""Makes the two tables of a trace set from tensors on the host.

    decoded rounds    statistics ─────────────┐
    engine's steps    engines.recording ──────┴─► RoundRows ─round_tables─┐
    every position    dense.trees.columns_of ──────────────────dense_tables─┴─► _tables ─► Arrow

Logits are read before: `rounds.statistics`, `engines.steps.read_steps`, `dense.labels`. A round has
padded `[R, P]` tensors; a dense text has flat columns of its M nodes. Tables are made over all rows
of a segment or chunk, because fixed costs of tensor calls would otherwise dominate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.features import phi
from specctl.policy import FullTree
from specctl.policy.rules import rank_order
from specctl.runtime.requests import Request
from specctl.trace import arrow_schema
from specctl.tree import PAD, POOL_COLUMNS, DraftPool, gather

if TYPE_CHECKING:
    import pyarrow as pa

    from specctl.logs.parquet import Tables

LOGIT_TENSORS = ("target_logp", "target_rank", "target_top1_logit", "target_top2_logit")
"""Node columns that come from the logits at the parent."""
ROW_TENSORS = ("round_idx", "position", "context_tokens", "offered_depth", "num_emitted")
FILLS = {"parent": PAD, "joint_logp": float("-inf"), "submitted": -1, "path": -1}
"""Padding where rounds of different sizes are joined; 0 or false for other tensors."""
Heading = dict[str, Any]
"""Columns of one row of `rounds` that are on the host from the start, by name."""
Columns = dict[str, Any]
"""Columns by name, see `table_of`."""


@dataclass(frozen=True)
class RoundRows:
    """R rows (a request in a round) on the host, without logits."""

    headings: list[Heading]  # R of them
    tensors: dict[str, Tensor]  # by name; the first axis is R, a second is padded

    @cached_property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pick(self, rows: Sequence[int]) -> RoundRows:
        """Some of the rows; this object itself if it is all of them."""
        if len(rows) == len(self.headings):
            return self
        index = torch.tensor(rows, dtype=torch.int64)
        picked = {name: tensor[index] for name, tensor in self.tensors.items()}
        return RoundRows([self.headings[row] for row in rows], picked)


@dataclass
class HeldRows:
    """Rows that wait for the end of their prompts."""

    parts: list[RoundRows] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(rows.size_bytes for rows in self.parts)

    def prompt_ids(self) -> set[str]:
        """Prompts with rows."""
        return {heading["prompt_id"] for rows in self.parts for heading in rows.headings}

    def take(self, prompt_ids: Collection[str]) -> list[RoundRows]:
        """Removes and returns the rows of prompts."""
        taken, left = [], []
        for rows in self.parts:
            among = [heading["prompt_id"] in prompt_ids for heading in rows.headings]
            if any(among):
                taken.append(rows.pick([row for row, one in enumerate(among) if one]))
            if not all(among):
                left.append(rows.pick([row for row, one in enumerate(among) if not one]))
        self.parts = left
        return taken


def join(parts: Sequence[RoundRows]) -> RoundRows:
    """All rows of one or more parts, second axes padded to the longest."""

    return RoundRows(
        [heading for part in parts for heading in part.headings],
        {
            name: stacked([part.tensors[name] for part in parts], FILLS.get(name, 0))
            for name in parts[0].tensors
        },
    )


def stacked(tensors: Sequence[Tensor], fill: float) -> Tensor:
    """The rows of all tensors, second axes padded to the longest."""
    if tensors[0].dim() > 1:
        longest = max(one.shape[1] for one in tensors)
        tensors = [pad(one, (0, longest - one.shape[1]), value=fill) for one in tensors]
    return torch.cat(list(tensors))


def request_columns(request: Request, kind: str) -> Heading:
    """The columns that identify a request; `kind` is live or dense."""
    return {
        "request_id": request.request_id,
        "prompt_id": request.prompt_id,
        "category": request.category,
        "turn": request.turn,
        "kind": kind,
    }


# --------------------------------------------------------------------------- nodes


def pool_columns(pool: DraftPool) -> dict[str, Tensor]:
    """The columns of `nodes` of a drafted tree before verification, `[R, P]`."""
    return {
        "parent_idx": pool.parent,
        "depth": pool.depth,
        "token_id": pool.token_ids,
        "sibling_rank": pool.sibling_rank,
        "draft_logp": pool.draft_logp,
        "joint_logp": pool.joint_logp,
        "parent_entropy": pool.entropy,
        "parent_topk_entropy": pool.topk_entropy,
        "expanded": pool.expanded,
    }


def slot_of(submitted: Tensor, num_nodes: int) -> Tensor:
    """`[R, P]` int64: place of each pool node among the submitted, -1 if it is not.

    Args:
        submitted: `[R, N]` int64 pool indices, -1 padded. num_nodes: P.
    """
    shape = (submitted.shape[0], num_nodes + 1)  # padding lands in the extra column
    slots = torch.full(shape, -1, device=submitted.device)
    order = torch.arange(submitted.shape[1], device=submitted.device).expand_as(submitted)
    return slots.scatter_(1, submitted.masked_fill(submitted < 0, num_nodes), order)[:, :-1]


def round_tables(rows: RoundRows) -> Tables:
    """Decoded rounds in the trace format. Shapes below: `[R, P]` of nodes, `[R]` of rows."""
    t, depth = rows.tensors, rows.tensors["offered_depth"]
    size = t["parent"].shape[1]
    # Deeper nodes were drafted for other requests of the batch.
    kept = (t["parent"] > PAD) & (t["depth"] <= depth[:, None])
    verified = slot_of(t["submitted"], size) >= 0
    rank = _confidence_rank(t["joint_logp"], verified)
    path = gather(t["submitted"], t["path"], -1)
    num_admitted = (path >= 0).sum(1) - 1  # before the end of text or the limit cut the path
    num_accepted = torch.minimum(num_admitted, t["num_emitted"])
    behind = torch.arange(path.shape[1]) > num_accepted[:, None]
    emitted = slot_of(path.masked_fill(behind, -1), size) >= 0
    deepest = num_admitted[:, None]
    tcr = rank.gather(1, path.gather(1, deepest))[:, 0]
    # Φ over the nodes offered to the row, so that it does not depend on the rest of its batch.
    offered = t["parent"].masked_fill(~kept, PAD)
    pool = DraftPool(**{name: t[name] for name in POOL_COLUMNS} | {"parent": offered})
    rounds: Columns = {
        **{name: [heading[name] for heading in rows.headings] for name in rows.headings[0]},
        **{name: t[name] for name in ROW_TENSORS},
        "root_token_id": t["token_ids"][:, 0],
        "bonus_token_id": t["target_ids"].gather(1, t["path"].gather(1, deepest))[:, 0],
        "num_drafted": kept.sum(1) - 1,
        "num_verified": verified.sum(1),
        "num_accepted": num_accepted,
        "fully_accepted": (num_admitted == depth) & (depth > 0),
        "tcr": (tcr, tcr > 0),
        "phi": (phi(pool), depth > 0),
        "phi_depth": (depth, depth > 0),
    }
    row, node = kept.nonzero(as_tuple=True)
    judged = t["judged"]
    slots = pool_columns(pool) | {
        "expanded": t["expanded"] & (t["depth"] < depth[:, None]),
        "verified": verified,
    }
    nullable = {
        "confidence_rank": (rank, rank > 0),
        "path_accepted": (emitted, verified),
        "node_match": (t["node_match"], t.get("match_known", judged)),
        **{name: (t[name], judged) for name in LOGIT_TENSORS},
    }
    nodes = {
        "node_idx": node,
        **{name: values[kept] for name, values in slots.items()},
        **{name: (values[kept], known[kept]) for name, (values, known) in nullable.items()},
    }
    return _tables(rounds, nodes, row)


def _confidence_rank(joint_logp: Tensor, verified: Tensor) -> Tensor:
    """`[R, P]` int64: rank of verified draft nodes by probability, from 1; 0 for the others."""
    ranked = verified.clone()
    ranked[:, 0] = False  # the root was not drafted
    order = rank_order(joint_logp.masked_fill(~ranked, float("-inf")))
    places = torch.arange(1, order.shape[1] + 1).expand_as(order)
    return torch.zeros_like(order).scatter_(1, order, places).masked_fill(~ranked, 0)


def dense_tables(
    request: Request, roots: range, tensors: dict[str, Tensor], shape: FullTree, policy_digest: str
) -> Tables:
    """Full trees along a text in the trace format; columns that only decoded rounds have are null.

    Args:
        roots: indices of the P roots in the text.
        tensors: `text` `[T]`; `num_drafted` and `num_accepted` `[P]`; `row`, columns and labels of
            the M nodes (see `dense.labels.Labels`); `LOGIT_TENSORS` and `target_entropy` of the
            judged nodes.
    """
    root = torch.arange(roots.start, roots.stop)
    round_idx = root - len(request.prompt_ids)
    accepted, text = tensors["num_accepted"], tensors["text"]
    bonus_at, last = root + accepted + 1, len(text) - 1
    rounds: Columns = {
        **request_columns(request, "dense"),
        "round_idx": round_idx,
        "position": round_idx + 1,
        "context_tokens": root + 1,
        "root_token_id": text[roots.start : roots.stop],
        "bonus_token_id": (text[bonus_at.clamp(max=last)], bonus_at <= last),
        "offered_depth": shape.depth,
        "offered_width": shape.width or shape.top_k,
        "top_k": shape.top_k,
        "num_drafted": tensors["num_drafted"],
        "num_verified": accepted + 1,
        "num_accepted": accepted,
        "num_emitted": torch.minimum(accepted + 1, last - root),
        "fully_accepted": accepted == shape.depth,
        "policy_digest": policy_digest,
    }
    on_path, judged = tensors["on_path"], tensors["judged"]
    # No confidence_rank: the verified nodes are one path, whose ranks are depths.
    nodes = {
        **tensors,
        "verified": on_path,
        "node_match": (on_path, tensors["continued"]),
        "path_accepted": (on_path, ~tensors["unknown"]),
    }
    for name in (*LOGIT_TENSORS, "target_entropy"):
        values = tensors[name]
        nodes[name] = (values.new_zeros(len(judged)).masked_scatter_(judged, values), judged)
    return _tables(rounds, nodes, tensors["row"])


def _tables(rounds: Columns, nodes: Columns, row: Tensor) -> Tables:
    """Both tables; `row` `[M]` is each node's round."""
    (top1, judged), (top2, _) = nodes["target_top1_logit"], nodes["target_top2_logit"]
    names = rounds["request_id"]
    nodes = nodes | {
        "request_id": names if isinstance(names, str) else repeat(names, row),
        "round_idx": rounds["round_idx"][row],
        "target_ratio": (top2 / top1, judged),
        "target_margin": (top1 - top2, judged),
    }
    return {"rounds": table_of("rounds", rounds), "nodes": table_of("nodes", nodes)}


def repeat(texts: list[str], row: Tensor) -> pa.DictionaryArray:
    """A dictionary column of `texts[i]` for every i in `row`."""
    import pyarrow as pa

    unique = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    codes = np.array([unique[text] for text in texts], np.int32)[row.numpy()]
    return pa.DictionaryArray.from_arrays(codes, list(unique))


def table_of(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """A table in the order and types of the trace format.

    Args:
        columns: by name, a tensor, a pair of a tensor and a mask of known values, a list, an Arrow
            array, or one value for all rows. Absent nullable columns are null.
    """
    import pyarrow as pa

    schema, size = arrow_schema(name), len(columns["round_idx"])

    def array(field: pa.Field) -> pa.Array:
        values = columns.get(field.name) if field.nullable else columns[field.name]
        if isinstance(values, tuple):
            return pa.array(values[0].numpy(), mask=~values[1].numpy())
        if isinstance(values, Tensor):
            return pa.array(values.numpy())
        if isinstance(values, str):
            return repeat([values], torch.zeros(size, dtype=torch.int64))
        if values is None or isinstance(values, int | float):
            return pa.repeat(pa.scalar(values, field.type), size)
        return pa.array(values, field.type) if isinstance(values, list) else values

    return pa.table({field.name: array(field) for field in schema}).cast(schema)
