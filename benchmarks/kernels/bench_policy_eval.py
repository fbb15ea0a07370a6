"""The decisions of a round on the device, beside the rules' torch operations.

python benchmarks/kernels/bench_policy_eval.py            # on a GPU, half a minute
python benchmarks/kernels/bench_policy_eval.py --small    # to its end on any machine

There is next to nothing to read, so the floor is a launch, not the memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench_tree_build import Size, grown
from timing import Row, copy_bandwidth, launch_floor, main, row, time_us, versus
from torch import Tensor

from specctl.features import phi
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.policy_eval import choose_bins, close_gates, new_gate_state, prune_level
from specctl.kernels.policy_eval.layout import PolicyBuffer, pack
from specctl.kernels.tree_build import Best
from specctl.policy import EntropyBins, FfnScorer, ScoredTree, Shape, SparseGates, StaticTree
from specctl.policy.c2t import log_prob
from specctl.policy.echo import gate_closes, log_threshold
from specctl.policy.hetero import entropy_bin
from specctl.policy.pruning import best_scores, lowest_logp
from specctl.runtime.deciders import table_of

BATCHES = (1, 8, 32, 64)
Runs = tuple[Callable[[], object], Callable[[], object], int]
FEATURES = ("joint_prob", "draft_logp", "parent_entropy", "depth")


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """One level of ECHO's gate and of C2T's network, HeteroSpec's bin once a round."""
    bandwidth = copy_bandwidth(device, small=small)
    labels = {"op": "launch floor", "system": "launch floor", "batch": 1}
    found = [row(launch_floor(device), 8, bandwidth, **labels)]
    for batch in (1, 4) if small else BATCHES:
        size = Size(batch, 4 if small else 6, 10, 10, 60)
        for name, runs in _runs(size, device).items():
            found += _pair(name, size, runs, bandwidth, device)
    return found


def _pair(name: str, size: Size, runs: Runs, bandwidth: float, device: torch.device) -> list[Row]:
    ours, before, num_bytes = runs
    backend = "fused" if runs_fused(name, torch.empty(0, device=device)) else "reference"
    found = [
        row(time_us(run, device), num_bytes, bandwidth, op=name, system=system, batch=size.batch)
        for system, run in ((f"specctl {backend}", ours), ("torch composition", before))
    ]
    return versus(found, found[0])


def _runs(size: Size, device: torch.device) -> dict[str, Runs]:
    found = {"choose_bins": _bins(size, device), "close_gates": _gates(size, device)}
    for hidden in (8, 48, 64):
        found[f"prune_level, {hidden} hidden"] = _network(size, hidden, device)
    return found


def _buffer(shape: Shape, device: torch.device) -> PolicyBuffer:
    table = table_of(shape)
    assert table is not None
    return pack(table).to(device)


def _bins(size: Size, device: torch.device) -> Runs:
    base = StaticTree(depth=size.levels, top_k=size.top_k, num_tokens=size.tokens)
    shape = EntropyBins(base=base, edges=tuple(map(float, range(1, 8))))
    params, (pool, _, _) = _buffer(shape, device), grown(size, device)
    draft = pool
    edges = torch.tensor(shape.edges, device=device)
    depths, tokens = (
        torch.tensor(t, device=device) for t in (shape.plan_depths, shape.plan_tokens)
    )

    def before() -> tuple[Tensor, Tensor]:
        """`phi` asks the device how deep the pool is, so a graph cannot hold it."""
        bins = entropy_bin(phi(draft), edges)
        return depths[bins], tokens[bins]

    return lambda: choose_bins(params, pool), before, size.batch * size.capacity * 24


def _gates(size: Size, device: torch.device) -> Runs:
    shape = SparseGates(gate_levels=(2, 4), thresholds=(0.3, 0.1), width=3, max_width=10)
    params = _buffer(shape, device)
    pool, _, _ = grown(size, device)
    logp = pool.joint_logp[:, size.level_start :].sort(1, descending=True)
    best = Best(logp.indices[:, :10] + size.level_start, logp.values[:, :10].contiguous())
    state = new_gate_state(size.batch, size.capacity, device)
    bar = log_threshold(0.3)

    def before() -> tuple[Tensor, ...]:
        confidence = pool.joint_logp[:, size.level_start :].amax(1)
        closed = gate_closes(confidence, bar) & (confidence > float("-inf"))
        stopped = torch.where(closed, 2, state.stopped_at)
        here = state.max_depth.clamp(max=2)
        max_depth = torch.where(closed, here, state.max_depth)
        spare = torch.arange(best.index.shape[1], device=device) >= 3
        kept = best.index.masked_fill(spare & ~closed[:, None], -1)
        return stopped, kept, (max_depth > 2)[:, None].expand(-1, 3)

    ours = lambda: close_gates(params, best, state, depth=2, width=3)  # noqa: E731
    return ours, before, size.batch * (10 * 16 + 6 * 8 + 3)


def _network(size: Size, hidden: int, device: torch.device) -> Runs:
    draw = torch.Generator().manual_seed(hidden)
    w1 = torch.randn(hidden, len(FEATURES), generator=draw).tolist()
    row_of = lambda: tuple(torch.randn(hidden, generator=draw).tolist())  # noqa: E731
    ones = (1.0,) * len(FEATURES)
    scorer = FfnScorer(
        features=FEATURES,
        mean=ones,
        scale=ones,
        w1=tuple(map(tuple, w1)),
        b1=row_of(),
        w2=row_of(),
        b2=(0.0,),
    )
    shape = ScoredTree(scorer=scorer, beta=0.5, depth=size.levels, num_tokens=size.tokens)
    params, (pool, _, _) = _buffer(shape, device), grown(size, device)
    draft = pool
    scores = torch.zeros(size.batch, size.capacity, device=device)
    of_parent = torch.zeros(size.batch, size.width, device=device)
    score, bar = log_prob(scorer, device), lowest_logp(shape.beta)
    options = {"start": size.level_start, "depth": size.levels, "width": size.width}

    def before() -> tuple[Tensor, ...]:
        own = score(draft, size.level_start).view(size.batch, size.width, -1)
        combined = torch.minimum(of_parent[..., None], own).flatten(1)
        best, beam = best_scores(combined, size.width)
        return combined, beam + size.level_start, best >= bar

    num_bytes = size.batch * size.width * size.top_k * (5 * 4 + 8) + params.storage.numel() * 4
    return lambda: prune_level(params, pool, scores, of_parent, **options), before, num_bytes


if __name__ == "__main__":
    main("policy_eval", rows, "Microseconds of the decisions of a round.")
