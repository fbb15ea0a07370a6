"""Every op called in the sizes that a round of an 8B model has: for graphs, and for compilers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from specctl.kernels.bookkeeping import Walked, new_opened, new_settled
from specctl.kernels.policy_eval import new_gate_state
from specctl.kernels.tree_attention import pack_ancestors
from specctl.kernels.tree_build import Best
from specctl.kernels.verify_tree import Judged, RunnerUp
from specctl.policy import EntropyBins, JointThreshold, SparseGates
from specctl.tree import Children, DraftPool
from tests.kernels import drawn
from tests.kernels.helpers import CPU, tensors_of
from tests.policy.scorers import SCORED, random_network


@dataclass(frozen=True)
class Call:
    """An op of a package with its arguments; `streams`: it reads whole rows, 16 bytes at a time."""

    package: str
    op: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = False

    def public(self) -> Callable[..., Any]:
        return getattr(import_module(f"specctl.kernels.{self.package}"), self.op)

    def fused(self) -> Callable[..., Any]:
        return getattr(import_module(f"specctl.kernels.{self.package}.fused"), self.op)

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_of(*self.args, *self.options.values())


def calls(seed: int = 0, batch: int = 4) -> dict[str, Call]:
    """On the CPU, by name."""
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def ints(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=draw)

    found: dict[str, Call] = {}
    # --- statistics of rows
    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocab in ((600, 128_256), (60, 32_000), (2, 151_936)):
            logits = torch.zeros(rows, vocab, dtype=dtype)
            if rows == 2:
                logits = randn(rows, vocab).to(dtype)
            name = f"node_features, {rows} x {vocab}, {dtype}"
            found[name] = Call("node_features", "node_features", (logits, 10, 10), streams=True)
        small = randn(8, 32_000).to(dtype)
        found[f"token_ranks, {dtype}"] = Call(
            "token_ranks", "token_ranks", (small, ints(32_000, 8, 10))
        )
        keys, greedy = ints(2**62, 8), ints(2, 8) > 0
        found[f"sample_tokens, {dtype}"] = Call(
            "sample_tokens", "sample_tokens", (small, keys, greedy), streams=True
        )
    # --- trees
    for width, top_k in ((1, 10), (10, 10), (16, 16), (32, 32)):
        pool = _rooted(drawn.Growth(batch, 2, width, top_k))
        frontier = torch.arange(width).expand(batch, width).contiguous()
        logp = -randn(batch, width, top_k).abs()
        doubts = (randn(batch, width).abs(), randn(batch, width).abs())
        children = Children(ints(1000, batch, width, top_k), logp, *doubts, logp > -1)
        args = (pool, frontier, frontier >= 0, children)
        sizes = {"start": width, "depth": 1, "num_best": width}
        found[f"append_level, {width} x {top_k}"] = Call("tree_build", "append_level", args, sizes)
    for size, tokens in ((500, 60), (711, 60), (711, 256), (4000, 1000)):
        pool = _rooted(drawn.Growth(batch, 1, 1, size - 1))
        limit, bar = 1 + ints(tokens, batch), torch.tensor([-2.0])
        options = {"limit": limit, "min_score": bar}
        found[f"select_nodes, {size}, {tokens}"] = Call(
            "tree_build", "select_nodes", (-randn(batch, size).abs(), tokens), options
        )
        submitted = torch.arange(tokens).expand(batch, -1).contiguous()
        args = (pool, submitted, 8, ints(99, batch))
        found[f"link_tree, {tokens}"] = Call("tree_build", "link_tree", args)
        parent = (torch.arange(tokens) - 1).clamp(max=0).expand(batch, -1).contiguous()
        ids, wants = torch.arange(tokens).expand(batch, -1).contiguous(), ints(1000, batch, tokens)
        walk = (parent, ids, wants, 8 if tokens < 100 else 40)
        second = RunnerUp(
            torch.stack([wants, ids], -1),
            randn(batch, tokens, 2).sort(-1, descending=True).values,
            limit > 1,
            torch.full((batch,), 0.5),
            denied=torch.zeros(1000, dtype=torch.bool),
            filtered=randn(64, 1000),
            node_at=ints(64, batch, tokens),
        )
        judged = Judged((parent >= 0) & (torch.arange(tokens) == 5))
        for name, acceptance in (("strict", None), ("judged", judged), ("runner up", second)):
            found[f"walk_tree, {name}, {tokens}"] = Call(
                "verify_tree", "walk_tree", (*walk, acceptance)
            )
    # --- bookkeeping
    for case in (drawn.Level(batch, 10), drawn.Level(batch, 10, 3, 3, 10, 10, 20)):
        chosen, sizes = drawn.drawn_level(case, seed)
        above = None
        if chosen.above is not None:
            above = chosen.above[:batch, : case.parents].contiguous()
        opened = new_opened(batch, 10, case.num_words, CPU)
        found[f"open_level, {case.depth}"] = Call(
            "bookkeeping", "open_level", (*chosen._replace(above=above), opened), sizes
        )
        roots = (chosen.pool, chosen.stable, chosen.vacant, opened)
        found["open_tree"] = Call("bookkeeping", "open_tree", roots)
    for nodes in (60, 250, 1000):
        laid = {"num_tokens": batch * nodes, "last_place": 77}
        args = drawn.drawn_axis(drawn.Axis(batch, nodes), seed)
        found[f"lay_out, {nodes}"] = Call("bookkeeping", "lay_out", args, laid)
    for steps, dtype in ((9, torch.float32), (9, torch.bfloat16), (99, torch.float16)):
        walked = drawn.drawn_round(drawn.Round(batch, steps, 60, 711, 60), dtype, seed)
        best = torch.full((batch * 60,), float("nan"), dtype=dtype)
        best[: len(walked.best)] = walked.best
        args = (Walked(*walked)._replace(best=best), new_settled(batch, steps, CPU))
        found[f"settle, {steps}, {dtype}"] = Call("bookkeeping", "settle", args)
    # --- decisions
    pool = drawn.level_pool(-randn(batch, 700).abs(), seed)
    bins = drawn.buffer_of(EntropyBins(base=drawn.BASE, edges=(1.0, 2.0), gammas=(0.5, 1.0)), CPU)
    found["choose_bins"] = Call("policy_eval", "choose_bins", (bins, pool))
    wide = drawn.level_pool(-randn(batch, 3000).abs(), seed)
    found["choose_bins, wide"] = Call("policy_eval", "choose_bins", (bins, wide))
    gates = drawn.buffer_of(SparseGates(gate_levels=(1, 2), thresholds=(0.5, 0.3)), CPU)
    for depth, width in ((1, 10), (2, 10), (2, 60)):
        index = torch.arange(width).expand(batch, -1) + 1
        best = Best(index, -randn(batch, width).abs().sort(-1).values)
        args = (gates, best, new_gate_state(batch, 711))
        sizes = {"depth": depth, "width": width}
        found[f"close_gates, {depth}, {width}"] = Call("policy_eval", "close_gates", args, sizes)
    network = SCORED["c2t joint"].model_copy(update={"scorer": random_network(1, 64)})
    for size in (10, 100, 250, 1000):
        for name, shape in (("network", network), ("joint", JointThreshold(min_prob=0.3))):
            level, params = (
                drawn.level_pool(-randn(batch, size).abs(), seed),
                drawn.buffer_of(shape, CPU),
            )
            args = (params, level, torch.zeros(batch, size + 1), None)
            found[f"prune_level, {name}, {size}"] = Call(
                "policy_eval",
                "prune_level",
                args,
                {"start": 1, "depth": 1, "width": 10},
            )
    for name in ("c2t joint", "c2t as printed", "conditional"):  # all ways to carry a path's score
        shape = SCORED["c2t joint" if name == "conditional" else name]
        if name == "conditional":
            shape = shape.model_copy(update={"predicts": "conditional", "beta": 0.2})
        level, above = drawn.level_pool(-randn(batch, 50).abs(), seed), -randn(batch, 10).abs()
        args = (drawn.buffer_of(shape, CPU), level, torch.zeros(batch, 51), above)
        found[f"prune_level, carried, {name}"] = Call(
            "policy_eval",
            "prune_level",
            args,
            {"start": 11, "depth": 2, "width": 10},
        )
    # --- the cache
    for dim, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (80, torch.float16),
                       (128, torch.float32), (256, torch.bfloat16), (128, torch.int8)):  # fmt: skip
        path = torch.arange(9).expand(batch, -1) * 2
        storage = torch.zeros(4, batch, 2, 64, dim).to(dtype)
        found[f"commit_kv, {dim}, {dtype}"] = Call(
            "commit_kv", "commit_kv", (storage, ints(9, batch), path.contiguous()), streams=True
        )
    for name, (heads, group, dim, nodes, dtype) in ATTENTIONS.items():
        cache = randn(batch, heads, 160, dim).to(dtype)
        seen = torch.rand(batch * nodes, nodes, generator=draw) < 0.5
        args = (
            randn(batch * nodes, heads * group, dim).to(dtype), cache, cache.flip(2),
            100 - ints(90, batch), torch.arange(batch + 1) * nodes, pack_ancestors(seen),
        )  # fmt: skip
        options = {"scaling": dim**-0.5, "max_nodes": nodes, "behind": 0}
        found[f"tree_attention, {name}"] = Call(
            "tree_attention", "tree_attention", args, options, streams=True
        )
    return found


ATTENTIONS = {
    "llama-8b, 60 nodes": (8, 4, 128, 60, torch.bfloat16),
    "llama-8b, 12 nodes": (8, 4, 128, 12, torch.bfloat16),
    "llama-8b, 4 nodes": (8, 4, 128, 4, torch.bfloat16),
    "gemma-9b": (8, 2, 256, 60, torch.bfloat16),
    "embedded": (2, 2, 64, 8, torch.bfloat16),
    "embedded, float32": (2, 2, 64, 8, torch.float32),
}
"""Key heads, query heads of each, head size, nodes, dtype."""


def _rooted(size: drawn.Growth) -> DraftPool:
    """A pool without NaN, all nodes below the root."""
    pool = drawn.empty_pool(size, CPU)
    for column in (pool.draft_logp, pool.joint_logp, pool.entropy, pool.topk_entropy):
        column.nan_to_num_(-1.0)
    pool.path_entropy.nan_to_num_(1.0)
    pool.parent[:, 1:], pool.depth[:, 1:] = 0, 1
    return pool
