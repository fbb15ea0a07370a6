"""Writes a dense trace of random trees, as large as wanted: to measure readers, never to fit.

The drafter's distributions are random softmaxes of varying sharpness, the target picks a child with
the probability that the drafter gives it, and trees grow by the rule of dense collection. Texts
do not exist: positions of one request are independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.collect.trace_writer import TraceWriter, make_header
from specctl.policy import FullTree, Policy, build_shape, policy_digest
from specctl.policy.growing import grow_tree
from specctl.policy.rules import Frontier, Level, fresh_start
from specctl.runtime.requests import Sampling, Stopwatch
from specctl.trace import TABLES, arrow_schema
from specctl.tree import Children, DraftPool

DIGESTS = {f"{name}_digest": "sha256:" + 64 * "0" for name in ("target", "drafter", "tokenizer")}
CATEGORIES = ("arithmetic", "code", "prose")
POSITIONS = 128
"""Positions of one request; one request a prompt."""


class RandomSource:
    """Children with random probabilities; positions differ in how sure the drafter is."""

    def __init__(self, num_rows: int, generator: torch.Generator) -> None:
        self.generator = generator
        self.sharpness = 1 + 3 * torch.rand(num_rows, 1, 1, generator=generator)

    def children(self, level: Level, frontier: Frontier, top_k: int) -> Children:
        """See `specctl.policy.growing.ChildSource`."""
        del level
        shape = (*frontier.index.shape, 4 * top_k)
        logits = self.sharpness * torch.randn(shape, generator=self.generator)
        logp = logits.log_softmax(-1).sort(-1, descending=True).values
        entropy = -(logp.exp() * logp).sum(-1)
        ids = torch.arange(top_k).expand(*shape[:2], -1)
        return Children(ids, logp[..., :top_k].contiguous(), entropy, 0.8 * entropy)


def write(out: Path, shape: FullTree, num_nodes: int, prompts_per_commit: int, seed: int) -> int:
    """Commits prompts until there are `num_nodes` node rows; the number there are then."""
    generator = torch.Generator().manual_seed(seed)
    policy, written, prompt = Policy(shape=shape), 0, 0
    with TraceWriter.open(out, header(policy)) as writer:
        while written < num_nodes:
            numbers = range(prompt, prompt + prompts_per_commit)
            parts = [tables_of(number, policy, generator) for number in numbers]
            tables = {name: concatenated([part[name] for part in parts]) for name in TABLES}
            writer.commit([f"p{number:06d}" for number in numbers], tables)
            written, prompt = written + tables["nodes"].num_rows, numbers.stop
    return written


def header(policy: Policy) -> Any:
    shape = policy.shape
    assert isinstance(shape, FullTree)
    support = {
        "top_k": shape.top_k,
        "width": shape.width or shape.top_k,
        "depth": shape.depth,
        "nested": shape.nested,
    }
    names = {"target": "synthetic", "drafter": "synthetic"}
    return make_header(policy, Sampling(), collect={"dense": support, **names}, **DIGESTS)


@torch.inference_mode()
def tables_of(number: int, policy: Policy, generator: torch.Generator) -> dict[str, Any]:
    """Both tables of one prompt."""
    rule = build_shape(policy.shape)
    roots = torch.zeros(POSITIONS, dtype=torch.int64)
    source = RandomSource(POSITIONS, generator)
    pool = grow_tree(rule, rule.begin(fresh_start(POSITIONS)), source, roots, Stopwatch())
    on_path = random_path(pool, generator)
    valid = pool.valid
    remaining = torch.arange(POSITIONS, 0, -1)
    accepted = torch.minimum(on_path.sum(1) - 1, remaining)
    common = {"request_id": f"p{number:06d}/0", "prompt_id": f"p{number:06d}"}
    rounds = dict(round_values(valid, accepted, policy)) | common
    rounds["category"] = CATEGORIES[number % len(CATEGORIES)]
    nodes = dict(node_values(pool, on_path, remaining)) | {"request_id": common["request_id"]}
    return {
        "rounds": table("rounds", rounds, POSITIONS),
        "nodes": table("nodes", nodes, int(valid.sum())),
    }


def random_path(pool: DraftPool, generator: torch.Generator) -> Tensor:
    """`[B, P]` bool: below every node the target picks a child by the drafter's probabilities."""
    coin = torch.rand(pool.parent.shape, generator=generator).gather(1, pool.parent.clamp(min=0))
    prob = pool.draft_logp.exp()
    # Siblings stand in a row: where a node's share of the unit interval starts.
    running = prob.cumsum(1) - prob
    first = torch.arange(pool.num_slots) - pool.sibling_rank
    start = running - running.gather(1, first.clamp(min=0))
    match = pool.valid & (coin >= start) & (coin < start + prob)
    match[:, 0] = True
    path = match.clone()
    for _ in range(int(pool.depth.max())):
        path = match & path.gather(1, pool.parent.clamp(min=0))
    return path


def round_values(valid: Tensor, accepted: Tensor, policy: Policy) -> Iterator[tuple[str, Any]]:
    """Columns of `rounds` that are not the same for every trace."""
    shape, rows = policy.shape, np.arange(POSITIONS)
    assert isinstance(shape, FullTree)
    yield from {"round_idx": rows, "position": rows + 1, "context_tokens": rows + 33}.items()
    yield "kind", "dense"
    yield "offered_depth", shape.depth
    yield "offered_width", shape.width or shape.top_k
    yield "top_k", shape.top_k
    yield "num_drafted", (valid.sum(1) - 1).numpy()
    yield "num_verified", (accepted + 1).numpy()
    yield "num_accepted", accepted.numpy()
    yield "num_emitted", np.minimum(accepted.numpy() + 1, POSITIONS - rows)
    yield "fully_accepted", (accepted == shape.depth).numpy()
    yield "policy_digest", policy_digest(policy)


def node_values(pool: DraftPool, on_path: Tensor, remaining: Tensor) -> Iterator[tuple[str, Any]]:
    """Columns of `nodes`; acceptance is null where the text followed the path and ended."""
    import pyarrow as pa

    valid = pool.valid
    ended = on_path & (pool.depth == remaining[:, None])
    beyond = torch.zeros_like(ended)
    for _ in range(int(pool.depth.max())):
        beyond = pool.valid & (ended | beyond).gather(1, pool.parent.clamp(min=0))
        beyond[:, 0] = False
    on_path = on_path & ~beyond
    index = valid.cumsum(1) - 1
    parent = index.gather(1, pool.parent.clamp(min=0)).masked_fill(pool.parent < 0, -1)
    rows = torch.arange(len(valid))[:, None].expand_as(index)
    values = {
        "round_idx": rows,
        "node_idx": index,
        "parent_idx": parent,
        "depth": pool.depth,
        "token_id": pool.token_ids,
        "sibling_rank": pool.sibling_rank,
        "draft_logp": pool.draft_logp,
        "joint_logp": pool.joint_logp,
        "parent_entropy": pool.entropy,
        "parent_topk_entropy": pool.topk_entropy,
        "expanded": pool.expanded,
        "verified": on_path,
    }
    yield from ((name, value[valid].numpy()) for name, value in values.items())
    yield "path_accepted", pa.array(on_path[valid].numpy(), mask=beyond[valid].numpy())


def table(name: str, values: dict[str, Any], num_rows: int) -> Any:
    """An Arrow table of the trace format: constants repeated, absent nullable columns null, other
    absent ones 0."""
    import pyarrow as pa

    arrays = []
    for column in TABLES[name]:
        value = values.get(column.name)
        if isinstance(value, np.ndarray | pa.Array):
            arrays.append(pa.array(value))
        elif value is None and column.nullable:
            arrays.append(pa.nulls(num_rows))
        else:
            empty = "" if column.dtype == "dictionary" else 0
            scalar = pa.scalar(empty if value is None else value)
            arrays.append(pa.repeat(scalar, num_rows))
    names = [column.name for column in TABLES[name]]
    return pa.Table.from_arrays(arrays, names).cast(arrow_schema(name))


def concatenated(parts: list[Any]) -> Any:
    """One table; dictionaries of the parts are unified."""
    import pyarrow as pa

    return pa.concat_tables(parts).unify_dictionaries().combine_chunks()


def renamed(rows: Any, prefix: str) -> Any:
    """A table of either kind with other prompt and request ids: the rows of a set once more."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in {"prompt_id", "request_id"} & set(rows.column_names):
        column = rows[name].unify_dictionaries().combine_chunks()
        names = pc.binary_join_element_wise(prefix, column.dictionary.cast("string"), "")
        fresh = pa.DictionaryArray.from_arrays(column.indices, names)
        rows = rows.set_column(rows.schema.get_field_index(name), name, fresh)
    return rows
