"""ECHO's budget against the same number of verified tokens without sharing, and against survival.

A batch of B requests verifies n · B nodes a round, roots counted. From dense traces, exactly, at
batches that are full: `static` is the EAGLE-2 tree of n tokens for each request whose depth was
best on the training prompts; the others share. Settings are chosen on training prompts, figures
are of held-out ones, intervals are over prompts and paired.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from specctl.logs.positions import Floats
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import (
    Budget,
    ElasticBudget,
    PerRequest,
    Policy,
    Shape,
    SparseGates,
    StaticTree,
    SurvivalBudget,
)
from specctl.policy.budgets import Calibration, draft_log_odds
from specctl.replay.batch_simulation import Load, simulate
from specctl.replay.cost.rates import LinearCost
from specctl.replay.fit_inputs import Replayer, gate_rows
from specctl.replay.submissions import Submissions, submissions_of
from specctl.stats import Resamples, split_prompts
from specctl.train.configs import EchoConfig
from specctl.train.echo import fit_echo

SIZES, LOADS, WIDTHS = (4, 8, 16, 32), (8, 32), (1, 2, 3)
SPARSE = {
    "1": ((1,), (0.3,)),
    "1/2": ((1, 2), (0.3, 0.2)),
    "1/3": ((1, 3), (0.2, 0.15)),
    "1/3 high": ((1, 3), (0.3, 0.3)),
    "1/3/5": ((1, 3, 5), (0.2, 0.15, 0.1)),
    "1/4/7": ((1, 4, 7), (0.1, 0.05, 0.03)),
}
DENSE = {f"all {p}": (tuple(range(1, 11)), (p,) * 10) for p in (0.02, 0.05, 0.1, 0.2)}
"""Gates by name: levels, and the probability below which they close."""
WIDE = ("1", "1/3", "1/4/7")
"""Those that are also tried with levels of 2 and 3 nodes."""
DEPTHS = {4: (2, 3), 8: (4, 5, 6, 7), 16: (5, 7, 9, 11), 32: (8, 11)}
"""Of static trees, by size."""
BIG = StaticTree(depth=11, top_k=10, num_tokens=60)
NO_CLOCK = LinearCost(
    cost_model_version=1,
    source="counts only",
    verify_fixed_us=1.0,
    verify_token_us=1.0,
    verify_cached_token_us=0.0,
    draft_fixed_us=0.0,
    draft_token_us=0.0,
    step_us=1.0,
)


@dataclass(frozen=True)
class Candidate:
    """A shape under a budget, given K_max."""

    name: str
    shape: str
    width: int = 0
    order: str = "confidence"
    calibration: Calibration | None = None

    def budget(self, max_tokens: int) -> Budget:
        if self.name == "static":
            return PerRequest()
        if self.name.startswith("survival"):
            return SurvivalBudget(max_tokens=max_tokens, calibration=self.calibration)
        return ElasticBudget(
            max_tokens=max_tokens,
            default_width=self.width,
            order=self.order,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Side:
    """One side of the split: what every shape submits at every position."""

    made: Mapping[str, Submissions]

    def sums(self, one: Candidate, size: int, load: int, *, num_runs: int) -> Floats:
        """`[P, 3]` rounds, accepted and verified tokens by prompt, of steps with a full batch."""
        made = self.made[one.shape]
        num_prompts = len(made.positions.prompt_ids)
        offered = Load(load, num_requests=num_prompts)
        total = np.zeros((num_prompts, 3))
        for seed in range(num_runs):
            run = simulate(made, offered, NO_CLOCK, budget=one.budget(size * load), seed=seed)
            rounds = run.rounds
            full = np.repeat(rounds.batch_sizes == load, rounds.batch_sizes)
            prompt = made.positions.prompt[run.logged][rounds.serial][full]
            columns = (np.ones_like(rounds.row), rounds.accepted, rounds.verified)
            total += np.stack([np.bincount(prompt, c[full], num_prompts) for c in columns], 1)
        return total


def tau(sums: Floats) -> Floats:
    """Mean acceptance length of sums `[..., 3]`."""
    return 1 + sums[..., 1] / sums[..., 0]


def gated(width: int, levels: tuple[int, ...], bars: tuple[float, ...]) -> SparseGates:
    return SparseGates(
        depth=11, width=width, max_width=10, gate_levels=levels, thresholds=bars, num_tokens=60
    )


def shapes(fitted: Mapping[int, SparseGates]) -> dict[str, Shape]:
    """All shapes of the comparison by name."""
    static = {
        f"static {n} {d}": StaticTree(depth=d, top_k=10, num_tokens=n)
        for n, depths in DEPTHS.items()
        for d in depths
    }
    gates = {
        f"{name} w{width}": gated(width, *of)
        for width in WIDTHS
        for name, of in (SPARSE | DENSE).items()
        if width == 1 or name in WIDE
    }
    youden = {f"youden w{width}": shape for width, shape in fitted.items()}
    return {"big": BIG, **static, **gates, **youden}


def candidates(size: int, calibration: Calibration) -> dict[str, list[Candidate]]:
    """What competes under each heading; the best on training prompts is reported."""

    def echo(names: Sequence[str], width: int, **more: Any) -> list[Candidate]:
        return [Candidate("echo", f"{name} w{width}", width, **more) for name in names]

    def sparse(**more: Any) -> list[Candidate]:
        wide = [one for width in (2, 3) for one in echo(WIDE, width, **more)]
        return [*echo(list(SPARSE), 1, **more), *wide]

    return {
        "static": [Candidate("static", f"static {size} {d}") for d in DEPTHS[size]],
        "ECHO, Youden, W 3": echo(["youden"], 3),
        "ECHO, Youden": [one for width in (1, 3) for one in echo(["youden"], width)],
        "ECHO": sparse(),
        "ECHO, rows in order": sparse(order="row"),
        "ECHO, a gate a level": echo(list(DENSE), 1),
        "ECHO's budget, EAGLE-2": [Candidate("echo", "big", width) for width in WIDTHS],
        "survival": [Candidate("survival", "big")],
        "survival, calibrated": [
            Candidate("survival calibrated", "big", calibration=calibration),
        ],
    }


Found = dict[str, tuple[Candidate, Floats]]
"""By heading: what was chosen, and its held-out sums."""


def compare(
    train: Side,
    held_out: Side,
    log: DenseLog,
    named: Mapping[str, Shape],
    calibration: Calibration,
) -> list[dict[str, Any]]:
    """Every heading at every size and load, against static and against survival."""
    rows = []
    for load in LOADS:
        for size in SIZES:
            found = {
                heading: measured(some, train, held_out, size, load)
                for heading, some in candidates(size, calibration).items()
            }
            rows += rows_of(found, size, load)
            if load == LOADS[0]:
                rows += rows_of(alone(found, log, named, size), size, 1)
    return sorted(rows, key=lambda row: row["batch"])


def measured(
    some: list[Candidate], train: Side, held_out: Side, size: int, load: int
) -> tuple[Candidate, Floats]:
    """The candidate of highest training tau, and its held-out sums."""
    best = some[0]
    if len(some) > 1:
        tried = [train.sums(one, size, load, num_runs=1) for one in some]
        best = some[int(np.argmax([tau(sums.sum(0)) for sums in tried]))]
    return best, held_out.sums(best, size, load, num_runs=2)


ALONE = ("static", "ECHO, Youden, W 3", "ECHO, Youden", "ECHO", "ECHO, a gate a level", "survival")


def alone(found: Found, log: DenseLog, named: Mapping[str, Shape], size: int) -> Found:
    """Batch 1, with the settings of the smallest batch: a budget for one request is a size.

    With one request Algorithm 1 fills its tree from the root on, as the shape does that may submit
    so many nodes, and survival keeps the likeliest nodes, as EAGLE-2 does.
    """
    chosen = {heading: found[heading][0] for heading in ALONE}
    shapes = [
        named[one.shape].model_copy(
            update={"num_tokens": size, "depth": depth_of(named, one, size)}
        )
        for one in chosen.values()
    ]
    made = submissions_of(log, [Policy(shape=shape) for shape in shapes])
    side = Side(dict(zip(chosen, made, strict=True)))
    return {
        heading: (one, side.sums(Candidate("static", heading), size, 16, num_runs=1))
        for heading, one in chosen.items()
    }


def depth_of(named: Mapping[str, Shape], one: Candidate, size: int) -> int:
    """Levels of a tree of so many nodes: EAGLE-2's record wants fewer levels than nodes."""
    shape = named[one.shape]
    assert isinstance(shape, StaticTree | SparseGates)
    return min(shape.depth, size - 1) if isinstance(shape, StaticTree) else shape.depth


def rows_of(found: Found, size: int, load: int) -> list[dict[str, Any]]:
    rows = [row_of(name, one, sums, found, size, load) for name, (one, sums) in found.items()]
    print(*(list(row.values()) for row in rows), sep="\n", flush=True)
    return rows


def row_of(
    heading: str,
    one: Candidate,
    sums: Floats,
    found: Found,
    size: int,
    load: int,
) -> dict[str, Any]:
    resamples = Resamples.draw(len(sums), seed=0)
    calls, _, verified = sums.sum(0)
    row = {
        "system": heading,
        "batch": load,
        "tokens_per_request": size,
        "settings": one.shape,
        "tau": float(tau(sums.sum(0))),
        "verified_per_call": float(verified / calls),
    }
    for name in ("static", "survival"):
        against = resamples.ratio(sums, found[name][1], tau)
        for field, value in against.to_json().items():
            row[f"over_{name}_{field}"] = 100 * (value - 1)
    return row


def calibrated(made: Submissions) -> Calibration:
    """A logistic function of the draft probability per depth, from submitted nodes whose parent is
    on the path. A depth with labels of one kind takes the fit of the depth above it."""
    from sklearn.linear_model import LogisticRegression

    nodes = made.nodes
    assert nodes is not None
    sizes = nodes.start.diff()
    tree = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    parent = (nodes.start[tree] + nodes.parent.clamp(min=0)).long()
    remaining = torch.from_numpy(made.positions.remaining)[tree]
    told = (nodes.parent >= 0) & nodes.on_path[parent] & (nodes.depth <= remaining)
    log_odds = draft_log_odds(nodes.draft_logp[told]).float().numpy()
    depth, accepted = nodes.depth[told].numpy(), nodes.on_path[told].numpy()
    slopes, intercepts = [], []
    for level in range(1, int(depth.max(initial=1)) + 1):
        here = depth == level
        if len(set(accepted[here].tolist())) == 2:
            model = LogisticRegression(max_iter=1000).fit(log_odds[here, None], accepted[here])
            slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
        slopes.append(slope)
        intercepts.append(intercept)
    return Calibration(slopes=tuple(slopes), intercepts=tuple(intercepts))


def fitted_gates(log: DenseLog, prompts: Sequence[str]) -> dict[int, SparseGates]:
    """What `fit echo` finds on the training prompts, by width."""
    part = log.only(prompts)
    found = {}
    for width in (1, 3):
        config = EchoConfig(depth=11, width=width, num_tokens=60)
        rows = gate_rows(part, config.open_shape).rows
        found[width] = fit_echo(rows, config, Replayer(part)).policy.shape
        print(width, found[width].gate_levels, found[width].thresholds, flush=True)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("traces", type=Path, nargs="+", help="dense trace folders of one pair")
    options.add_argument("--out", type=Path, default=common.RESULTS, help="folder for the JSON")
    given = options.parse_args()
    given.device = "cpu"
    torch.set_num_threads(1)
    traces = TraceSet.open(*given.traces)
    log = DenseLog.open(traces)
    prompts = traces.scan("rounds").select("prompt_id").unique().collect()["prompt_id"]
    split = split_prompts(prompts.to_list(), held_out_frac=0.5, seed=0)
    named = shapes(fitted_gates(log, split.train))
    policies = [Policy(shape=shape) for shape in named.values()]
    sides, choosing = [], split.train[::2]
    for side in (choosing, split.held_out):
        made = submissions_of(log.only(side), policies, keep_nodes=True)
        sides.append(Side({n: slim(m) for n, m in zip(named, made, strict=True)}))
        print(len(side), "prompts", made[0].positions.num_rows, "positions", flush=True)
    calibration = calibrated(sides[0].made["big"])
    rows = compare(*sides, log.only(split.held_out), named, calibration)
    note = (
        "τ where no more than so many tokens are verified, embedded pair, "
        f"{len(split.train)} training prompts, every second chooses settings, "
        f"{len(split.held_out)} held out; over_*: % of τ"
    )
    common.report("echo", rows, given, note)


def slim(made: Submissions) -> Submissions:
    """Without the entropies, which no budget here reads."""
    nodes = made.nodes
    assert nodes is not None
    nothing = torch.zeros(1).expand(len(nodes.parent))
    return replace(made, nodes=replace(nodes, entropy=nothing, topk_entropy=nothing))


if __name__ == "__main__":
    main()
