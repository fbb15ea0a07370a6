"""Cost-model time, drafting counted: every family's fastest setting at a load, on the ladder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.policy import Chain, PerRequest, Policy, RootOnly, StaticTree
from specctl.replay.batch_simulation import Load, simulate
from specctl.replay.config import LadderConfig
from specctl.replay.cost.model import CostModel
from specctl.replay.ladder.build import build_ladder
from specctl.replay.ladder.static import is_static, static_submissions
from specctl.replay.ladder.tally import LoadClock
from specctl.replay.submissions import Submissions, submissions_of
from specctl.replay.tune.evaluators import Objective, by_prompt, request_sums
from systems.bench import SEED, SHARE, Bench
from systems.choosing import fastest, levels_of
from systems.curves import Curve, Paired, tau, tokens_per_call
from systems.families import DEPTHS, STATIC, Settings
from systems.roster import Roster

LOADS = (1, 8, 32)
"""Requests at a time, in a closed loop."""
SHALLOW = (3, 6)
"""Levels that may be fast where a level costs time."""
NUM_RUNS = 2
"""Orders of the requests; at one request at a time they change nothing."""
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
        """`[P, S]`, mean over the runs."""
        prompts, objective = self.bench.side(self.side), Objective("throughput")
        runs = []
        for number in range(1 if load == 1 else NUM_RUNS):
            run = simulate(submissions, Load(load), clock, budget=PerRequest(), seed=(SEED, number))
            positions, sums = run.submissions.positions, request_sums(run, objective)
            runs.append(by_prompt(positions, positions.prompt[run.logged], sums, prompts))
        return np.mean(runs, axis=0)


def speed_rows(bench: Bench, who: Roster, paired: Paired) -> Iterator[Row]:
    """At every load the fastest setting of every family by training prompts, on the others."""
    families = _families(who)
    train, held_out = Serving(bench, "train"), Serving(bench, "held_out")
    for settings in families.values():
        train.prepare(settings)
    for clock_name, load in _conditions(bench):
        clock = bench.clocks[clock_name]
        best = {
            name: fastest(train.curve(name, list(settings), clock, load))
            for name, settings in families.items()
        }
        held_out.prepare(dict(best.values()))
        recommended = _recommended(train, best, clock, load)
        gaps = _gaps(bench, clock, best) if load == 1 else {}
        static = held_out.curve("static", [best["static"][0]], clock, load)
        for name, (label, policy) in best.items():
            ours = held_out.curve(name, [label], clock, load)
            yield {
                "clock": clock_name,
                "load": load,
                "system": name,
                "setting": label,
                "is_recommended": name == recommended,
                "levels": levels_of(policy),
                "tau": paired.interval(ours, lambda sums: tau(sums[..., 0, :])),
                "tokens_per_call": paired.interval(
                    ours, lambda sums: tokens_per_call(sums[..., 0, :])
                ),
                "time_over_static": paired.change_per(ours, static, "time_us", "tokens"),
                "gap_closed": gaps.get(name if name in gaps else label),
            }


def _conditions(bench: Bench) -> Iterator[tuple[str, int]]:
    """Clocks and the loads that they were measured at."""
    for name, model in bench.clocks.items():
        for load in LOADS:
            try:
                LoadClock(model, load).check()
            except UsageError:
                continue
            yield name, load


def _recommended(
    train: Serving, best: dict[str, tuple[str, Policy]], clock: CostModel, load: int
) -> str:
    """The fastest family on training prompts, if it beats static beyond its interval there."""
    paired = Paired.of(len(train.bench.train), SEED)
    curves = {name: train.curve(name, [label], clock, load) for name, (label, _) in best.items()}
    times = {
        name: paired.change_per(curve, curves["static"], "time_us", "tokens")
        for name, curve in curves.items()
    }
    clear = {name: time.value for name, time in times.items() if time.high < 0}
    return min(clear, key=clear.__getitem__, default="static")


def _families(who: Roster) -> dict[str, Settings]:
    """What each family may choose from; static trees have a grid of their own."""
    plain = {"ar": {"ar": Policy(shape=RootOnly())}, "static": _static_grid()}
    others = {
        family.name: {
            f"{family.name}, {depth} levels, {label}": policy
            for depth in (SHALLOW if family.depths == DEPTHS else family.depths)
            for label, policy in list(family.settings(depth).items())[::2]
        }
        for family in who.curves
        if family is not STATIC
    }
    return {**plain, **others}


def _static_grid() -> Settings:
    chains = {f"chain {n}": Policy(shape=Chain(num_draft_tokens=n)) for n in range(1, 12)}
    trees = {
        f"{depth}-{top_k}-{size}": Policy(
            shape=StaticTree(depth=depth, top_k=top_k, num_tokens=size)
        )
        for depth in (1, 2, 3, 4, 6, 8, 11)
        for top_k in (4, 10)
        for size in (2, 3, 4, 6, 8, 12, 20, 32, 64)
        if depth < size
    }
    return {**chains, **trees}


def _gaps(bench: Bench, clock: CostModel, best: dict[str, tuple[str, Policy]]) -> dict[str, Any]:
    """Gap closed of every setting on the ladder, one request at a time."""
    policies = [(name, policy) for name, (_, policy) in best.items() if name != "ar"]
    ladder = build_ladder(
        bench.log,
        bench.traces.prompt_ids,
        LoadClock(clock),
        policies,
        config=LadderConfig(held_out_frac=SHARE, seed=SEED),
    )
    return {rung.label: rung.gap_closed for rung in ladder.rungs}
