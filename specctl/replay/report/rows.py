"""Both tables of a trace set as arrays: rounds whole, nodes a block of whole trees at a time.

Rows of `rounds` number one a position and are held; rows of `nodes` number a thousand times that
and never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import TraceEmptyError, TraceMismatchError
from specctl.logs.positions import Bools, Floats, Ints, Longs
from specctl.logs.trace_columns import Traces
from specctl.parquet import read_batches, read_columns

NODE_ROWS = 1 << 19
"""Node rows of a block, give or take a tree."""
ROUND_COLUMNS = (
    "offered_depth",
    "num_verified",
    "num_drafted",
    "num_accepted",
    "num_emitted",
    "tcr",
    "phi",
    "phi_depth",
)
SHARED = ("request_id", "depth", "joint_logp")
OF_KIND = {"dense": ("path_accepted",), "live": ("node_idx", "parent_idx", "node_match")}
"""What tells a node's fate, by kind of trace."""
ACCEPTED, REJECTED, UNKNOWN = 1, 0, -1


@dataclass(frozen=True)
class RoundRows:
    """R rounds (in dense traces: positions) of P prompts.

    Attributes:
        kind: `dense` or `live`.
        prompt, category: `[R]` int32 codes into `prompt_ids` and `categories`.
        prompt_of: request id to prompt code.
        offered_depth, num_verified, num_drafted, accepted, emitted: `[R]` int32, as in the trace.
        tcr: `[R]` int32 rank, 0 where the trace has none. phi_depth: `[R]` int32, 0 for none.
        phi: `[R]` float64 nats, NaN for none.
    """

    kind: str
    prompt: Ints
    prompt_ids: tuple[str, ...]
    category: Ints
    categories: tuple[str, ...]
    prompt_of: dict[str, int]
    offered_depth: Ints
    num_verified: Ints
    num_drafted: Ints
    accepted: Ints
    emitted: Ints
    tcr: Ints
    phi: Floats
    phi_depth: Ints

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.prompt_ids)

    @property
    def is_cut(self) -> Bools:
        """`[R]`: the text ended on the accepted path, so nothing is known of the next depth."""
        return np.equal(self.emitted, self.accepted)


def read_rounds(traces: Traces) -> RoundRows:
    """The `rounds` table of every commit.

    Raises:
        TraceEmptyError: no rounds. TraceMismatchError: live and dense rounds together.
    """
    import pyarrow as pa

    names = ("request_id", "prompt_id", "category", "kind", *ROUND_COLUMNS)
    files = [files["rounds"] for files in traces.commit_files()]
    if not files:
        raise TraceEmptyError("traces", expected="rounds", found="none", fix="collect some prompts")
    parts = [read_columns(path, names) for path in files]
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    kind = _one_kind(table["kind"].unique().to_pylist())
    prompt, prompt_ids = _coded(table["prompt_id"])
    category, categories = _coded(table["category"])
    request, request_ids = _coded(table["request_id"])
    owner = np.zeros(len(request_ids), np.int32)
    owner[request] = prompt
    prompt_of = dict(zip(request_ids, owner.tolist(), strict=True))
    return RoundRows(
        kind,
        prompt,
        prompt_ids,
        category,
        categories,
        prompt_of,
        offered_depth=_ints(table["offered_depth"]),
        num_verified=_ints(table["num_verified"]),
        num_drafted=_ints(table["num_drafted"]),
        accepted=_ints(table["num_accepted"]),
        emitted=_ints(table["num_emitted"]),
        tcr=_ints(table["tcr"]),
        phi=table["phi"].to_numpy().astype(np.float64),
        phi_depth=_ints(table["phi_depth"]),
    )


def _one_kind(kinds: list[str]) -> str:
    if len(kinds) != 1 or kinds[0] not in OF_KIND:
        raise TraceMismatchError(
            "traces",
            expected="all rounds live, or all dense",
            found=" and ".join(map(repr, kinds)),
            fix="report on these folders one at a time",
        )
    return kinds[0]


def _coded(column: Any) -> tuple[Ints, tuple[str, ...]]:
    """Codes of the names that occur, in their order of appearance, and the names."""
    import pyarrow as pa

    found = column.cast(pa.string()).combine_chunks().dictionary_encode()
    return found.indices.to_numpy().astype(np.int32), tuple(found.dictionary.to_pylist())


def _ints(column: Any) -> Ints:
    """Null, which no count or rank is, becomes 0."""
    import pyarrow.compute as pc

    return np.asarray(pc.fill_null(column, 0).to_numpy(), np.int32)


@dataclass(frozen=True)
class NodeBlock:
    """T nodes of some whole trees, tree after tree, levels ascending.

    Attributes:
        prompt: `[T]` int32. depth: `[T]` int16. joint_logp: `[T]` float32, nats.
        fate: `[T]` int8: is the path to the node the target's own? 1 yes, 0 no, -1 not known.
    """

    prompt: Ints
    depth: Any
    joint_logp: Any
    fate: Any


def node_blocks(traces: Traces, rounds: RoundRows) -> Iterator[NodeBlock]:
    """All nodes of a trace set, about `NODE_ROWS` at a time."""
    for files in traces.commit_files():
        for arrays in whole_trees(_batches(files["nodes"], rounds)):
            fate = _dense_fate if rounds.kind == "dense" else _live_fate
            yield NodeBlock(arrays["prompt"], arrays["depth"], arrays["joint_logp"], fate(arrays))


def _batches(path: Path, rounds: RoundRows) -> Iterator[dict[str, Any]]:
    for batch in read_batches(path, (*SHARED, *OF_KIND[rounds.kind]), NODE_ROWS):
        yield _arrays(batch, rounds.prompt_of)


def _arrays(batch: Any, prompt_of: dict[str, int]) -> dict[str, Any]:
    import pyarrow.compute as pc

    requests = batch.column("request_id")
    owner = np.array([prompt_of[name] for name in requests.dictionary.to_pylist()], np.int32)
    found = {"prompt": owner[requests.indices.to_numpy()]}
    for name in batch.schema.names[1:]:
        column = batch.column(name)
        if name in ("path_accepted", "node_match"):
            column = pc.fill_null(column.cast("int8"), UNKNOWN)
        found[name] = column.to_numpy(zero_copy_only=False)
    return found


def whole_trees(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same rows, cut only before a root."""
    held: list[dict[str, Any]] = []
    for batch in batches:
        roots = np.flatnonzero(batch["depth"] == 0)
        if len(roots) and (held or roots[-1] > 0):
            cut = int(roots[-1])
            yield _joined([*held, {name: values[:cut] for name, values in batch.items()}])
            held, batch = [], {name: values[cut:] for name, values in batch.items()}
        held.append(batch)
    if held:
        yield _joined(held)


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _dense_fate(arrays: dict[str, Any]) -> Any:
    """Dense labels say it: false off the path, null where the text ended first."""
    return arrays["path_accepted"]


def _live_fate(arrays: dict[str, Any]) -> Any:
    """The target's choice followed down the tree.

    `path_accepted` will not do: it is null at nodes that were not submitted and false beyond the
    end of the text, both of which the target's own choices may still tell.
    """
    depth, match = arrays["depth"], arrays["node_match"]
    parent = _parent_rows(arrays)
    fate = np.where(depth == 0, ACCEPTED, UNKNOWN).astype(np.int8)
    for level in range(1, int(depth.max(initial=0)) + 1):
        rows = np.flatnonzero(depth == level)
        above = fate[parent[rows]]
        fate[rows] = np.where(above == ACCEPTED, match[rows], above)
    return fate


def _parent_rows(arrays: dict[str, Any]) -> Longs:
    """`[T]` row of each node's parent, its own at a root. Node numbers of a tree ascend, perhaps
    with gaps."""
    tree = np.cumsum(arrays["depth"] == 0)
    stride = int(arrays["node_idx"].max(initial=0)) + 1
    key = tree * stride + arrays["node_idx"]
    wanted = tree * stride + np.maximum(arrays["parent_idx"], 0)
    return np.asarray(np.searchsorted(key, wanted), np.int64)
