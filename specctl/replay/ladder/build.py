"""The ladder of one log at one load, tuned on training prompts and measured on held-out ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from specctl.errors import UsageError
from specctl.logs.node_table import labelled_nodes
from specctl.logs.positions import Ints, Positions
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, sampled
from specctl.policy import PerRequest, Policy, RootOnly, at_batch_size
from specctl.progress import advance, progress
from specctl.replay.config import LadderConfig
from specctl.replay.cost.model import CostModel
from specctl.replay.facts import MARKED_BELOW, PLAIN
from specctl.replay.held_out import choose_prompts, logged_prompts
from specctl.replay.ladder.estimates import fit_estimates
from specctl.replay.ladder.limits import (
    Ranked,
    best_trees,
    clairvoyant,
    rank_log,
    ranked_widths,
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
from specctl.replay.metrics import (
    LoadClock,
    Measure,
    Sums,
    by_prompt,
    ratio,
    replayed_sums,
    request_sums,
)
from specctl.replay.outcomes import Outcomes
from specctl.replay.results import facts_of
from specctl.replay.rounds import walk_outcomes
from specctl.replay.tune.candidates import static_settings
from specctl.runtime.words import resolve_policies
from specctl.stats import Resamples, Split, split_prompts

LIMITS: dict[RungKind, str] = {
    "features": "R_feat",
    "oracle": "R_prob",
    "clairvoyant": "R_clair",
    "ceiling": "R_ceil",
}
"""Labels of the limits."""
MAX_CALIBRATED = 20_000
"""Positions that the estimates are fitted to, a sample of whole prompts: about a million labelled
nodes, which is more than their few parameters can use."""


def run_ladder(
    traces: TraceSet,
    model: CostModel,
    specs: Sequence[str] = (),
    *,
    batch_size: int = 1,
    config: LadderConfig | None = None,
) -> LadderResult:
    """The ladder of a dense trace set.

    Args:
        specs: names with settings, or artifact folders of this pair.

    Raises:
        UsageError: a policy that cannot be replayed, or a load beyond the cost model.
        TraceError, ArtifactError: see `specctl.errors`.
    """
    config = config or LadderConfig()
    log = sampled(DenseLog.open(traces), config.max_positions, config.seed)
    named = resolve_policies(",".join(specs), traces.fingerprint) if specs else []
    share, seed = config.held_out_frac, config.seed
    sides = split_prompts(log.prompts or logged_prompts(traces), held_out_frac=share, seed=seed)
    choice: dict[str, Any] = {"split": (share, seed), "all_prompts": config.all_prompts}
    scored = choose_prompts(sides.held_out, named, traces, **choice)
    torch.set_num_threads(1)
    ladder = build_ladder(
        log,
        Split(sides.train, scored.prompts),
        LoadClock(model, batch_size),
        [(item.label, item.policy) for item in named],
        is_sampled=bool(traces.header.sampling["temperature"]),
        config=config,
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
) -> Ladder:
    """Tunes on training prompts, then measures every rung on the same held-out ones.

    Args:
        sides: prompts for tuning and for measuring.
        policies: labels and policies between the static rungs and the limits.
    """
    config = config or LadderConfig()
    clock.check()
    for label, policy in policies:
        if label in LIMITS.values() or label == PLAIN:
            raise UsageError(f"policy {label}: the ladder has a rung of that name; leave it out")
        if not isinstance(policy.budget, PerRequest):
            raise UsageError(
                f"{label} has no place on the ladder: a batch shares its budget, "
                f"{policy.budget.kind}",
                hint="score it with specctl replay --batch-size, which simulates the batch",
            )
    train, held_out = log.only(sides.train), log.only(sides.held_out)
    with progress("positions", 2 * log.num_positions):
        estimates = fit_estimates(
            labelled_nodes(sampled(log, MAX_CALIBRATED, config.seed, warn=False)),
            frozenset(sides.train),
            num_folds=config.num_folds,
            is_sampled=is_sampled,
            seed=config.seed,
        )
        trained, ranked = {}, {}
        widths = ranked_widths(log.support)
        for key, one in rank_log(log, estimates, widths, num_kept=config.num_kept):
            trained[key], ranked[key] = one.of(sides.train), one.of(sides.held_out)
    given = [
        of.model_copy(update={"shape": at_batch_size(of.shape, clock.batch_size)})
        for of in (Policy(shape=RootOnly()), *(of for _, of in policies))
    ]
    with progress("settings", len(given)):
        plain, *others = replayed_sums(held_out, given, clock)
    rungs = [SummedRung("plain", PLAIN, "no drafting", plain)]
    best: tuple[float, str] = 0.0, ""
    words: dict[RungKind, str] = {"chain": "chain", "tree": "eagle2"}
    for kind, word in words.items():
        rate, rung = _static_rung(kind, word, train, held_out, clock)
        best = max(best, (rate, rung.label), key=itemgetter(0))
        rungs.append(rung)
    rungs += [
        SummedRung("policy", label, "as given", sums)
        for (label, _), sums in zip(policies, others, strict=True)
    ]
    start = float(ratio("tokens_per_s", plain.totals)) / 1e6
    with progress("prices", len(trained)):
        rungs += _best_tree_rungs(trained, ranked, clock, start)
    any_of_them = next(iter(ranked.values()))
    matched, positions = any_of_them.matched, any_of_them.positions
    knowing: dict[RungKind, tuple[Ints, str]] = {
        "clairvoyant": (matched, "knows the path inside the logged tree"),
        "ceiling": (np.full_like(matched, log.support.depth), "every draft token accepted"),
    }
    for kind, (reach, setting) in knowing.items():
        decided = clairvoyant(positions, reach, clock)
        rungs.append(_limit(kind, setting, positions, decided, clock))
    measured, split = measure(rungs, best[1], time_error=clock.model.time_error, seed=config.seed)
    return Ladder(
        rungs=measured,
        best_static=best[1],
        split=split,
        calibration=estimates.quality,
        oracle_features=estimates.oracle_features,
        num_prompts=SideSizes(train=len(sides.train), held_out=len(sides.held_out)),
        batch_size=clock.batch_size,
        is_sampled=is_sampled,
        config=config.model_dump(),
    )


# ------------------------------------------------------------------------------- from log to sums


@dataclass(frozen=True)
class SummedRung:
    """A rung before it is measured."""

    kind: RungKind
    label: str  # unique
    setting: str  # in words
    sums: Sums  # of held-out prompts


def _static_rung(
    kind: RungKind, word: str, train: DenseLog, held_out: DenseLog, clock: LoadClock
) -> tuple[float, SummedRung]:
    """The fastest setting of a static family on training prompts, and its rate there, tokens/s.

    Settings of which the log lacks an expansion in over 1% of their rounds do not compete.
    """
    settings = static_settings(word, train.support)
    with progress("settings", len(settings)):
        found = replayed_sums(train, [one.policy for one in settings], clock)
    rates = {
        index: float(ratio("tokens_per_s", sums.totals))
        for index, sums in enumerate(found)
        if sums.is_supported
    }
    if not rates:
        raise UsageError(
            "the log lacks expansions in over 1% of the rounds of every static tree",
            hint="collect with --nested",
        )
    index = max(rates, key=rates.__getitem__)
    [sums] = replayed_sums(held_out, [settings[index].policy], clock)
    setting = f"fastest of {len(rates)} on training prompts"
    return rates[index], SummedRung(kind, settings[index].label, setting, sums)


def _best_tree_rungs(
    trained: dict[tuple[str, int], Ranked],
    ranked: dict[tuple[str, int], Ranked],
    clock: LoadClock,
    start: float,
) -> Iterator[SummedRung]:
    """The best trees, at the width and price of the training prompts.

    R_prob takes the estimate that is faster on training prompts, since an oracle may ignore its
    knowledge.

    Args:
        trained, ranked: of training and of held-out prompts, by estimate and width.
        start: first price, tokens per us.
    """
    priced: dict[tuple[str, int], tuple[float, float]] = {}
    for key, of_train in trained.items():
        priced[key] = tune_price(of_train, clock, start)
        advance("prices")
    allowed: dict[RungKind, tuple[str, ...]] = {
        "features": ("features",),
        "oracle": ("features", "oracle"),
    }
    for kind, names in allowed.items():
        best = max((key for key in priced if key[0] in names), key=lambda key: priced[key][1])
        (name, width), (price, _), found = best, priced[best], ranked[best]
        decided = best_trees(found, tree_times(found, clock), price)
        setting = f"estimate {name}, width {width}, λ* {1e6 * price:.4g} tokens/s"
        yield _limit(kind, setting, found.positions, decided, clock)


def _limit(
    kind: RungKind, setting: str, positions: Positions, decided: Outcomes, clock: LoadClock
) -> SummedRung:
    run = walk_outcomes(None, positions, decided)
    return SummedRung(kind, LIMITS[kind], setting, by_prompt(positions, request_sums(run, clock)))


# ------------------------------------------------------------------------- from sums to distances


def measure(
    rungs: Sequence[SummedRung], best_static: str, *, time_error: float | None = None, seed: int
) -> tuple[tuple[Rung, ...], LossSplit]:
    """Figures of all rungs on the same resamples of prompts, so that distances are paired.

    Args:
        time_error: of the clock, see `stats.with_time_error`.
    """
    prompts = rungs[0].sums.rows
    resamples = Resamples.draw(len(prompts), seed=seed)
    paired, interval = Measure(resamples, time_error, seed), resamples.read
    drawn = {rung.label: paired.drawn(rung.sums.select(prompts), rung.label) for rung in rungs}
    rates = {label: ratio("tokens_per_s", totals) for label, totals in drawn.items()}
    static = rates[best_static]
    features, oracle, outcome = (rates[LIMITS[k]] for k in LIMITS if k != "ceiling")
    has_gap = interval(oracle - static).low > 0
    found = []
    for rung in rungs:
        rate, total, support = rates[rung.label], rung.sums.totals, rung.sums.support
        found.append(
            Rung(
                kind=rung.kind,
                label=rung.label,
                setting=rung.setting,
                num_tokens=int(total["tokens"]),
                calls=int(total["calls"]),
                verified_tokens=int(total["verified"]),
                num_accepted=int(total["accepted"]),
                drafted_levels=int(total["levels"]),
                time_us=total["time_us"],
                tokens_per_s=interval(rate),
                mean_acceptance_length=interval(ratio("mean_acceptance_length", drawn[rung.label])),
                against_static=interval(rate / static),
                against_plain=interval(rate / rates[PLAIN]),
                gap_closed=interval((rate - static) / (oracle - static)) if has_gap else None,
                policy_regret=interval(features - rate) if rung.kind in RUNNABLE else None,
                support=support,
                is_marked=support < MARKED_BELOW,
                is_estimate=rung.kind in ("features", "oracle"),
            )
        )
    split = LossSplit(
        irreducible=interval(outcome - oracle),
        drafter=interval(oracle - features),
        headroom=interval(oracle / static - 1),
    )
    return tuple(found), split
