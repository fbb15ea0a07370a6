"""Rounds as rows of the two trace tables: no code here goes node by node.

    RoundRecord ─statistics─► tensors, which leave the device ─► RoundRows ─to_tables─► Arrow tables

`statistics` runs over rounds that arrived together, on their device and without waiting for it, and
leaves their logits behind. `to_tables` runs once a segment, over all of its rounds, because fixed
costs of tensor calls would otherwise dominate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.features import phi
from specctl.kernels.token_ranks import token_ranks
from specctl.policy.rules import rank_order
from specctl.runtime.requests import Request, RoundRecord
from specctl.trace import arrow_schema
from specctl.tree import PAD, POOL_COLUMNS, DraftPool, gather

if TYPE_CHECKING:
    import pyarrow as pa

    from specctl.logs.parquet import Tables

MAX_STACK_BYTES = 32 << 20
"""Logits of rounds that are read together at most. Every tensor call of the recording thread
competes with decoding for the interpreter lock, so small rounds are joined; larger ones are read in
place, without a copy."""
LOGIT_TENSORS = ("target_logp", "target_rank", "target_top1_logit", "target_top2_logit")
"""Node columns that logits at the parent give."""
ROW_TENSORS = ("round_idx", "position", "context_tokens", "offered_depth", "num_emitted")
FILLS = {"parent": PAD, "joint_logp": float("-inf"), "submitted": -1, "path": -1}
"""Values of padding where rounds of different sizes are joined; 0 or false for the others."""
Heading = dict[str, Any]
"""Columns of `rounds` that the host knows of one row, by name."""


@dataclass(frozen=True)
class RoundRows:
    """R rows (a request in a round) on the host, without logits.

    Attributes:
        headings: R of them.
        tensors: by name; the first axis is R, a second is padded.
    """

    headings: list[Heading]
    tensors: dict[str, Tensor]

    @cached_property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pick(self, rows: Sequence[int]) -> RoundRows:
        """Some of the rows; this object itself where that is all of them."""
        if len(rows) == len(self.headings):
            return self
        index = torch.tensor(rows, dtype=torch.int64)
        picked = {name: tensor[index] for name, tensor in self.tensors.items()}
        return RoundRows([self.headings[row] for row in rows], picked)


@dataclass
class HeldRows:
    """Rows that wait until their prompts have ended, as these are published whole."""

    parts: list[RoundRows] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(rows.size_bytes for rows in self.parts)

    def counts(self) -> Counter[str]:
        """Rows held, by prompt."""
        return Counter(heading["prompt_id"] for rows in self.parts for heading in rows.headings)

    def take(self, prompt_ids: Collection[str]) -> list[RoundRows]:
        """Rows of these prompts, which are held no longer."""
        taken, left = [], []
        for rows in self.parts:
            among = [heading["prompt_id"] in prompt_ids for heading in rows.headings]
            if any(among):
                taken.append(rows.pick([row for row, one in enumerate(among) if one]))
            if not all(among):
                left.append(rows.pick([row for row, one in enumerate(among) if not one]))
        self.parts = left
        return taken


def request_columns(request: Request, kind: str) -> Heading:
    """The columns that name a request; `kind` is live or dense."""
    return {
        "request_id": request.request_id,
        "prompt_id": request.prompt_id,
        "category": request.category,
        "turn": request.turn,
        "kind": kind,
    }


def headings(records: Sequence[RoundRecord]) -> list[Heading]:
    """Headings of the rows of some rounds."""
    return [
        {
            **request_columns(request, "live"),
            "offered_width": record.offered_width,
            "top_k": record.top_k,
            "batch_size": len(record.requests),
            "policy_digest": record.policy_digest,
            **vars(record.times),
        }
        for record in records
        for request in record.requests
    ]


def join(parts: Sequence[RoundRows]) -> RoundRows:
    """All rows of at least one part, second axes padded to the longest."""

    def joined(name: str) -> Tensor:
        tensors = [part.tensors[name] for part in parts]
        if tensors[0].dim() > 1:
            longest, fill = max(one.shape[1] for one in tensors), FILLS.get(name, 0)
            tensors = [pad(one, (0, longest - one.shape[1]), value=fill) for one in tensors]
        return torch.cat(tensors)

    return RoundRows(
        [heading for part in parts for heading in part.headings],
        {name: joined(name) for name in parts[0].tensors},
    )


# --------------------------------------------------------------------------- on the device


def alike(records: Iterable[RoundRecord]) -> Iterator[list[RoundRecord]]:
    """Runs of rounds of equal shape, in order, as many as may be read together."""

    def signature(record: RoundRecord) -> tuple[object, ...]:
        tensors = (record.pool.joint_logp, record.submitted, record.target_logits)
        return (_is_greedy(record), record.top_k, *(tensor.shape[1:] for tensor in tensors))

    for _, run in groupby(records, signature):
        rounds = list(run)
        size = max(1, MAX_STACK_BYTES // max(1, rounds[0].target_logits.nbytes))
        yield from (rounds[start : start + size] for start in range(0, len(rounds), size))


def _is_greedy(record: RoundRecord) -> bool:
    return record.target_logp_source is record.target_logits


def statistics(records: Sequence[RoundRecord]) -> dict[str, Tensor]:
    """The tensors that a trace needs of rounds that are alike, by name, on their device.

    Beside those of pool and record: `target_seen` `[R, P]`, the parent was verified, so the
    target's distribution after it is known; and where it is, `node_match` and `LOGIT_TENSORS`.
    Engines that sample do not say what the target would have drawn behind a token that was
    refused: their rows have `match_known` too, `[R, P]`.
    """
    pool = {name: _cat(getattr(one.pool, name) for one in records) for name in POOL_COLUMNS}
    widest = max(record.path.shape[1] for record in records)  # paths are as wide as trees are deep
    rest = {
        name: _cat(getattr(one, name) for one in records)
        for name in (*ROW_TENSORS, "submitted", "target_ids")
    }
    rest["path"] = _cat(pad(one.path, (0, widest - one.path.shape[1]), value=-1) for one in records)
    parent_slot = gather(slot_of(rest["submitted"], pool["parent"].shape[1]), pool["parent"], -1)
    seen, slot = parent_slot >= 0, parent_slot.clamp(min=0)
    match = seen & (gather(rest["target_ids"], slot, -1) == pool["token_ids"])
    read = read_on_device if records[0].target_logits.is_cuda else read_on_host
    logits = read(records, seen, slot, pool["token_ids"], pool["sibling_rank"])
    views = dict(zip(LOGIT_TENSORS, logits, strict=True))
    return rest | pool | views | {"target_seen": seen, "node_match": match}


def _cat(parts: Iterable[Tensor]) -> Tensor:
    tensors = list(parts)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def slot_of(submitted: Tensor, num_nodes: int) -> Tensor:
    """`[R, P]` int64: where a pool node stands among the submitted, -1 if it does not.

    Args:
        submitted: `[R, N]` int64 pool indices, -1 padded. num_nodes: P.
    """
    shape = (submitted.shape[0], num_nodes + 1)  # padding lands in the extra column
    slots = torch.full(shape, -1, device=submitted.device)
    order = torch.arange(submitted.shape[1], device=submitted.device).expand_as(submitted)
    return slots.scatter_(1, submitted.masked_fill(submitted < 0, num_nodes), order)[:, :-1]


def read_on_device(
    records: Sequence[RoundRecord], seen: Tensor, slot: Tensor, tokens: Tensor, sibling: Tensor
) -> tuple[Tensor, ...]:
    """Features of each node from the logits, with no shape that depends on values.

    Args:
        seen, slot: `[R, P]`, whether a node's parent was verified, and its place among the N.
        tokens, sibling: `[R, P]`, the node's token and rank among its siblings.

    Returns:
        `[R, P]` each, of any value where not `seen`: log-probability under the distribution drawn
        from, -inf where top-k or top-p cut it; 1 + number of strictly larger raw logits; the two
        largest raw logits at the parent.
    """
    logits = _cat(record.target_logits for record in records)
    num_rows, num_slots = logits.shape[:2]
    width = max(1, records[0].top_k)
    at = torch.arange(num_rows, device=slot.device)[:, None] * num_slots + slot
    # The k-th drafted child's token of every verified node, -1 for none; the last row is scrap.
    table = at.new_full((num_rows * num_slots + 1, width), -1)
    place = at.masked_fill(~seen, num_rows * num_slots) * width + sibling
    table.view(-1).scatter_(0, place.flatten(), tokens.flatten())
    raw = drawn = token_ranks(logits.flatten(0, 1), table[:-1])
    if not _is_greedy(records[0]):
        source = _cat(record.target_logp_source for record in records)
        drawn = token_ranks(source.flatten(0, 1), table[:-1])
    logp = drawn.logits[at, sibling] - drawn.log_sum_exp[at]
    return logp, raw.num_larger[at, sibling] + 1, *raw.top_two[at].unbind(-1)


def read_on_host(
    records: Sequence[RoundRecord], seen: Tensor, slot: Tensor, tokens: Tensor, sibling: Tensor
) -> tuple[Tensor, ...]:
    """The same in float32 for the CPU, where it competes with decoding for cores.

    Only parents of drafted nodes are copied and read, E of the R·N verified ones: about half of a
    tree are leaves, and reading logits is most of the cost of recording.
    """
    num_slots = records[0].submitted.shape[1]
    is_parent = torch.zeros(len(seen), num_slots, dtype=torch.bool)
    row, node = seen.nonzero(as_tuple=True)
    is_parent[row, slot[row, node]] = True
    is_parent[:, 0] = True  # so that there is one
    at = (is_parent.flatten().cumsum(0) - 1).view_as(is_parent).gather(1, slot)
    parents = is_parent.split([len(record.requests) for record in records])
    pairs = list(zip(records, parents, strict=True))
    logits = _cat(record.target_logits[among] for record, among in pairs).float()
    source = logits
    if not _is_greedy(records[0]):
        source = _cat(record.target_logp_source[among] for record, among in pairs).float()
    children = logits.new_full((len(logits), max(1, records[0].top_k)), float("inf"))
    children[at[seen], sibling[seen]] = logits[at[seen], tokens[seen]]
    top1, top2, larger = order_statistics(logits, children)
    return source.log_softmax(-1)[at, tokens], larger[at, sibling] + 1, top1[at], top2[at]


def order_statistics(logits: Tensor, children: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two largest logits, and for each child the number of strictly larger ones.

    numpy compares into bytes and reduces them with vector instructions, torch does not: at E = 48,
    V = 6144, K = 8 one core of the build machine takes 0.5 ms, and 1.9 ms for a loop in torch.

    Args:
        logits: `[E, V]` float32.
        children: `[E, K]` float32, +inf for none.

    Returns:
        `[E]` float32, `[E]` float32, `[E, K]` int64.
    """
    rows, bounds = logits.numpy(), children.numpy()
    each, best = np.arange(len(rows)), rows.argmax(-1)
    rest = rows.copy()
    rest[each, best] = -np.inf
    larger = [_count_larger(rows, bounds[:, child, None]) for child in range(bounds.shape[1])]
    return (
        torch.from_numpy(rows[each, best]),
        torch.from_numpy(rest.max(-1)),
        torch.from_numpy(np.stack(larger, -1)),
    )


def _count_larger(rows: npt.NDArray[Any], bound: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Entries of each row above its bound: eight 0/1 bytes are added at once, as one word.

    128 words are summed before their bytes are, so no byte exceeds 128 and none carries over.
    """
    length = rows.shape[1]
    flags = np.zeros((len(rows), -(-length // 1024) * 1024), np.bool_)
    np.greater(rows, bound, out=flags[:, :length])
    words = flags.view(np.uint64).reshape(len(rows), -1, 128).sum(-1)
    counts: npt.NDArray[Any] = words.view(np.uint8).sum(-1, dtype=np.int64)
    return counts


# --------------------------------------------------------------------------- on the host


def to_tables(rows: RoundRows) -> Tables:
    """In the columns, order and types of the trace format.

    Shapes below are `[R, P]` of nodes and `[R]` of rows.
    """
    t, depth = rows.tensors, rows.tensors["offered_depth"]
    size = t["parent"].shape[1]
    # Deeper nodes were drafted for others of the batch.
    kept = (t["parent"] > PAD) & (t["depth"] <= depth[:, None])
    verified = slot_of(t["submitted"], size) >= 0
    rank = _confidence_rank(t["joint_logp"], verified)
    path = gather(t["submitted"], t["path"], -1)
    num_admitted = (path >= 0).sum(1) - 1  # before end of text and limit cut the path
    num_accepted = torch.minimum(num_admitted, t["num_emitted"])
    behind = torch.arange(path.shape[1]) > num_accepted[:, None]
    emitted = slot_of(path.masked_fill(behind, -1), size) >= 0
    deepest = num_admitted[:, None]
    tcr = rank.gather(1, path.gather(1, deepest))[:, 0]
    # Φ over what the row was offered, so that it does not depend on the rest of its batch.
    offered = t["parent"].masked_fill(~kept, PAD)
    entropy = phi(DraftPool(**{name: t[name] for name in POOL_COLUMNS} | {"parent": offered}))
    rounds: dict[str, Any] = {
        **{name: [heading[name] for heading in rows.headings] for name in rows.headings[0]},
        **{name: t[name] for name in ROW_TENSORS},
        "root_token_id": t["token_ids"][:, 0],
        "bonus_token_id": t["target_ids"].gather(1, t["path"].gather(1, deepest))[:, 0],
        "num_drafted": kept.sum(1) - 1,
        "num_verified": verified.sum(1),
        "num_accepted": num_accepted,
        "fully_accepted": (num_admitted == depth) & (depth > 0),
        "tcr": (tcr, tcr > 0),
        "phi": (entropy, depth > 0),
        "phi_depth": (depth, depth > 0),
    }
    row, node = kept.nonzero(as_tuple=True)
    seen, top1, top2 = t["target_seen"], t["target_top1_logit"], t["target_top2_logit"]
    slots = {
        **{name: t[name] for name in ("depth", "sibling_rank", "draft_logp", "joint_logp")},
        "parent_idx": t["parent"],
        "token_id": t["token_ids"],
        "parent_entropy": t["entropy"],
        "parent_topk_entropy": t["topk_entropy"],
        "expanded": t["expanded"] & (t["depth"] < depth[:, None]),
        "verified": verified,
    }
    nullable = {
        "confidence_rank": (rank, rank > 0),
        "path_accepted": (emitted, verified),
        "node_match": (t["node_match"], t.get("match_known", seen)),
        **{name: (t[name], seen) for name in LOGIT_TENSORS},
        "target_ratio": (top2 / top1, seen),
        "target_margin": (top1 - top2, seen),
    }
    nodes = {
        "request_id": repeat(rounds["request_id"], row),
        "round_idx": t["round_idx"][row],
        "node_idx": node,
        **{name: values[kept] for name, values in slots.items()},
        **{name: (values[kept], known[kept]) for name, (values, known) in nullable.items()},
    }
    return {"rounds": table_of("rounds", rounds), "nodes": table_of("nodes", nodes)}


def _confidence_rank(joint_logp: Tensor, verified: Tensor) -> Tensor:
    """`[R, P]` int64: 1 for the likeliest verified draft node, ties to the earlier; else 0."""
    ranked = verified.clone()
    ranked[:, 0] = False  # the root was not drafted
    order = rank_order(joint_logp.masked_fill(~ranked, float("-inf")))
    places = torch.arange(1, order.shape[1] + 1).expand_as(order)
    return torch.zeros_like(order).scatter_(1, order, places).masked_fill(~ranked, 0)


def repeat(texts: list[str], row: Tensor) -> pa.DictionaryArray:
    """A dictionary column that repeats `texts[i]` for every i in `row`."""
    import pyarrow as pa

    unique = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    codes = np.array([unique[text] for text in texts], np.int32)[row.numpy()]
    return pa.DictionaryArray.from_arrays(codes, list(unique))


def table_of(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """A table of the trace format from its columns, in the format's order and types.

    Args:
        columns: by name: a tensor, a pair of a tensor and where it is known, a list, an Arrow
            array, or one value for all rows; null where a nullable one is absent.
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
