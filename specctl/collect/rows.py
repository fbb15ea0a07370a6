"""From frames to rows of the two trace tables: pure functions, no node by node code.

    RoundRecord ─statistics─► Frame ─join, pick─► Frame ─to_tables─► {"rounds", "nodes"}

`frames.statistics` runs over the rounds that arrived together, on their device and without waiting
for it, and leaves their logits behind; the rest runs once a commit, over all of its rounds at once,
because fixed costs of tensor calls would otherwise dominate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specctl.collect.frames import ROW_TENSORS, Frame
from specctl.collect.target_view import slot_of
from specctl.features import NODE_TENSORS, DraftPool, phi
from specctl.policy.rules import rank_order
from specctl.trace import TABLES, arrow_schema
from specctl.tree import PAD, TokenTree, gather

if TYPE_CHECKING:
    import pyarrow as pa

    from specctl.logs.trace_set import Tables

Masked = np.ma.MaskedArray[tuple[int], np.dtype[Any]]
Cells = Union[npt.NDArray[Any], Masked, list[str], "pa.DictionaryArray"]
Columns = dict[str, Cells]
"""Column name to numpy array (masked where it may be null) or strings."""

DENSE_ONLY = ("target_entropy", "js_distance")
"""Node columns of dense logs: a live round has dropped the drafter's logits when it verifies."""


@dataclass(frozen=True)
class Reading:
    """What the tensors of a frame say together. Shapes `[R, P]` and `[R]`.

    Attributes:
        kept: drafted for this row; deeper nodes were drafted for others of its batch.
        verified: the target processed the node.
        rank: confidence rank among verified draft nodes, 1-based, 0 for others.
        emitted: on the path whose tokens were emitted, the root included.
        num_admitted, num_accepted: draft tokens on the path before and after EOS and limit.
        tcr: rank of the deepest admitted node, 0 for none.
        bonus: the target's token after it.
    """

    kept: Tensor
    verified: Tensor
    rank: Tensor
    emitted: Tensor
    num_admitted: Tensor
    num_accepted: Tensor
    tcr: Tensor
    bonus: Tensor


def read(frame: Frame) -> Reading:
    """Derives everything that needs more than one tensor of a frame."""
    t = frame.tensors
    size = t["parent"].shape[1]
    verified = slot_of(t["submitted"], size) >= 0
    rank = _confidence_rank(t["joint_logp"], verified)
    path = gather(t["submitted"], t["path"], -1)
    num_admitted = (path >= 0).sum(1) - 1
    num_accepted = torch.minimum(num_admitted, t["num_emitted"])
    step = torch.arange(path.shape[1])
    deepest = num_admitted[:, None]
    return Reading(
        kept=(t["parent"] > PAD) & (t["depth"] <= t["offered_depth"][:, None]),
        verified=verified,
        rank=rank,
        emitted=slot_of(path.masked_fill(step > num_accepted[:, None], -1), size) >= 0,
        num_admitted=num_admitted,
        num_accepted=num_accepted,
        tcr=rank.gather(1, path.gather(1, deepest))[:, 0],
        bonus=t["target_ids"].gather(1, t["path"].gather(1, deepest))[:, 0],
    )


def _confidence_rank(joint_logp: Tensor, verified: Tensor) -> Tensor:
    """`[R, P]` int64: 1 for the likeliest verified draft node, ties to the earlier; else 0."""
    ranked = verified.clone()
    ranked[:, 0] = False  # the root was not drafted
    order = rank_order(joint_logp.masked_fill(~ranked, float("-inf")))
    places = torch.arange(1, order.shape[1] + 1).expand_as(order)
    return torch.zeros_like(order).scatter_(1, order, places).masked_fill(~ranked, 0)


def round_columns(frame: Frame, reading: Reading) -> Columns:
    """The `rounds` table of a frame."""
    t, depth = frame.tensors, frame.tensors["offered_depth"]
    return {
        **_request_columns(frame),
        **_fact_columns(frame),
        **{name: t[name].numpy() for name in ROW_TENSORS},
        "root_token_id": t["token_ids"][:, 0].numpy(),
        "bonus_token_id": reading.bonus.numpy(),
        "num_drafted": (reading.kept.sum(1) - 1).numpy(),
        "num_verified": reading.verified.sum(1).numpy(),
        "num_accepted": reading.num_accepted.numpy(),
        "fully_accepted": ((reading.num_admitted == depth) & (depth > 0)).numpy(),
        "tcr": nullable(reading.tcr, reading.tcr > 0),
        "phi": nullable(_phi(frame, reading), depth > 0),
        "phi_depth": nullable(depth, depth > 0),
    }


def _request_columns(frame: Frame) -> Columns:
    requests = frame.requests
    names = ("request_id", "prompt_id", "category")
    return {
        **{name: [getattr(request, name) for request in requests] for name in names},
        "turn": np.array([request.turn for request in requests]),
        "kind": ["live"] * len(requests),
    }


def _fact_columns(frame: Frame) -> Columns:
    times = ("draft_us", "verify_us", "policy_us", "other_us")
    counts = ("offered_width", "top_k", "batch_size")
    return {
        "policy_digest": [facts.policy_digest for facts in frame.facts],
        **{name: np.array([getattr(facts, name) for facts in frame.facts]) for name in counts},
        **{name: np.array([getattr(facts.times, name) for facts in frame.facts]) for name in times},
    }


def _phi(frame: Frame, reading: Reading) -> Tensor:
    """Φ over what the row was offered, so that it does not depend on the rest of its batch."""
    t = frame.tensors
    parent = t["parent"].masked_fill(~reading.kept, PAD)
    tree = TokenTree(t["token_ids"], parent, t["depth"], t["draft_logp"])
    return phi(DraftPool(tree, **{name: t[name] for name in NODE_TENSORS}))


def node_columns(frame: Frame, reading: Reading) -> Columns:
    """The `nodes` table of a frame: one row a kept node, rounds one after another."""
    t, kept = frame.tensors, reading.kept
    row, node = kept.nonzero(as_tuple=True)
    seen, verified = t["target_seen"][kept], reading.verified[kept]
    rank, top1, top2 = reading.rank[kept], t["target_top1"][kept], t["target_top2"][kept]
    deeper = t["depth"] < t["offered_depth"][:, None]
    return {
        "request_id": repeat([request.request_id for request in frame.requests], row),
        "round_idx": t["round_idx"][row].numpy(),
        "node_idx": node.numpy(),
        "parent_idx": t["parent"][kept].numpy(),
        "depth": t["depth"][kept].numpy(),
        "token_id": t["token_ids"][kept].numpy(),
        "sibling_rank": t["sibling_rank"][kept].numpy(),
        "draft_logp": t["draft_logp"][kept].numpy(),
        "joint_logp": t["joint_logp"][kept].numpy(),
        "parent_entropy": t["entropy"][kept].numpy(),
        "parent_topk_entropy": t["topk_entropy"][kept].numpy(),
        "expanded": (t["expanded"] & deeper)[kept].numpy(),
        "verified": verified.numpy(),
        "confidence_rank": nullable(rank, rank > 0),
        "node_match": nullable(t["target_match"][kept], seen),
        "path_accepted": nullable(reading.emitted[kept], verified),
        "target_logp": nullable(t["target_logp"][kept], seen),
        "target_rank": nullable(t["target_rank"][kept], seen),
        "target_top1_logit": nullable(top1, seen),
        "target_top2_logit": nullable(top2, seen),
        "target_ratio": nullable(top2 / top1, seen),
        "target_margin": nullable(top1 - top2, seen),
        **{name: nullable(top1, torch.zeros_like(seen)) for name in DENSE_ONLY},
    }


def nullable(values: Tensor, known: Tensor) -> Masked:
    """A column that is null where not `known`."""
    return np.ma.MaskedArray(values.numpy(), mask=~known.numpy())


def repeat(texts: list[str], row: Tensor) -> pa.DictionaryArray:
    """A dictionary column that repeats `texts[i]` for every i in `row`."""
    import pyarrow as pa

    unique = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    codes = np.array([unique[text] for text in texts], np.int32)[row.numpy()]
    return pa.DictionaryArray.from_arrays(codes, list(unique))


def to_tables(frame: Frame) -> Tables:
    """In the columns, order and types of the trace format."""
    reading = read(frame)
    columns = {"rounds": round_columns(frame, reading), "nodes": node_columns(frame, reading)}
    return {name: table_of(name, columns[name]) for name in TABLES}


def table_of(name: str, columns: Columns) -> pa.Table:
    """A table of the trace format from its columns, in the format's order and types."""
    import pyarrow as pa

    arrays = [_array(columns[column.name]) for column in TABLES[name]]
    rows = pa.Table.from_arrays(arrays, names=[column.name for column in TABLES[name]])
    return rows.cast(arrow_schema(name))


def _array(values: Cells) -> pa.Array:
    import pyarrow as pa

    if isinstance(values, list):
        return pa.array(values, pa.string()).dictionary_encode()
    if isinstance(values, np.ma.MaskedArray):
        return pa.array(values.data, mask=np.ma.getmaskarray(values))
    return pa.array(values)
