"""Cost-model time, drafting counted: every family's fastest setting at a load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.policy import Chain, PerRequest, Policy, RootOnly, StaticTree
from specctl.replay.batch_simulation import Load, simulate
from specctl.replay.cost.model import CostModel
from specctl.replay.ladder.static import is_static, static_submissions
from specctl.replay.ladder.tally import LoadClock
from specctl.replay.submissions import Submissions, submissions_of
from specctl.replay.tune.evaluators import Objective, by_prompt, request_sums
from systems.bench import SEED, Bench
from systems.choosing import fastest, levels_of
from systems.curves import Curve, Paired
from systems.families import (
    LEVEL_PROBS,
    TOP_K,
    Settings,
    hetero_settings,
    scored_settings,
    threshold_settings,
)
from systems.papers import policy_of
from systems.roster import Roster

LOADS = (1, 8, 32)
"""Requests at a time, in a closed loop."""
DEPTHS = (3, 6, 8)
"""Levels of families that prune: few are fast where a level costs time."""
ECHO_SIZES = (16, 32, 60)
Row = dict[str, Any]


@dataclass
class Serving:
    """What policies do at every position of one side, decided once for all loads and clocks."""

    bench: Bench
    side: str
    known: dict[str, Submissions] = field(default_factory=dict)

    def prepare(self, settings: Settings) -> None:
        """Decides for whatever is new, in a pass over the log for each width or 32 policies."""
        part = self.bench.log.only(self.bench.side(self.side))
        new = {label: p for label, p in settings.items() if label not in self.known}
        static = {label: policy for label, policy in new.items() if is_static(policy)}
        labels = list(static)
        for index, of in static_submissions(part, list(static.values()), self.bench.num_threads):
            self.known[labels[index]] = of
        others = [label for label in new if label not in static]
        for at in range(0, len(others), 32):
            group = others[at : at + 32]
            found = submissions_of(part, [new[label] for label in group])
            self.known.update(zip(group, found, strict=True))

    def curve(self, name: str, labels: Sequence[str], clock: CostModel, load: int) -> Curve:
        """Some settings under a load."""
        sums = np.stack([self._sums(self.known[label], clock, load) for label in labels])
        policies = tuple(self.known[label].policy for label in labels)
        return Curve(name, tuple(labels), policies, sums)

    def _sums(self, submissions: Submissions, clock: CostModel, load: int) -> Any:
        """`[P, S]` in one order of the requests."""
        prompts, objective = self.bench.side(self.side), Objective("throughput")
        run = simulate(submissions, Load(load), clock, budget=PerRequest(), seed=(SEED, 0))
        positions, sums = run.submissions.positions, request_sums(run, objective)
        return by_prompt(positions, positions.prompt[run.logged], sums, prompts)


def speed_rows(bench: Bench, who: Roster, paired: Paired) -> Iterator[Row]:
    """At every load every family's fastest setting by training prompts, on the others.

    Every fit chooses for itself. Two controls: the static setting that was chosen among all, and
    the one chosen among those of as many levels.
    """
    families = families_of(who)
    choosing, held_out = Serving(bench, "choosing"), Serving(bench, "held_out")
    for fits in families.values():
        for settings in fits:
            choosing.prepare(settings)
    for clock_name, load in _conditions(bench):
        clock = bench.clocks[clock_name]
        tried = {
            name: [choosing.curve(name, list(settings), clock, load) for settings in fits]
            for name, fits in families.items()
        }
        best = {name: [fastest(curve) for curve in curves] for name, curves in tried.items()}
        static = tried["static"][0]

        def measured(labels: Sequence[str], clock: CostModel = clock, load: int = load) -> Any:
            held_out.prepare({label: choosing.known[label].policy for label in labels})
            return [held_out.curve(label, [label], clock, load) for label in labels]

        for name, labels in best.items():
            depths = [levels_of(choosing.known[label].policy) for label in labels]
            ours, tuned = measured(labels), measured(best["static"])
            equal = measured([_fastest_of_depth(static, depth) for depth in depths])
            yield {
                "clock": clock_name,
                "load": load,
                "family": name,
                "setting": "; ".join(sorted(set(labels))),
                "levels": max(depths),
                "tau": paired.tau(ours),
                "tokens_per_call": paired.tokens(ours),
                "time_over_static": paired.change(ours, tuned, "time_us", "tokens"),
                "time_over_static_of_that_depth": paired.change(ours, equal, "time_us", "tokens"),
            }
        print(f"  {clock_name}, {load} requests", flush=True)


def _fastest_of_depth(static: Curve, depth: int) -> str:
    """Plain decoding where nothing is drafted."""
    index = [i for i, policy in enumerate(static.policies) if levels_of(policy) == depth]
    part = Curve(
        static.name,
        tuple(static.labels[i] for i in index),
        tuple(static.policies[i] for i in index),
        static.sums[index],
    )
    return fastest(part)


def _conditions(bench: Bench) -> Iterator[tuple[str, int]]:
    """Clocks and the loads that they were measured at."""
    for name, model in bench.clocks.items():
        for load in LOADS:
            try:
                LoadClock(model, load).check()
            except UsageError:
                continue
            yield name, load


def families_of(who: Roster) -> dict[str, list[Settings]]:
    """What each family may choose from, fit by fit; a line adds a family."""
    seeds = range(who.num_seeds)
    return {
        "static": [static_grid()],
        "threshold": [_labelled("threshold", {d: threshold_settings(d) for d in DEPTHS})],
        "EAGLE-3 default": [{"eagle3-paper": policy_of("eagle3-paper")}],
        "HeteroSpec": [hetero_grid(who, seed) for seed in seeds],
        "C2T, paper": [scored_grid(who, "C2T, paper", s, (0.0,)) for s in seeds],
        "C2T, path and text": [scored_grid(who, "C2T, path and text", s, (0.0,)) for s in seeds],
        "ECHO gates": [echo_grid(who, seed) for seed in seeds],
        "survival table": [scored_grid(who, "survival table", s, LEVEL_PROBS) for s in seeds],
    }


def _labelled(name: str, by_depth: dict[Any, Settings]) -> Settings:
    """Every other setting of each depth."""
    return {
        f"{name}, {depth} levels, {label}": policy
        for depth, settings in by_depth.items()
        for label, policy in list(settings.items())[::2]
    }


def scored_grid(who: Roster, name: str, seed: int, level_probs: Sequence[float]) -> Settings:
    """Betas at few and many levels, with and without the marginal rule of levels."""
    shape = who.scored(name, seed)
    grids = {
        f"{depth}" + (f", level {prob:g}" if prob else ""): scored_settings(shape, depth, prob)
        for depth in DEPTHS
        for prob in level_probs
    }
    return _labelled(f"{name} {seed}", grids)


def hetero_grid(who: Roster, seed: int) -> Settings:
    """HeteroSpec over bases of 2, 6 and 8 levels, at every size."""
    names = {2: "HeteroSpec, base 2", 6: "HeteroSpec", 8: "HeteroSpec, paper"}
    grids = {base: hetero_settings(who.bins(name, seed)) for base, name in names.items()}
    return {
        f"HeteroSpec {seed}, base {base}, {label}": policy
        for base, settings in grids.items()
        for label, policy in settings.items()
    }


def echo_grid(who: Roster, seed: int) -> Settings:
    """ECHO's gates in its tree, at three sizes."""
    policy = who.fitted["ECHO gates"][seed]
    return {
        f"ECHO {seed}, {size}": Policy(shape=policy.shape.model_copy(update={"num_tokens": size}))
        for size in ECHO_SIZES
    }


def static_grid() -> Settings:
    """Plain decoding, chains and trees, some of every depth that a family can reach."""
    chains = {f"chain {n}": Policy(shape=Chain(num_draft_tokens=n)) for n in range(1, 13)}
    trees = {
        f"{depth}-{top_k}-{size}": Policy(
            shape=StaticTree(depth=depth, top_k=top_k, num_tokens=size)
        )
        for depth in (1, 2, 3, 4, 6, 8, 9, 11, 12)
        for top_k in (4, TOP_K)
        for size in (3, 4, 6, 8, 12, 20, 32, 64)
        if depth < size
    }
    return {"ar": Policy(shape=RootOnly()), **chains, **trees}
