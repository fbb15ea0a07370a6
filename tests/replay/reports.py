"""A dense log of five positions, small enough to work every figure of a report out by hand.

Each tree has two levels of two children:

    root ┬ n1 .6  ┬ n3 .5   joint .300       order of confidence: n1 n3 n2 n5 n4 n6
         │        └ n4 .2         .120
         └ n2 .25 ┬ n5 .5         .125
                  └ n6 .2         .050

Prompt a (4 tokens): p1 takes n1 n4; p2 takes n2 and then leaves the tree; p3 takes n1, its last.
Prompt b (3 tokens): both positions leave the tree at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from scripts.synthetic_trace import DIGESTS, concatenated, table
from specctl.collect.trace_writer import TraceWriter, make_header
from specctl.logs.trace_set import TraceSet
from specctl.policy import FullTree, Policy
from specctl.runtime.requests import Sampling

DEPTH, TOP_K = 2, 2
POLICY = Policy(shape=FullTree(depth=DEPTH, top_k=TOP_K))
PARENT = (-1, 0, 0, 1, 1, 2, 2)
PROB = (1.0, 0.6, 0.25, 0.5, 0.2, 0.5, 0.2)
LEVEL = (0, 1, 1, 2, 2, 2, 2)
JOINT = tuple(PROB[i] * (PROB[PARENT[i]] if LEVEL[i] == 2 else 1.0) for i in range(7))


Taken = tuple[int, ...]
"""Nodes that the text takes from a position."""


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    category: str
    positions: Sequence[Taken]


TWO_PROMPTS = (Prompt("a", "maths", [(1, 4), (2,), (1,)]), Prompt("b", "prose", [(), ()]))


def write_log(
    folder: Path, prompts: Sequence[Prompt] = TWO_PROMPTS, *, target: str = "tiny", **header: Any
) -> TraceSet:
    """The log as a trace set, one commit a prompt."""
    support = {"top_k": TOP_K, "width": TOP_K, "depth": DEPTH, "nested": True}
    facts = {"dense": support, "target": target, "drafter": "small"}
    made = make_header(POLICY, Sampling(), collect=facts, **(DIGESTS | header))
    with TraceWriter.open(folder, made) as writer:
        for prompt in prompts:
            writer.commit([prompt.prompt_id], tables_of(prompt))
    return TraceSet.open(folder)


def tables_of(prompt: Prompt) -> dict[str, Any]:
    """Both tables of one prompt."""
    num = len(prompt.positions)
    nodes = [node_table(prompt, index, num - index) for index in range(num)]
    return {"rounds": round_table(prompt), "nodes": concatenated(nodes)}


def round_table(prompt: Prompt) -> Any:
    num = len(prompt.positions)
    accepted = np.array([len(taken) for taken in prompt.positions])
    remaining = np.arange(num, 0, -1)
    values = {
        "request_id": f"{prompt.prompt_id}/0",
        "prompt_id": prompt.prompt_id,
        "category": prompt.category,
        "kind": "dense",
        "round_idx": np.arange(num),
        "position": np.arange(1, num + 1),
        "context_tokens": np.arange(9, 9 + num),
        "offered_depth": DEPTH,
        "num_drafted": 6,
        "num_accepted": accepted,
        "num_emitted": np.minimum(accepted + 1, remaining),
    }
    return table("rounds", values, num)


def node_table(prompt: Prompt, index: int, remaining: int) -> Any:
    taken = prompt.positions[index]
    values = {
        "request_id": f"{prompt.prompt_id}/0",
        "round_idx": index,
        "node_idx": np.arange(7),
        "parent_idx": np.array(PARENT),
        "depth": np.array(LEVEL),
        "sibling_rank": np.array([0, 0, 1, 0, 1, 0, 1]),
        "draft_logp": np.log(PROB),
        "path_accepted": pa.array([label(node, taken, remaining) for node in range(7)]),
        "joint_logp": np.log(JOINT),
    }
    return table("nodes", values, 7)


def label(node: int, taken: Taken, remaining: int) -> bool | None:
    """On the path; None below its end where the text ended first."""
    path = (0, *taken)
    if node in path:
        return True
    if PARENT[node] == path[-1] and remaining == len(taken):
        return None
    return False


def close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-6)


def live_traces(folder: Path, *, offered_depth: int = 0) -> TraceSet:
    """Two equal live rounds of one request; of plain decoding, unless told of a draft."""
    names = {"request_id": "a/0", "prompt_id": "a", "kind": "live", "policy_digest": "-"}
    rounds = {**names, "round_idx": np.arange(2), "offered_depth": offered_depth}
    rounds |= {"num_verified": 2, "num_accepted": 1, "num_emitted": 2}
    rounds |= {"tcr": 1, "phi": 1.0, "phi_depth": 3}
    nodes = {"request_id": "a/0", "round_idx": np.arange(2), "parent_idx": -1}
    header = make_header(POLICY, Sampling(), collect={"target": "t", "drafter": "d"}, **DIGESTS)
    tables = {"rounds": table("rounds", rounds, 2), "nodes": table("nodes", nodes, 2)}
    with TraceWriter.open(folder, header) as writer:
        writer.commit(["a"], tables)
    return TraceSet.open(folder)
