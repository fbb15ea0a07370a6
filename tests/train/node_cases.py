"""Small logs of random trees as a fit meets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.logs.logged_nodes import LoggedNodes, logged_nodes
from specctl.logs.trace_set import TraceSet
from specctl.train.c2t_config import C2TConfig
from specctl.train.ffn import FfnConfig
from specctl.train.nodes import NodeConfig
from tests.replay.logs import random_traces

DEPTH, TOP_K = 4, 3


def node_traces(folder: Path, num_prompts: int = 12, **options: Any) -> TraceSet:
    """Traces in which the target takes a child with the probability that the drafter gives it."""
    sizes: dict[str, Any] = {"depth": DEPTH, "top_k": TOP_K, "nested": False}
    return random_traces(folder, num_prompts=num_prompts, **{**sizes, **options})


def node_source(folder: Path, **options: Any) -> LoggedNodes:
    """The same as a fit reads them."""
    return logged_nodes(node_traces(folder, **options))


def node_config(**changes: Any) -> NodeConfig:
    """What such logs hold."""
    sizes = {"depth": DEPTH, "first_top_k": TOP_K, "second_top_k": TOP_K}
    return NodeConfig(**{**sizes, **changes})


def c2t_config(nodes: dict[str, Any] | None = None, **changes: Any) -> C2TConfig:
    """A fit of a second."""
    ffn = FfnConfig(hidden=8, epochs=6, min_steps=1, batch_size=256)
    return C2TConfig(nodes=node_config(**(nodes or {})), **{"ffn": ffn, **changes})
