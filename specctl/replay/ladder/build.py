"""The ladder of one log at one load: tuned on training prompts, measured on held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specctl.errors import UsageError
from specctl.logs.node_table import sample_labelled
from specctl.logs.positions import Floats, Ints, Positions
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, sampled_prompts
from specctl.policy import PerRequest, Policy, RootOnly, at_batch_size
from specctl.replay.config import LadderConfig, ShowProgress, Tick, no_progress
from specctl.replay.cost.model import CostModel
from specctl.replay.facts import MARKED_BELOW, PLAIN
from specctl.replay.held_out import choose_prompts, logged_prompts
from specctl.replay.ladder.estimates import Estimates, fit_estimates
from specctl.replay.ladder.limits import (
    Ranked,
    best_trees,
    clairvoyant,
    rank_log,
    tree_times,
    tune_price,
)
from specctl.replay.ladder.result import (
    RUNNABLE,
    Ladder,
    LadderResult,
    LossSplit,
    Rung,
    RungKind,
    SideSizes,
)
from specctl.replay.ladder.static import (
    Static,
    chains,
    fastest,
    spec_of,
    static_submissions,
    swept_widths,
    tally_static,
    trees,
)
from specctl.replay.ladder.tally import (
    SUMS,
    LoadClock,
    column,
    tally,
    tally_rounds,
    tokens_per_us,
)
from specctl.replay.results import facts_of
from specctl.replay.rounds import replay
from specctl.runtime.words import resolve_policies
from specctl.stats import Resamples, Split, split_prompts, sums_by, with_time_error

LIMITS: dict[RungKind, str] = {
    "features": "R_feat",
    "oracle": "R_prob",
    "clairvoyant": "R_clair",
    "ceiling": "R_ceil",
}
"""Labels of the rungs that are no policies."""


def run_ladder(
    traces: TraceSet,
    model: CostModel,
    specs: Sequence[str] = (),
    *,
    batch_size: int = 1,
    config: LadderConfig | None = None,
    progress: ShowProgress = no_progress,
    warn: Callable[[str], None] = lambda _: None,
) -> LadderResult:
    """The ladder of a dense trace set.

    Args:
        specs: names with settings, or artifact folders of this pair.
        warn: called with a line where only a sample of the prompts is read, and for policies that
            cannot win.

    Raises:
        UsageError: a policy that cannot be replayed, or a load that was not measured.
        TraceError, ArtifactError: see `specctl.errors`.
    """
    config = config or LadderConfig()
    log = sampled_prompts(DenseLog.open(traces), config.max_positions, config.seed, warn)
    named = resolve_policies(",".join(specs), traces.fingerprint) if specs else []
    share, seed = config.held_out_frac, config.seed
    sides = split_prompts(log.prompts or logged_prompts(traces), held_out_frac=share, seed=seed)
    choice: dict[str, Any] = {"split": (share, seed), "all_prompts": config.all_prompts}
    scored = choose_prompts(sides.held_out, named, traces, **choice, warn=warn)
    torch.set_num_threads(1)
    ladder = build_ladder(
        log,
        Split(sides.train, scored.prompts),
        LoadClock(model, batch_size),
        [(item.label, item.policy) for item in named],
        is_sampled=bool(traces.header.sampling["temperature"]),
        config=config,
        progress=progress,
    )
    facts = facts_of(traces, log, model, named, scored)
    return LadderResult(kind="ladder", **facts, **dict(ladder))


def build_ladder(
    log: DenseLog,
    sides: Split,
    clock: LoadClock,
    policies: Sequence[tuple[str, Policy]] = (),
    *,
    is_sampled: bool = False,
    config: LadderConfig | None = None,
    progress: ShowProgress = no_progress,
) -> Ladder:
    """Every rung on the same held-out prompts.

    Args:
        sides: prompts of the log that are tuned on, and those that are measured.
        policies: labels and policies between the static rungs and the limits; each must be
            replayable, position by position.

    Raises:
        UsageError: a policy that cannot be replayed. TraceError: see `DenseLog`.
        TraceEmptyError: nothing to calibrate on.
    """
    config = config or LadderConfig()
    clock.check()
    for label, policy in policies:
        _check_policy(label, policy)
    tallied = tally_rungs(
        log, sides, clock, policies, is_sampled=is_sampled, config=config, progress=progress
    )
    rungs, split = measure(tallied, time_error=clock.model.time_error, seed=config.seed)
    return Ladder(
        rungs=rungs,
        best_static=tallied.best_static,
        split=split,
        calibration=tallied.estimates.quality,
        oracle_features=tallied.estimates.oracle_features,
        num_prompts=SideSizes(train=len(sides.train), held_out=len(sides.held_out)),
        batch_size=clock.batch_size,
        is_sampled=is_sampled,
        config=config.model_dump(),
    )


def _check_policy(label: str, policy: Policy) -> None:
    if label in LIMITS.values() or label == PLAIN:
        raise UsageError(
            f"policy {label}: expected a label that the ladder does not use itself, found "
            f"{'ar, which is always there' if label == PLAIN else label}",
            hint="leave it out",
        )
    if not isinstance(policy.budget, PerRequest):
        raise UsageError(
            f"ladder with {label}: expected policies that decide for one request at a time, "
            f"found budget {policy.budget.kind}, shared by a batch",
            hint="score it with specctl replay --batch-size, which simulates the batch",
        )


# ------------------------------------------------------------------------------- from log to sums


@dataclass(frozen=True)
class TalliedRung:
    """A rung before it is measured.

    Attributes:
        label: unique. setting: in words. sums: `[Q, S]` of held-out requests, see `tally`.
        support: share of the wanted expansions and rounds that the log contains.
    """

    kind: RungKind
    label: str
    setting: str
    sums: Floats
    support: float = 1.0


@dataclass(frozen=True)
class TalliedLadder:
    """All rungs before they are measured, the same held-out requests in each.

    Attributes:
        best_static: label of the static rung that training prompts preferred.
        prompt: `[Q]` codes of the requests' prompts.
    """

    rungs: list[TalliedRung]
    best_static: str
    prompt: Ints
    estimates: Estimates


def tally_rungs(
    log: DenseLog,
    sides: Split,
    clock: LoadClock,
    policies: Sequence[tuple[str, Policy]],
    *,
    is_sampled: bool,
    config: LadderConfig,
    progress: ShowProgress = no_progress,
) -> TalliedLadder:
    """Tunes on the log of training prompts, then adds up what the held-out ones gave."""
    train, held_out = log.only(sides.train), log.only(sides.held_out)
    widths, num_kept = swept_widths(log.support), config.num_kept
    with progress("positions read", 2 * log.num_positions) as tick:
        sample = sample_labelled(
            log, num_nodes=config.num_nodes, seed=config.seed, on_positions=tick
        )
        estimates = fit_estimates(
            sample,
            frozenset(sides.train),
            num_folds=config.num_folds,
            is_sampled=is_sampled,
            seed=config.seed,
        )
        seen, ranked = {}, {}
        for key, one in rank_log(log, estimates, widths, num_kept=num_kept, on_positions=tick):
            seen[key], ranked[key] = one.of(sides.train), one.of(sides.held_out)
    any_of_them = next(iter(ranked.values()))
    positions, matched = any_of_them.positions, any_of_them.matched
    with progress("policies replayed", positions.num_rows) as tick:
        plain, *replayed = _policy_rungs(held_out, policies, clock, tick)
    chain_grid, tree_grid = chains(log.support), trees(log.support, num_kept)
    with progress("settings tuned", len(chain_grid) + len(tree_grid) + len(seen)) as tick:
        chain_rate, chain = _static_rung("chain", chain_grid, train, held_out, clock, tick)
        tree_rate, tree = _static_rung("tree", tree_grid, train, held_out, clock, tick)
        start = float(tokens_per_us(plain.sums.sum(0)))
        limits = [
            *_best_tree_rungs(seen, ranked, clock, start, tick),
            *_bounding_rungs(positions, matched, log.support.depth, clock),
        ]
    best_static = tree.label if tree_rate > chain_rate else chain.label
    rungs = [plain, chain, tree, *replayed, *limits]
    return TalliedLadder(rungs, best_static, positions.prompt, estimates)


def _policy_rungs(
    log: DenseLog, policies: Sequence[tuple[str, Policy]], clock: LoadClock, tick: Tick
) -> Iterator[TalliedRung]:
    """Plain decoding, and the policies that were given."""
    wanted = [
        of.model_copy(update={"shape": at_batch_size(of.shape, clock.batch_size)})
        for of in (Policy(shape=RootOnly()), *(of for _, of in policies))
    ]
    plain, *given = replay(log, wanted, with_bounds=False, on_positions=tick)
    yield TalliedRung("plain", PLAIN, "no drafting", tally_rounds(plain, clock))
    for (label, _), run in zip(policies, given, strict=True):
        sums = tally_rounds(run, clock)
        yield TalliedRung("policy", label, "as given", sums, run.outcomes.support)


def _static_rung(
    kind: RungKind,
    shapes: Sequence[Static],
    train: DenseLog,
    held_out: DenseLog,
    clock: LoadClock,
    tick: Tick,
) -> tuple[float, TalliedRung]:
    """The fastest shape on training prompts, and its rate there, tokens per us."""
    shape, rate, num_settings = fastest(train, shapes, clock, tick)
    [(_, of)] = static_submissions(held_out, [Policy(shape=shape)])
    setting = f"fastest of {num_settings} on training prompts"
    return rate, TalliedRung(kind, spec_of(shape), setting, tally_static(of, clock)[0])


def _best_tree_rungs(
    seen: dict[tuple[str, int], Ranked],
    ranked: dict[tuple[str, int], Ranked],
    clock: LoadClock,
    start: float,
    tick: Tick,
) -> Iterator[TalliedRung]:
    """The best trees, at the width and price at which training prompts settle.

    An oracle may leave its knowledge unused, so R_prob takes the estimate that served the
    training prompts better.

    Args:
        seen, ranked: of training and of held-out prompts, by estimate and width.
        start: the first price that is tried, tokens per us.
    """
    priced: dict[tuple[str, int], tuple[float, float]] = {}
    for key, trees_seen in seen.items():
        priced[key] = tune_price(trees_seen, clock, start)
        tick()
    allowed: dict[RungKind, tuple[str, ...]] = {
        "features": ("features",),
        "oracle": ("features", "oracle"),
    }
    for kind, names in allowed.items():
        best = max((key for key in priced if key[0] in names), key=lambda key: priced[key][1])
        (name, width), (price, _), found = best, priced[best], ranked[best]
        decided = best_trees(found, tree_times(found, clock), price)
        setting = f"estimate {name}, width {width}, λ* {1e6 * price:.4g} tokens/s"
        sums = tally(found.positions, decided, clock, level_width=width)
        yield TalliedRung(kind, LIMITS[kind], setting, sums)


def _bounding_rungs(
    positions: Positions, matched: Ints, depth: int, clock: LoadClock
) -> Iterator[TalliedRung]:
    """The least time that any knowledge could need: within the logged trees, and within `depth`."""
    knowing: dict[RungKind, tuple[Ints, str]] = {
        "clairvoyant": (matched, "knows the path inside the logged tree"),
        "ceiling": (np.full_like(matched, depth), "every draft token accepted"),
    }
    for kind, (reach, setting) in knowing.items():
        sums = tally(positions, clairvoyant(positions, reach, clock), clock, level_width=1)
        yield TalliedRung(kind, LIMITS[kind], setting, sums)


# ------------------------------------------------------------------------- from sums to distances


def measure(
    tallied: TalliedLadder, *, time_error: float | None = None, seed: int
) -> tuple[tuple[Rung, ...], LossSplit]:
    """Figures of all rungs on the same resamples of prompts, so that distances are paired.

    Args:
        time_error: of the clock, see `stats.with_time_error`.
    """
    _, codes = np.unique(tallied.prompt, return_inverse=True)
    num_prompts = int(codes.max()) + 1
    resamples = Resamples.draw(num_prompts, seed=seed)
    tables = [resamples.drawn(sums_by(codes, num_prompts, r.sums)) for r in tallied.rungs]
    times = [SUMS.index("time_us")]
    drawn = np.stack(
        [
            with_time_error(sums, times, time_error, rung.label, seed)
            for rung, sums in zip(tallied.rungs, tables, strict=True)
        ],
        1,
    )
    rates = 1e6 * tokens_per_us(drawn)
    labels = [rung.label for rung in tallied.rungs]
    static, features, oracle, outcome = (
        rates[:, labels.index(label)]
        for label in (tallied.best_static, *(LIMITS[k] for k in LIMITS if k != "ceiling"))
    )
    interval = resamples.read
    has_gap = interval(oracle - static).low > 0
    rungs = []
    for place, rung in enumerate(tallied.rungs):
        sums, rate, total = drawn[:, place], rates[:, place], rung.sums.sum(0)
        length = 1 + column(sums, "accepted") / column(sums, "calls")
        closed = interval((rate - static) / (oracle - static)) if has_gap else None
        rungs.append(
            Rung(
                kind=rung.kind,
                label=rung.label,
                setting=rung.setting,
                num_tokens=int(column(total, "tokens")),
                calls=int(column(total, "calls")),
                verified_tokens=int(column(total, "verified")),
                num_accepted=int(column(total, "accepted")),
                drafted_levels=int(column(total, "levels")),
                time_us=float(column(total, "time_us")),
                tokens_per_s=interval(rate),
                mean_acceptance_length=interval(length),
                against_static=interval(rate / static),
                against_plain=interval(rate / rates[:, labels.index(PLAIN)]),
                gap_closed=closed,
                policy_regret=interval(features - rate) if rung.kind in RUNNABLE else None,
                support=rung.support,
                is_marked=rung.support < MARKED_BELOW,
                is_estimate=rung.kind in ("features", "oracle"),
            )
        )
    split = LossSplit(
        irreducible=interval(outcome - oracle),
        drafter=interval(oracle - features),
        headroom=interval(oracle / static - 1),
    )
    return tuple(rungs), split
