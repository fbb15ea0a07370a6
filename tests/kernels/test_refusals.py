"""What ops refuse before anything runs: good calls, and how each is spoilt."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.bookkeeping import (
    lay_out,
    new_opened,
    new_settled,
    open_level,
    open_tree,
    settle,
)
from specctl.kernels.commit_kv import commit_kv
from specctl.kernels.node_features import node_features
from specctl.kernels.policy_eval import choose_bins, prune_level
from specctl.kernels.policy_eval.layout import (
    COLUMNS,
    BinTable,
    GateTable,
    Network,
    PolicyBuffer,
    PruneTable,
    pack,
)
from specctl.kernels.sample_tokens import sample_tokens
from specctl.kernels.token_ranks import token_ranks
from specctl.kernels.tree_attention import tree_attention
from specctl.kernels.tree_build import append_level, link_tree, select_nodes
from specctl.kernels.verify_tree import RunnerUp, verify_tree, walk_tree
from specctl.policy import EntropyBins, ScoredTree
from specctl.tree import DraftPool
from tests.kernels.conftest import FUSED
from tests.kernels.drawn import (
    BASE,
    Axis,
    Growth,
    Level,
    Round,
    buffer_of,
    drawn_axis,
    drawn_children,
    drawn_level,
    drawn_round,
    empty_pool,
    junk_pool,
    level_pool,
)
from tests.kernels.helpers import CPU, on_device
from tests.policy.scorers import random_network

Given = dict[str, Any]
LONG = torch.zeros(2, 3, dtype=torch.int64)
ROWS = torch.zeros(2, dtype=torch.int64)
SCORES = torch.zeros(2, 9)
BINS = buffer_of(EntropyBins(base=BASE, edges=(1.0,), gammas=(0.5, 1.0)), CPU)
NETWORK = buffer_of(ScoredTree(scorer=random_network(1, 4), beta=0.5, depth=3), CPU)
OPENED = new_opened(2, 3, 2, CPU)
CHOSEN, LEVEL = drawn_level(Level(2, 3, num_words=2, depth=2, parents=3, top_k=4), seed=0)
POOL = empty_pool(Growth(2, 2, 2, 3), CPU)
LINKS = torch.tensor([[-1, 0]])
TWO = RunnerUp(
    torch.zeros(1, 2, 2).long(),
    torch.zeros(1, 2, 2),
    LINKS[0, :1] > 0,
    torch.ones(1),
    denied=LINKS[0] > 0,
    filtered=torch.zeros(2, 9),
    node_at=LINKS.abs(),
)
KEYS = torch.zeros(1, 2, 8, 4)
GOOD: dict[Callable[..., Any], tuple[Any, ...]] = {
    node_features: (torch.zeros(2, 5), 1, 1),
    token_ranks: (torch.zeros(2, 3), ROWS[:, None]),
    sample_tokens: (torch.zeros(2, 4), ROWS, ROWS > 0),
    append_level: (
        *(POOL, LONG[:, :1], LONG[:, :1].bool()),
        *(drawn_children(np.random.default_rng(0), 2, 1, 3), 1, 1, 2),
    ),
    link_tree: (POOL, LONG[:, :1], 3, ROWS),
    select_nodes: (SCORES, 3, None),
    open_tree: (junk_pool(np.random.default_rng(0), 2, 4), ROWS, ROWS > 0, OPENED),
    open_level: (
        *CHOSEN._replace(above=CHOSEN.above[:2]),  # type: ignore[index]
        *(new_opened(2, 3, 2, CPU), *LEVEL.values()),
    ),
    lay_out: (*drawn_axis(Axis(2, 3), seed=0), 6, 9),
    settle: (drawn_round(Round(2, 3, 4, 5, 6), torch.float32, 0), new_settled(4, 3, CPU)),
    walk_tree: (LINKS, LINKS, LINKS, 1, TWO),
    verify_tree: (LINKS, LINKS > 0, 1),
    commit_kv: (torch.zeros(1, 1, 1, 2, 4), torch.tensor([0]), torch.tensor([[0]])),
    choose_bins: (BINS, level_pool(torch.zeros(2, 4), 0)),
    prune_level: (NETWORK, level_pool(torch.zeros(2, 4), 0), torch.zeros(2, 5), None, 1, 1, 2),
    tree_attention: (
        *(torch.zeros(2, 4, 4), KEYS, KEYS, ROWS[:1], torch.tensor([0, 2])),
        *(torch.ones(2, 1, dtype=torch.int32), 1.0, 2),
    ),
    pack: (BinTable([1.0], [1, 2], [4, 5], 1),),
    PolicyBuffer.write: (NETWORK, NETWORK),
}


def arguments(op: Callable[..., Any], changes: Given) -> Given:
    """Those of a good call but for what is changed: `opened.place` is a field of `opened`, and a
    function makes a value of the one that is there."""
    given = dict(zip(signature(op).parameters, GOOD[op], strict=False))
    for path, change in changes.items():
        name, _, field = path.partition(".")
        old = getattr(given[name], field) if field else given.get(name)
        new = change(old) if callable(change) else change
        if field:
            holder = given[name]
            fields = {field: new}
            new = (
                holder._replace(**fields)
                if isinstance(holder, tuple)
                else replace(holder, **fields)
            )
        given[name] = new
    return given


def axis_of(rows: int, columns: int) -> Given:
    """Arguments of `lay_out`."""
    return dict(
        zip(("tree", "prefix", "positions"), drawn_axis(Axis(rows, columns), 0), strict=True)
    )


def network(features: int, hidden: int) -> PruneTable:
    w1, row = np.zeros((features, hidden)), np.zeros(hidden)
    columns = (COLUMNS * 3)[:features]
    return PruneTable(-1.0, network=Network(columns, w1, row, row, 0.0))


def apart(values: torch.Tensor) -> torch.Tensor:
    """The same numbers, every second column of something wider."""
    return values.repeat_interleave(2, -1)[..., ::2]


def refusal_of(op: Callable[..., Any], given: Given) -> str:
    """What the call is told, nothing if it is good."""
    try:
        op(**given)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("op", GOOD, ids=lambda op: op.__name__)
def test_a_good_call_is_not_refused(op: Callable[..., Any]) -> None:
    assert refusal_of(op, arguments(op, {})) == ""


UNREAD = {
    *(("link_tree", f"pool.{name}") for name in DraftPool._fields[4:]),
    *(("lay_out", f"tree.{name}") for name in ("submitted", "draft_logp", "valid")),
    *(("node_features", name) for name in ("logits",)),
}
"""Arguments that an op does not read, or takes in any shape."""


def tensors_of(op: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Arguments of a good call by name, fields of records too."""
    given = dict(zip(signature(op).parameters, GOOD[op], strict=False))
    found = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for name, value in given.items():
        if isinstance(value, tuple | RunnerUp) and not isinstance(value, torch.Tensor):
            fields = value._asdict() if isinstance(value, tuple) else vars(value)
            found |= {f"{name}.{f}": v for f, v in fields.items() if isinstance(v, torch.Tensor)}
    return {name: value for name, value in found.items() if (op.__name__, name) not in UNREAD}


@pytest.mark.parametrize("op", [op for op in GOOD if tensors_of(op)], ids=lambda op: op.__name__)
def test_every_tensor_is_refused_in_another_dtype_or_shape(op: Callable[..., Any]) -> None:
    for name, tensor in tensors_of(op).items():
        for spoilt in (tensor.to(torch.complex64), tensor[None]):
            told = refusal_of(op, arguments(op, {name: spoilt}))
            if (op, spoilt.dtype) == (commit_kv, torch.complex64):
                continue  # the reference moves bytes of any dtype
            known = {name, "pool.parent"} if name == "pool.token_ids" else {name}
            assert told.startswith(f"kernel {op.__name__}: "), name
            assert any(one.rpartition(".")[2] in told for one in known), (name, told)


REFUSED: list[tuple[Callable[..., Any], Given, str]] = [
    (node_features, {"top_k": 6}, "top_k must be at most 5, not 6"),
    (node_features, {"entropy_top_k": 0}, "entropy_top_k must be at least 1, not 0"),
    # --- trees
    (append_level, {"start": 8}, "slots must be at most 10, not 11"),
    (link_tree, {"pool.depth": torch.clone}, "pool.depth.*dense rows"),
    (select_nodes, {"num_tokens": 0}, "num_tokens .* must be at least 1"),
    (walk_tree, {"acceptance.form": "odds"}, "form must be ratio or difference, not 'odds'"),
    (walk_tree, {"acceptance.node_at": None}, "node_at is missing"),
    # --- bookkeeping
    (open_tree, {"pool.depth": torch.clone}, "pool.depth must have dense rows and strides"),
    (open_level, {"above": None}, "above is missing; give the words"),
    (open_level, {"above": OPENED.words, "opened": OPENED}, "above is the buffer of opened.words"),
    (open_level, {"behind": 62}, "nodes must be at most 64, not 65"),
    (open_level, {"opened.words": apart}, "opened.words must have dense rows"),
    (lay_out, axis_of(1025, 1), "rows must be at most 1024, not 1025"),
    (settle, {"settled": new_settled(2, 4, CPU)}, "settled.outcome must be int64 of 2 x 9"),
    # --- the cache and what reads it
    (commit_kv, {"storage": apart}, "a last stride of 1, not"),
    (tree_attention, {"values": KEYS[:, :, 1:]}, "values must be float32 of 1 x 2"),
    (tree_attention, {"max_nodes": 33}, "tail entries must be at most 32, not 33"),
    (tree_attention, {"query": apart}, "query, keys and values must have dense"),
    (tree_attention, {"query": torch.zeros(2, 5, 4)}, "5 query heads are no multiple of 2"),
    (
        tree_attention,
        {"ancestors": lambda x: x.repeat(1, 4)[:, ::2]},
        "ancestors, prefixes and offsets must be contiguous",
    ),
    (
        tree_attention,
        {name: torch.zeros(1, 2, 2, 257) for name in ("keys", "values")}
        | {"query": torch.zeros(2, 2, 257)},
        "head size must be at most 256, not 257",
    ),
    # --- policies
    (choose_bins, {"params": NETWORK}, "of kind bins, not pruned"),
    (PolicyBuffer.write, {"packed": BINS}, "the parameter buffer is of layout"),
    (prune_level, {"of_parent": torch.zeros(2, 3)}, "4 nodes"),
    (prune_level, {"scores": torch.zeros(2, 4)}, "slots must be at most 4, not 5"),
    (pack, {"table": BinTable([1.0, 1.0], [1, 2, 3], [4, 5, 6], 1)}, "edges do not ascend"),
    (pack, {"table": BinTable([*range(256)], [1] * 257, [4] * 257, 1)}, "256 edges, not 1 to 255"),
    (pack, {"table": GateTable({65: -1.0}, 8)}, "is not 1 to 64"),
    (pack, {"table": network(17, 4)}, "17 features, not 1 to 16"),
    (pack, {"table": network(3, 65)}, "65 hidden units, not 1 to 64"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_refused(op: Callable[..., Any], changes: Given, message: str) -> None:
    told = refusal_of(op, arguments(op, changes))
    assert re.search(message, told), told
    assert op in (pack, PolicyBuffer.write) or f"kernel {op.__name__}" in told


def links(slots: int) -> Given:
    parent = torch.full((1, slots), -2)
    return {"parent": parent, "token_ids": parent, "target_ids": parent}


LARGE: list[tuple[Callable[..., Any], Given, str]] = [
    (lay_out, axis_of(1, 1025), "nodes of a tree must be at most 1024"),
    (walk_tree, links(1025) | {"acceptance": None}, "must be at most"),
    (walk_tree, links(8) | {"max_depth": 65, "acceptance": None}, "must be at most"),
    (
        commit_kv,
        {"storage": torch.zeros(1, 1, 1, 2, 2, dtype=torch.complex128)},
        r"a dtype of 1, 2, 4 or 8 bytes, not torch\.complex128",
    ),
]  # fmt: skip


@FUSED
@pytest.mark.parametrize(("op", "changes", "message"), LARGE)
def test_refused_by_the_fused_kernel(
    op: Callable[..., Any], changes: Given, message: str, device: torch.device
) -> None:
    given = on_device(arguments(op, changes), device)
    told = refusal_of(op, given)
    assert re.search(f"kernel {op.__name__}: .*{message}", told), told
