"""Rounds as rows of the two trace tables: no code here goes node by node.

    RoundRecord ─statistics─► tensors, which leave the device ─► RoundRows ─to_tables─► Arrow tables

`statistics` runs over rounds that arrived together, on their device and without waiting for it, and
leaves their logits behind. `to_tables` runs once a segment, over all of its rounds, because fixed
costs of tensor calls would otherwise dominate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.features import NODE_TENSORS, DraftPool, phi
from specctl.kernels.token_ranks import token_ranks
from specctl.policy.rules import rank_order
from specctl.runtime.requests import Request, RoundRecord
from specctl.trace import TABLES, TIME_COLUMNS, arrow_schema
from specctl.tree import PAD, TokenTree, gather

if TYPE_CHECKING:
    import pyarrow as pa

    from specctl.logs.parquet import Tables

MAX_STACK_BYTES = 32 << 20
"""Logits of rounds that are read together at most. Every tensor call of the recording thread
competes with decoding for the interpreter lock, so small rounds are joined; larger ones are read in
place, without a copy."""
ROW_TENSORS = ("round_idx", "position", "context_tokens", "offered_depth", "num_emitted")
SLOT_TENSORS = ("submitted", "target_ids", "path")
FILLS = {"parent": PAD, "joint_logp": float("-inf"), "submitted": -1, "path": -1}
"""Values of padding where rounds of different sizes are joined; 0 or false for the others."""
FACTS = ("offered_width", "top_k", "batch_size", "policy_digest", *TIME_COLUMNS)
"""Columns that the rows of one round share."""
DENSE_ONLY = ("target_entropy", "js_distance")
"""Node columns of dense logs: a live round has dropped the drafter's logits when it verifies."""
Masked = np.ma.MaskedArray[tuple[int], np.dtype[Any]]
Columns = dict[str, Union[npt.NDArray[Any], Masked, list[str], "pa.DictionaryArray"]]
"""Column name to numpy array (masked where it may be null) or strings."""


@dataclass(frozen=True)
class RoundRows:
    """R rows (a request in a round) on the host, without logits.

    Attributes:
        requests, facts: R of each; facts are values of `FACTS`.
        tensors: by name; the first axis is R, a second is padded.
    """

    requests: list[Request]
    facts: list[tuple[Any, ...]]
    tensors: dict[str, Tensor]

    @cached_property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pick(self, rows: Sequence[int]) -> RoundRows:
        """Some of the rows; this object itself where that is all of them."""
        if len(rows) == len(self.requests):
            return self
        index = torch.tensor(rows, dtype=torch.int64)
        return RoundRows(
            [self.requests[row] for row in rows],
            [self.facts[row] for row in rows],
            {name: tensor[index] for name, tensor in self.tensors.items()},
        )


def headings(records: Sequence[RoundRecord]) -> tuple[list[Request], list[tuple[Any, ...]]]:
    """Requests and facts of rounds, row by row: the part of `RoundRows` that the host knows."""
    facts = []
    for record in records:
        size, times = len(record.requests), record.times
        shared = (record.offered_width, record.top_k, size, record.policy_digest)
        facts += [(*shared, *(getattr(times, name) for name in TIME_COLUMNS))] * size
    return [request for record in records for request in record.requests], facts


def join(parts: Sequence[RoundRows]) -> RoundRows:
    """All rows of at least one part, second axes padded to the longest."""

    def joined(name: str) -> Tensor:
        tensors = [part.tensors[name] for part in parts]
        if tensors[0].dim() > 1:
            longest, fill = max(one.shape[1] for one in tensors), FILLS.get(name, 0)
            tensors = [pad(one, (0, longest - one.shape[1]), value=fill) for one in tensors]
        return torch.cat(tensors)

    return RoundRows(
        [request for part in parts for request in part.requests],
        [facts for part in parts for facts in part.facts],
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

    `[R, P]`, beside those of pool and record, each meaningful where `target_seen`:
        target_seen: the parent was verified, so the target's distribution after it is known.
        target_match: the target chose this token there.
        target_logp: log-probability under the distribution that was drawn from; -inf where top-k
            or top-p cut it.
        target_rank: 1 + number of strictly larger raw logits.
        target_top1, target_top2: the two largest raw logits at the parent.
    """
    trees = [record.pool.tree for record in records]
    tree = {f.name: _cat(getattr(one, f.name) for one in trees) for f in fields(trees[0])}
    pool = {name: _cat(getattr(one.pool, name) for one in records) for name in NODE_TENSORS}
    widest = max(record.path.shape[1] for record in records)  # paths are as wide as trees are deep
    rest = {
        name: _cat(getattr(one, name) for one in records)
        for name in (*ROW_TENSORS, "submitted", "target_ids")
    }
    rest["path"] = _cat(pad(one.path, (0, widest - one.path.shape[1]), value=-1) for one in records)
    parent_slot = gather(slot_of(rest["submitted"], tree["parent"].shape[1]), tree["parent"], -1)
    seen, slot = parent_slot >= 0, parent_slot.clamp(min=0)
    match = seen & (gather(rest["target_ids"], slot, -1) == tree["token_ids"])
    read = read_on_device if records[0].target_logits.is_cuda else read_on_host
    nodes = tree["token_ids"], pool["sibling_rank"]
    views = read(records, seen, slot, *nodes)
    views |= {"target_seen": seen, "target_match": match}
    return rest | tree | pool | views


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
) -> dict[str, Tensor]:
    """What the logits say of each node, without any shape that depends on values.

    Args:
        seen, slot: `[R, P]`, whether a node's parent was verified, and its place among the N.
        tokens, sibling: `[R, P]`, the node's token and rank among its siblings.
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
    return {
        "target_logp": drawn.logits[at, sibling] - drawn.log_sum_exp[at],
        "target_rank": raw.num_larger[at, sibling] + 1,
        "target_top1": raw.top_two[at, 0],
        "target_top2": raw.top_two[at, 1],
    }


def read_on_host(
    records: Sequence[RoundRecord], seen: Tensor, slot: Tensor, tokens: Tensor, sibling: Tensor
) -> dict[str, Tensor]:
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
    return {
        "target_logp": source.log_softmax(-1)[at, tokens],
        "target_rank": larger[at, sibling] + 1,
        "target_top1": top1[at],
        "target_top2": top2[at],
    }


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
    t, requests = rows.tensors, rows.requests
    size, depth = t["parent"].shape[1], t["offered_depth"]
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
    bonus = t["target_ids"].gather(1, t["path"].gather(1, deepest))[:, 0]
    # Φ over what the row was offered, so that it does not depend on the rest of its batch.
    tree = TokenTree(
        t["token_ids"], t["parent"].masked_fill(~kept, PAD), t["depth"], t["draft_logp"]
    )
    entropy = phi(DraftPool(tree, **{name: t[name] for name in NODE_TENSORS}))
    facts = dict(zip(FACTS, zip(*rows.facts, strict=True), strict=True))
    rounds: Columns = {
        "request_id": [request.request_id for request in requests],
        "prompt_id": [request.prompt_id for request in requests],
        "category": [request.category for request in requests],
        "turn": np.array([request.turn for request in requests]),
        "kind": ["live"] * len(requests),
        **{name: np.array(values) for name, values in facts.items()},
        "policy_digest": list(facts["policy_digest"]),
        **{name: t[name].numpy() for name in ROW_TENSORS},
        "root_token_id": t["token_ids"][:, 0].numpy(),
        "bonus_token_id": bonus.numpy(),
        "num_drafted": (kept.sum(1) - 1).numpy(),
        "num_verified": verified.sum(1).numpy(),
        "num_accepted": num_accepted.numpy(),
        "fully_accepted": ((num_admitted == depth) & (depth > 0)).numpy(),
        "tcr": nullable(tcr, tcr > 0),
        "phi": nullable(entropy, depth > 0),
        "phi_depth": nullable(depth, depth > 0),
    }
    row, node = kept.nonzero(as_tuple=True)
    seen, is_verified, own_rank = t["target_seen"][kept], verified[kept], rank[kept]
    top1, top2 = t["target_top1"][kept], t["target_top2"][kept]
    plain = ("depth", "sibling_rank", "draft_logp", "joint_logp")
    nodes: Columns = {
        "request_id": repeat([request.request_id for request in requests], row),
        "round_idx": t["round_idx"][row].numpy(),
        "node_idx": node.numpy(),
        **{name: t[name][kept].numpy() for name in plain},
        "parent_idx": t["parent"][kept].numpy(),
        "token_id": t["token_ids"][kept].numpy(),
        "parent_entropy": t["entropy"][kept].numpy(),
        "parent_topk_entropy": t["topk_entropy"][kept].numpy(),
        "expanded": (t["expanded"] & (t["depth"] < depth[:, None]))[kept].numpy(),
        "verified": is_verified.numpy(),
        "confidence_rank": nullable(own_rank, own_rank > 0),
        "node_match": nullable(t["target_match"][kept], seen),
        "path_accepted": nullable(emitted[kept], is_verified),
        "target_logp": nullable(t["target_logp"][kept], seen),
        "target_rank": nullable(t["target_rank"][kept], seen),
        "target_top1_logit": nullable(top1, seen),
        "target_top2_logit": nullable(top2, seen),
        "target_ratio": nullable(top2 / top1, seen),
        "target_margin": nullable(top1 - top2, seen),
        **{name: nullable(top1, torch.zeros_like(seen)) for name in DENSE_ONLY},
    }
    return {"rounds": table_of("rounds", rounds), "nodes": table_of("nodes", nodes)}


def _confidence_rank(joint_logp: Tensor, verified: Tensor) -> Tensor:
    """`[R, P]` int64: 1 for the likeliest verified draft node, ties to the earlier; else 0."""
    ranked = verified.clone()
    ranked[:, 0] = False  # the root was not drafted
    order = rank_order(joint_logp.masked_fill(~ranked, float("-inf")))
    places = torch.arange(1, order.shape[1] + 1).expand_as(order)
    return torch.zeros_like(order).scatter_(1, order, places).masked_fill(~ranked, 0)


def nullable(values: Tensor, known: Tensor) -> Masked:
    """A column that is null where not `known`."""
    return np.ma.MaskedArray(values.numpy(), mask=~known.numpy())


def repeat(texts: list[str], row: Tensor) -> pa.DictionaryArray:
    """A dictionary column that repeats `texts[i]` for every i in `row`."""
    import pyarrow as pa

    unique = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    codes = np.array([unique[text] for text in texts], np.int32)[row.numpy()]
    return pa.DictionaryArray.from_arrays(codes, list(unique))


def table_of(name: str, columns: Columns) -> pa.Table:
    """A table of the trace format from its columns, in the format's order and types."""
    import pyarrow as pa

    arrays = []
    for column in TABLES[name]:
        values = columns[column.name]
        if isinstance(values, list):
            arrays.append(pa.array(values, pa.string()).dictionary_encode())
        elif isinstance(values, np.ma.MaskedArray):
            arrays.append(pa.array(values.data, mask=np.ma.getmaskarray(values)))
        else:
            arrays.append(pa.array(values))
    rows = pa.Table.from_arrays(arrays, names=[column.name for column in TABLES[name]])
    return rows.cast(arrow_schema(name))
