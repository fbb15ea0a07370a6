"""A simulated year: streams of traffic that change at known times, watched and recalibrated.

Prompts are drawn with replacement from the embedded pair's real traces, by mixtures of workloads.
Four kinds of change at three strengths, and none. Beside the alarm of `specctl drift` stand what a
team would write first: a bar on the rolling mean acceptance length, and a test against the
reference looked at daily.

    specctl collect PROMPTS -o DENSE --dense --max-new-tokens 64         several workloads
    specctl collect PROMPTS -o WORSE --dense --drafter embedded:small    the worse drafter
    python benchmarks/bench_drift.py --traces DENSE... --worse WORSE... --cost-model cost_model.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, report
from scipy.stats import binomtest, ttest_ind

from specctl.logs.positions import Floats, Longs
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.replay.cost.files import load_cost_model
from specctl.replay.metrics import Sums
from specctl.replay.tune.evaluators import LogEvaluator, make_objective
from specctl.runtime.words import resolve_policy
from specctl.stats import Resamples
from specctl.watch.drift import evidence
from specctl.watch.signals import Prompts, over, read_prompts, watched

SERVED = "threshold:min_level_prob=0.3"
REFERENCE, CHANGE, LENGTH, DAY = 300, 500, 1000, 100
"""Prompts of the reference, before the change, of the stream, and of a day."""
STRENGTHS = (0.15, 0.4, 1.0)
"""Share of the prompts after the change that are of the new kind."""
ROLLING, DROP = 100, 0.1
"""Of the bar: prompts of its mean, and how far below the reference's it may fall."""
RECENT = 240
"""Dense prompts that a recalibration is given, half of which choose."""
THRESHOLDS = tuple(
    f"threshold:min_prob={prob:g}:min_level_prob={level:g}:depth={depth}"
    for prob in (0.02, 0.05, 0.1, 0.2)
    for level in (0.0, 0.3, 0.5, 0.7)
    for depth in (3, 6, 8)
)
STATICS = (
    "ar",
    *(f"chain:num_draft_tokens={n}" for n in range(1, 9)),
    *(
        f"eagle2:depth={depth}:top_k={top_k}:num_tokens={size}"
        for depth in (2, 3, 4, 6, 8)
        for top_k in (2, 4, 10)
        for size in (4, 8, 12, 20, 32)
        if depth < size <= 1 + top_k + (depth - 1) * top_k**2
    ),
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A change: shares of the pool's prompts before it, and of the new ones."""

    name: str
    before: Floats
    new: Floats


@dataclass(frozen=True)
class World:
    """The pool that traffic is drawn from.

    Attributes:
        prompts: of every trace set under the served policy, the worse drafter's last.
        sums: `[policies, P, 2]` of all settings, tokens and microseconds that a request waits, on
            prompts of the better drafter.
    """

    prompts: Prompts
    kinds: tuple[Kind, ...]
    words: tuple[str, ...]
    sums: Floats
    num_better: int


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--traces", nargs="+", type=Path, required=True, help="dense workloads")
    options.add_argument("--worse", nargs="+", type=Path, required=True, help="the worse drafter's")
    options.add_argument("--cost-model", type=Path, required=True)
    options.add_argument("--streams", type=int, default=2000, help="streams without a change")
    options.add_argument("--changed", type=int, default=200, help="streams of each change")
    options.add_argument("--recalibrations", type=int, default=500, help="changes to regain")
    options.add_argument("--alpha", type=float, default=0.05)
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    given.device = "cpu"
    world = built(given)
    rows = [*alarm_rows(world, given), *recalibration_rows(world, given)]
    note = (
        f"{len(world.prompts)} prompts of {len(given.traces)} workloads and the worse drafter; "
        f"served: {SERVED}; {REFERENCE} reference prompts, change after {CHANGE} of {LENGTH}; "
        f"alpha {given.alpha:g}; delays in prompts: 10th, 50th, 90th percentile"
    )
    report("drift", rows, given, note)


def built(given: argparse.Namespace) -> World:
    """Reads and replays the pool once."""
    policy = resolve_policy(SERVED).policy
    better = [read_prompts(TraceSet.open(str(folder)), policy) for folder in given.traces]
    worse = [read_prompts(TraceSet.open(str(folder)), policy) for folder in given.worse]
    for one in worse:
        one.ids[:] = [f"worse {name}" for name in one.ids]
    names = ("ids", "category", "finished", "context", "sums")
    columns = ([getattr(one, name) for one in (*better, *worse)] for name in names)
    pool = Prompts(*map(np.concatenate, columns))
    is_better = np.arange(len(pool)) < (num_better := sum(map(len, better)))
    first = np.arange(len(pool)) < len(better[0])
    code = pool.category.astype(str) == "code"
    long = pool.context > np.median(pool.context[:num_better])
    kinds = (
        Kind(
            "another mix of known workloads",
            share(first & ~code) * 0.9 + share(first & code) * 0.1,
            share(first & code),
        ),
        Kind("a workload that was never there", share(first), share(is_better & ~first)),
        Kind("a worse drafter", share(first), share(~is_better)),
        Kind("longer prompts", share(is_better & ~long), share(is_better & long)),
    )
    words = (*THRESHOLDS, *STATICS)
    log = DenseLog.open(TraceSet.open(*map(str, given.traces), verify=False))
    evaluate = LogEvaluator(log, load_cost_model(given.cost_model), make_objective())
    names = tuple(pool.ids[:num_better])
    found = evaluate([resolve_policy(one).policy for one in words], names)
    return World(pool, kinds, words, np.stack([summed(one) for one in found]), num_better)


def summed(sums: Sums) -> Floats:
    return np.stack([sums.columns["decoded"], sums.columns["request_us"]], 1)


def share(chosen: Any) -> Floats:
    """Equal shares of the chosen prompts."""
    return np.asarray(chosen / chosen.sum())


# --------------------------------------------------------------------------- the alarm


def drawn(world: World, kind: Kind, strength: float, rng: np.random.Generator) -> Longs:
    """Prompts of a reference and a stream that changes in the middle, by index."""
    size = len(world.prompts)
    after = (1 - strength) * kind.before + strength * kind.new
    early = rng.choice(size, REFERENCE + CHANGE, p=kind.before)
    return np.concatenate([early, rng.choice(size, LENGTH - CHANGE, p=after)])


def alarm_rows(world: World, given: argparse.Namespace) -> Iterator[Row]:
    """Streams without a change, then each change, by three alarms."""
    conditions = [(world.kinds[0], 0.0, given.streams)]
    conditions += [(kind, s, given.changed) for kind in world.kinds for s in STRENGTHS]
    for at, (kind, strength, number) in enumerate(conditions):
        start, rng = time.perf_counter(), np.random.default_rng((at, 1))
        rings: dict[str, list[int]] = {name: [] for name in ALARMS}
        for stream in range(number):
            prompts = world.prompts.take(drawn(world, kind, strength, rng))
            reference, served = prompts.take(slice(REFERENCE)), prompts.take(slice(REFERENCE, None))
            for name, alarm in ALARMS.items():
                rings[name].append(alarm(reference, served, given.alpha, stream))
        print(f"{kind.name} {strength:g}: {time.perf_counter() - start:.0f} s", flush=True)
        for name, found in rings.items():
            yield row_of(name, kind.name if strength else "no change", strength, np.array(found))


def row_of(name: str, change: str, strength: float, rings: Longs) -> Row:
    """False alarms of all streams; delays of those that rang after the change."""
    end = CHANGE if strength else LENGTH
    early = int((rings < end).sum())
    interval = binomtest(early, len(rings)).proportion_ci()
    delays = rings[(rings >= CHANGE)] - CHANGE
    found = []
    if strength and len(delays):
        found = [f"{value:.0f}" for value in np.percentile(delays, (10, 50, 90))]
    missed = (delays >= LENGTH - CHANGE).mean() if strength else float("nan")
    return {
        "change": change,
        "strength": f"{strength:g}",
        "alarm": name,
        "streams": len(rings),
        "false": f"{early / len(rings):.3f} [{interval.low:.3f}, {interval.high:.3f}]",
        "delay": "/".join(found) or "-",
        "missed": f"{missed:.2f}" if strength else "-",
    }


def ours(reference: Prompts, stream: Prompts, alpha: float, seed: int) -> int:
    """`specctl drift`."""
    rung = evidence(watched(reference, stream), seed)[-1] >= 1 / alpha
    return int(rung.argmax()) if rung.any() else len(rung)


def rolling(reference: Prompts, stream: Prompts, alpha: float, seed: int) -> int:
    """A bar below the reference's mean acceptance length, on a rolling mean."""
    del alpha, seed

    def mean(sums: Floats) -> Floats:
        return sums[..., 0] / sums[..., 1]

    columns = ("tokens", "calls")
    table = np.stack([stream.column(name) for name in columns], 1).cumsum(0)
    last = np.concatenate([np.zeros((1, 2)), table])
    means = mean(last[ROLLING:] - last[:-ROLLING])
    known = mean(np.array([reference.column(name).sum() for name in columns]))
    rung = means < (1 - DROP) * known
    return int(rung.argmax()) + ROLLING - 1 if rung.any() else len(stream)


def daily(reference: Prompts, stream: Prompts, alpha: float, seed: int) -> int:
    """Welch's test of the day's tokens per call against the reference, at level alpha every day."""
    del seed
    known, seen = map(over, watched(reference, stream)["tokens per call"]["tokens per call"])
    for end in range(DAY, len(stream) + 1, DAY):
        if ttest_ind(known, seen[end - DAY : end], equal_var=False).pvalue < alpha:
            return end - 1
    return len(stream)


ALARMS: dict[str, Callable[[Prompts, Prompts, float, int], int]] = {
    "specctl drift": ours,
    f"mean of {ROLLING} falls by {DROP:.0%}": rolling,
    "t-test looked at daily": daily,
}


# --------------------------------------------------------------------------- recalibration


def recalibration_rows(world: World, given: argparse.Namespace) -> Iterator[Row]:
    """Changes of the traffic, what is lost by them, and what a recalibration regains.

    The deployed policy is the best threshold on a sample of the mix before. A recalibration that
    follows the alarm chooses on half of `RECENT` prompts of the new mix and judges on the others,
    by the rule of `specctl recalibrate`. The truth is the whole pool under the new shares.
    """
    kinds = [kind for kind in world.kinds if kind.new[: world.num_better].sum() > 0.99]
    rng = np.random.default_rng(11)
    rows: list[dict[str, float]] = []
    for number in range(given.recalibrations):
        kind = kinds[number % len(kinds)]
        strength = float(rng.choice((0.4, 0.7, 1.0)))
        rows.append(one_change(world, kind, strength, rng, given.alpha, number))
        if number % 50 == 49:
            print(f"{number + 1} recalibrations", flush=True)
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    lost = table["loss"] > 0.02
    for name, chosen in (
        ("all changes", np.ones(len(rows), bool)),
        ("changes that cost more than 2 %", lost),
        ("others", ~lost),
    ):
        num, promoted = int(chosen.sum()), table["promoted"][chosen] > 0
        if num == 0:
            continue
        worse = (table["gain"][chosen] < 0) & promoted
        high = binomtest(int(worse.sum()), num).proportion_ci().high
        regained = table["regained"][chosen] >= 0.8
        after = table["prompts"][chosen][promoted]
        yield {
            "recalibration": name,
            "changes": num,
            "promoted": f"{promoted.mean():.3f}",
            "worse than before": f"{worse.mean():.4f} (at most {high:.3f})",
            "regained 80 % of the loss": f"{regained.mean():.3f}" if name != "others" else "-",
            "mean gain where promoted": f"{table['gain'][chosen][promoted].mean():+.3f}"
            if promoted.any()
            else "-",
            "prompts from change to regained": "/".join(
                f"{value:.0f}" for value in np.percentile(after, (10, 50, 90))
            )
            if promoted.any()
            else "-",
        }


def one_change(
    world: World, kind: Kind, strength: float, rng: np.random.Generator, alpha: float, seed: int
) -> dict[str, float]:
    """Loss and gain as shares of the rate of the best threshold under the new mix."""
    size, thresholds = world.num_better, np.arange(len(THRESHOLDS))
    before = kind.before[:size] / kind.before[:size].sum()
    new = kind.new[:size] / kind.new[:size].sum()
    after = (1 - strength) * before + strength * new
    deployed = best(world.sums, rng.choice(size, RECENT // 2, p=before), thresholds)
    truth = rates(np.einsum("kps,p->ks", world.sums, after))
    stream = drawn(world, Kind(kind.name, kind.before, kind.new), strength, rng)
    prompts = world.prompts.take(stream)
    rung = ours(prompts.take(slice(REFERENCE)), prompts.take(slice(REFERENCE, None)), alpha, seed)
    recent = rng.choice(size, RECENT, p=after)
    choosing, judging = recent[: RECENT // 2], recent[RECENT // 2 :]
    chosen = best(world.sums, choosing, thresholds)
    static = best(world.sums, choosing, np.arange(len(THRESHOLDS), len(world.words)))
    resamples = Resamples.draw(len(judging), seed=seed)
    drawn_rates = [
        rates(resamples.drawn(world.sums[k][judging])) for k in (chosen, deployed, static)
    ]
    better = chosen != deployed and all(
        resamples.read(drawn_rates[0] / other).low > 1 for other in drawn_rates[1:]
    )
    promoted = better and CHANGE <= rung < LENGTH
    most = truth[thresholds].max()
    loss = 1 - truth[deployed] / most
    gain = (truth[chosen] - truth[deployed]) / truth[deployed] if promoted else 0.0
    kept = truth[chosen] if promoted else truth[deployed]
    return {
        "loss": loss,
        "promoted": float(promoted),
        "gain": gain,
        "regained": (kept - truth[deployed]) / (most - truth[deployed]) if loss > 0 else 1.0,
        "prompts": float(rung - CHANGE + RECENT),
    }


def best(sums: Floats, prompts: Longs, settings: Longs) -> int:
    """The setting of the highest rate on some prompts."""
    return int(settings[np.argmax(rates(sums[settings][:, prompts].sum(1)))])


def rates(sums: Floats) -> Floats:
    """Tokens per second of sums `[..., 2]`, see `World.sums`."""
    return 1e6 * sums[..., 0] / sums[..., 1]


if __name__ == "__main__":
    main()
